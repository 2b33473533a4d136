package holdfast.integration;

import holdfast.FencedLock;
import holdfast.Holdfast;
import holdfast.LockSpec;
import java.time.Duration;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.Lock;
import java.util.function.Function;
import org.springframework.integration.support.locks.ExpirableLockRegistry;
import org.springframework.integration.support.locks.RenewableLockRegistry;

/** What the registries for two versions of Spring Integration share: all but the type of their locks. */
abstract class Registry<L extends Lock> implements ExpirableLockRegistry<L>, RenewableLockRegistry<L> {
    private static final int OBJECTS = 10_000;

    private final Holdfast client;
    private final String prefix;
    private final Function<FencedLock, L> adapter;
    /** One object for each key, of the keys that were used last. The objects have no state: a lock is the same with another object. */
    private final Map<String, L> locks = Collections.synchronizedMap(new LinkedHashMap<>(16, 0.75f, true) {
        @Override
        protected boolean removeEldestEntry(Map.Entry<String, L> eldest) {
            return size() > OBJECTS;
        }
    });

    Registry(Holdfast client, String prefix, Function<FencedLock, L> adapter) {
        this.client = client;
        this.prefix = prefix;
        this.adapter = adapter;
    }

    /** Returns the lock of this key, which must be a String. */
    @Override
    public L obtain(Object lockKey) {
        return locks.computeIfAbsent(name(lockKey), name -> adapter.apply(lock(name)));
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

    /** Forgets all objects if the age is negative. Otherwise does nothing: there are at most 10,000, which have no state. */
    @Override
    public void expireUnusedOlderThan(long age) {
        if (age < 0) {
            locks.clear();
        }
    }

    /** Restarts the lease of the current thread's hold, with the client's lease. */
    @Override
    public void renewLock(Object lockKey) {
        renew(lockKey, 0);
    }

    /** Restarts the lease of the current thread's hold, with this duration from now on. */
    @Override
    public void renewLock(Object lockKey, Duration ttl) {
        renew(lockKey, Math.max(1, ttl.toMillis()));
    }

    private void renew(Object key, long ms) {
        try {
            lock(name(key)).renew(ms, TimeUnit.MILLISECONDS);
        } catch (IllegalMonitorStateException why) {
            throw new IllegalStateException("Could not renew the lock '" + key + "': it is not held by this thread", why);
        }
    }
}
