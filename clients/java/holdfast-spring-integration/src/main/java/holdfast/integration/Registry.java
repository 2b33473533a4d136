package holdfast.integration;

import holdfast.FencedLock;
import holdfast.Holdfast;
import holdfast.LockSpec;
import java.time.Duration;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.Lock;
import java.util.function.Function;
import java.util.stream.Collectors;
import org.springframework.integration.support.locks.ExpirableLockRegistry;
import org.springframework.integration.support.locks.RenewableLockRegistry;

/** What the registries for two versions of Spring Integration share: all but the type of their locks. */
abstract class Registry<L extends Lock> implements ExpirableLockRegistry<L>, RenewableLockRegistry<L> {
    /**
     * An object for a key.
     *
     * @param last when it was obtained last, by {@link System#nanoTime}
     */
    private record Obtained<L>(L lock, AtomicLong last) {}

    private static final int OBJECTS = 10_000;

    private final Holdfast client;
    private final String prefix;
    private final Function<FencedLock, L> adapter;
    /** One object for each key, of the keys that were used last. The objects have no state: a lock is the same with another object. */
    private final Map<String, Obtained<L>> locks = Collections.synchronizedMap(new LinkedHashMap<>(16, 0.75f, true) {
        @Override
        protected boolean removeEldestEntry(Map.Entry<String, Obtained<L>> eldest) {
            return size() > OBJECTS;
        }
    });

    Registry(Holdfast client, String prefix, Function<FencedLock, L> adapter) {
        this.client = Objects.requireNonNull(client, "client");
        this.prefix = Objects.requireNonNull(prefix, "prefix");
        this.adapter = adapter;
    }

    /** Returns the lock of this key, which must be a String. */
    @Override
    public L obtain(Object lockKey) {
        Obtained<L> obtained = locks.computeIfAbsent(name(lockKey), name -> new Obtained<>(adapter.apply(lock(name)), new AtomicLong()));
        obtained.last.set(System.nanoTime());
        return obtained.lock;
    }

    /** The registry is the scope: as for other registries, the locks of two exclude each other also in one thread. */
    private FencedLock lock(String name) {
        return client.fencedLock(LockSpec.of(name), this);
    }

    private String name(Object key) {
        if (!(key instanceof String name)) {
            throw new IllegalArgumentException("a lock key must be a String, got " + key);
        }
        return prefix + name;
    }

    /** Forgets the objects that were obtained at least {@code age} ms ago and whose locks this client does not hold. */
    @Override
    public void expireUnusedOlderThan(long age) {
        Set<String> held = client.holds().stream().flatMap(hold -> hold.names().stream()).collect(Collectors.toSet());
        long now = System.nanoTime();
        locks.entrySet().removeIf(it -> now - it.getValue().last.get() >= TimeUnit.MILLISECONDS.toNanos(age) && !held.contains(it.getKey()));
    }

    /** Restarts the lease of the current thread's hold, with the client's lease. */
    @Override
    public void renewLock(Object lockKey) {
        renew(lockKey, 0);
    }

    /** Restarts the lease of the current thread's hold, with this duration from now on. */
    @Override
    public void renewLock(Object lockKey, Duration ttl) {
        renew(lockKey, lease(ttl));
    }

    private void renew(Object key, long lease) {
        try {
            lock(name(key)).renew(lease, TimeUnit.NANOSECONDS);
        } catch (IllegalMonitorStateException why) {
            throw new IllegalStateException("Could not renew the lock '" + key + "': it is not held by this thread", why);
        }
    }

    /** Converts to ns, at most 292 years. For {@link FencedLock}, a time of 0 or less would mean a lock that is renewed. */
    static long lease(Duration ttl) {
        if (ttl.isZero() || ttl.isNegative()) {
            throw new IllegalArgumentException("ttl must be positive, got " + ttl);
        }
        return TimeUnit.NANOSECONDS.convert(ttl);
    }
}
