package holdfast.integration;

import holdfast.FencedLock;
import holdfast.Holdfast;
import java.time.Duration;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.Lock;
import org.springframework.integration.support.locks.RenewableLockRegistry;

/** What the registries for two versions of Spring Integration share: all but the type of their locks. */
abstract class Registry<L extends Lock> implements RenewableLockRegistry<L> {
    private final Holdfast client;
    private final String prefix;

    Registry(Holdfast client, String prefix) {
        this.client = client;
        this.prefix = prefix;
    }

    final FencedLock lock(Object key) {
        if (!(key instanceof String name)) {
            throw new IllegalArgumentException("a lock key is a String, not " + key);
        }
        return client.fencedLock(prefix + name);
    }

    /** Restarts the lease of the current thread's hold, with the client's lease. */
    @Override
    public void renewLock(Object lockKey) {
        renewLock(lockKey, Duration.ZERO);
    }

    /** Restarts the lease of the current thread's hold, with this duration from now on. */
    @Override
    public void renewLock(Object lockKey, Duration ttl) {
        try {
            lock(lockKey).renew(ttl.toMillis(), TimeUnit.MILLISECONDS);
        } catch (IllegalMonitorStateException why) {
            throw new IllegalStateException("Could not renew the lock '" + lockKey + "': it is not held by this thread", why);
        }
    }
}
