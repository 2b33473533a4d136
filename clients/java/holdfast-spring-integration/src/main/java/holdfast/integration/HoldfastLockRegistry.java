package holdfast.integration;

import holdfast.Holdfast;
import java.time.Duration;
import org.springframework.integration.support.locks.DistributedLock;
import org.springframework.integration.support.locks.RenewableLockRegistry;

/**
 * Locks of Holdfast for Spring Integration 7. A lock is renewed until it is unlocked, unless a time to live is given. It is re-entrant and
 * belongs to a thread. For Spring Integration 6, {@link PlainHoldfastLockRegistry} does the same without {@link DistributedLock}.
 */
public final class HoldfastLockRegistry implements RenewableLockRegistry<DistributedLock> {
    private final Registry registry;

    /** Locks with the names {@code <prefix><key>}. */
    public HoldfastLockRegistry(Holdfast client, String prefix) {
        registry = new Registry(client, prefix);
    }

    @Override
    public DistributedLock obtain(Object lockKey) {
        return new TimedLock(registry.lock(lockKey));
    }

    /** Begins the lease of the current thread's hold anew, with the client's lease. */
    @Override
    public void renewLock(Object lockKey) {
        registry.renew(lockKey, Duration.ZERO);
    }

    /** Begins the lease of the current thread's hold anew, with this length from now on. */
    @Override
    public void renewLock(Object lockKey, Duration ttl) {
        registry.renew(lockKey, ttl);
    }

    private static final class TimedLock extends RegistryLock implements DistributedLock {
        TimedLock(holdfast.FencedLock lock) {
            super(lock);
        }

        @Override
        public void lock(Duration ttl) {
            lock.lock(Math.max(1, ttl.toMillis()), java.util.concurrent.TimeUnit.MILLISECONDS);
        }

        @Override
        public boolean tryLock(Duration waitTime, Duration ttl) throws InterruptedException {
            return super.tryLock(waitTime, ttl);
        }
    }
}
