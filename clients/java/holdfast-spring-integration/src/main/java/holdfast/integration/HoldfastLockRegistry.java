package holdfast.integration;

import holdfast.FencedLock;
import holdfast.Holdfast;
import java.time.Duration;
import java.util.concurrent.TimeUnit;
import org.springframework.integration.support.locks.DistributedLock;

/**
 * A lock registry for Spring Integration 7. A lock is renewed until it is unlocked, unless a time to live is given. It is re-entrant and belongs to a thread;
 * locks of another registry are not re-entered.
 * For Spring Integration 6, {@link PlainHoldfastLockRegistry} does the same without {@link DistributedLock}.
 *
 * <p>{@code unlock} throws {@link java.util.ConcurrentModificationException} if the thread lost the lock, and {@link IllegalMonitorStateException} if it did not
 * hold it. If a thread lost a renewed lock and has not unlocked it, its first {@code tryLock} returns false even if the lock is free: this is how a
 * {@code LockRegistryLeaderInitiator} notices the loss. A lock whose time to live has ended is free for {@code tryLock}.
 */
public final class HoldfastLockRegistry extends Registry<DistributedLock> {
    /** Makes a registry of locks with the names {@code <prefix><key>}. */
    public HoldfastLockRegistry(Holdfast client, String prefix) {
        super(client, prefix, TimedLock::new);
    }

    private static final class TimedLock extends RegistryLock implements DistributedLock {
        TimedLock(FencedLock lock) {
            super(lock);
        }

        @Override
        public void lock(Duration ttl) {
            lock.lock(lease(ttl), TimeUnit.NANOSECONDS);
        }

        @Override
        public boolean tryLock(Duration waitTime, Duration ttl) throws InterruptedException {
            long lease = lease(ttl);
            return !lock.forgetLost() && lock.tryLock(TimeUnit.NANOSECONDS.convert(waitTime), lease, TimeUnit.NANOSECONDS);
        }
    }
}
