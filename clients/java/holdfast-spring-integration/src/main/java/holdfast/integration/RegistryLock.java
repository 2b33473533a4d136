package holdfast.integration;

import holdfast.FencedLock;
import holdfast.LockLostException;
import java.util.ConcurrentModificationException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.Lock;

/** A lock of a registry. After a loss, it differs from {@link FencedLock}: see {@link HoldfastLockRegistry}. */
class RegistryLock implements Lock {
    final FencedLock lock;

    RegistryLock(FencedLock lock) {
        this.lock = lock;
    }

    @Override
    public void lock() {
        lock.lock();
    }

    @Override
    public void lockInterruptibly() throws InterruptedException {
        lock.lockInterruptibly();
    }

    @Override
    public boolean tryLock() {
        return !lock.forgetLost() && lock.tryLock();
    }

    @Override
    public boolean tryLock(long time, TimeUnit unit) throws InterruptedException {
        return !lock.forgetLost() && lock.tryLock(time, unit);
    }

    @Override
    public void unlock() {
        try {
            lock.unlock();
        } catch (IllegalMonitorStateException why) {
            if (why.getCause() instanceof LockLostException lost) {
                ConcurrentModificationException changed = new ConcurrentModificationException("lock '" + lock.getName() + "' was lost before it was unlocked: " + lost.reason());
                changed.initCause(lost);
                throw changed;
            }
            throw why;
        }
    }

    @Override
    public Condition newCondition() {
        throw new UnsupportedOperationException("a distributed lock has no conditions");
    }

    @Override
    public String toString() {
        return "RegistryLock[" + lock.getName() + "]";
    }
}
