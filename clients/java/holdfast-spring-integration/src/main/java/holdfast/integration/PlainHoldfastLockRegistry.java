package holdfast.integration;

import holdfast.Holdfast;
import java.time.Duration;
import java.util.concurrent.locks.Lock;
import org.springframework.integration.support.locks.RenewableLockRegistry;

/** {@link HoldfastLockRegistry} for Spring Integration 6, which has no {@code DistributedLock}. */
public final class PlainHoldfastLockRegistry implements RenewableLockRegistry<Lock> {
    private final Registry registry;

    /** Locks with the names {@code <prefix><key>}. */
    public PlainHoldfastLockRegistry(Holdfast client, String prefix) {
        registry = new Registry(client, prefix);
    }

    @Override
    public Lock obtain(Object lockKey) {
        return new RegistryLock(registry.lock(lockKey));
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
}
