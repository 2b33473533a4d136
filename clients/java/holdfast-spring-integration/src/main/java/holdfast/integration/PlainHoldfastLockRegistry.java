package holdfast.integration;

import holdfast.Holdfast;
import java.util.concurrent.locks.Lock;

/** {@link HoldfastLockRegistry} for Spring Integration 6, which has no {@code DistributedLock}. */
public final class PlainHoldfastLockRegistry extends Registry<Lock> {
    /** Makes a registry of locks with the names {@code <prefix><key>}. */
    public PlainHoldfastLockRegistry(Holdfast client, String prefix) {
        super(client, prefix, RegistryLock::new);
    }
}
