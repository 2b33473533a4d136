package holdfast;

import java.time.Duration;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicIntegerArray;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.Lock;
import org.jspecify.annotations.Nullable;

/**
 * A re-entrant lock that belongs to the thread that acquired it, with a fencing token. Objects of the same client and name are the same lock.
 *
 * <p>The methods are those of {@link Lock}, with names that Redisson's {@code RLock} and Hazelcast's {@code FencedLock} use. A lease of 0 or
 * less means: renewed until it is unlocked. A lease that is given is not renewed; the lock is then released when it ends. Re-entry is counted
 * in the client, keeps the token and never shortens the lease.
 */
public final class FencedLock implements Lock {
    /** Where a thread's holds of a name are kept. */
    record Place(String name, long thread) {}

    /** What a thread holds of a name. Changed by its own thread only. */
    static final class Holding {
        final Hold hold;
        /** Whether the hold is that of a writer; its thread may then have read locks, too. */
        final boolean exclusive;
        /** How often the thread has locked and not unlocked it: to read, and to write. */
        final AtomicIntegerArray counts = new AtomicIntegerArray(2);

        Holding(Hold hold, boolean exclusive) {
            this.hold = hold;
            this.exclusive = exclusive;
        }
    }

    private static final long AT_ONCE = 0;
    private static final int READ = 0;
    private static final int WRITE = 1;

    private final Holdfast client;
    private final LockSpec spec;
    private final String name;
    private final int kind;

    FencedLock(Holdfast client, LockSpec spec) {
        this.client = client;
        this.spec = spec;
        name = spec.names().get(0);
        kind = spec.limit() == 1 ? WRITE : READ;
    }

    public String getName() {
        return name;
    }

    // ---- Locking ----

    @Override
    public void lock() {
        lock(-1, TimeUnit.MILLISECONDS);
    }

    /** Waits until the lock is granted, whether or not the thread is interrupted; it is released when the lease ends. */
    public void lock(long leaseTime, TimeUnit unit) {
        acquireUninterruptibly(Rules.ENDLESS, leaseTime, unit);
    }

    @Override
    public void lockInterruptibly() throws InterruptedException {
        lockInterruptibly(-1, TimeUnit.MILLISECONDS);
    }

    /** As {@link #lock(long, TimeUnit)}, but ends when the thread is interrupted. */
    public void lockInterruptibly(long leaseTime, TimeUnit unit) throws InterruptedException {
        acquire(Rules.ENDLESS, leaseTime, unit, true);
    }

    @Override
    public boolean tryLock() {
        return acquireUninterruptibly(AT_ONCE, -1, TimeUnit.MILLISECONDS);
    }

    @Override
    public boolean tryLock(long waitTime, TimeUnit unit) throws InterruptedException {
        return tryLock(waitTime, -1, unit);
    }

    /**
     * Waits for at most {@code waitTime} (0 or less: not at all).
     *
     * @return whether the lock is held now; it is released when {@code leaseTime} is over
     */
    public boolean tryLock(long waitTime, long leaseTime, TimeUnit unit) throws InterruptedException {
        return acquire(Math.min(Math.max(AT_ONCE, unit.toNanos(waitTime)), Rules.ENDLESS), leaseTime, unit, true);
    }

    /** Locks, and returns the fencing token. */
    public long lockAndGetFence() {
        lock();
        return getFence();
    }

    /** Locks with a lease, and returns the fencing token. */
    public long lockAndGetFence(long leaseTime, TimeUnit unit) {
        lock(leaseTime, unit);
        return getFence();
    }

    /** Tries to lock; returns the fencing token, or 0 if the lock is held by another thread. */
    public long tryLockAndGetFence() {
        return tryLock() ? getFence() : 0;
    }

    /** Waits for at most this time; returns the fencing token, or 0. */
    public long tryLockAndGetFence(long waitTime, TimeUnit unit) throws InterruptedException {
        return tryLock(waitTime, unit) ? getFence() : 0;
    }

    private boolean acquireUninterruptibly(long wait, long leaseTime, TimeUnit unit) {
        try {
            return acquire(wait, leaseTime, unit, false);
        } catch (InterruptedException never) {
            throw new IllegalStateException(never);
        }
    }

    private boolean acquire(long wait, long leaseTime, TimeUnit unit, boolean interruptibly) throws InterruptedException {
        if (interruptibly && Thread.interrupted()) {
            throw new InterruptedException();
        }
        Duration lease = leaseTime > 0 ? Duration.ofNanos(unit.toNanos(leaseTime)) : null;
        long thread = Thread.currentThread().getId();
        Holding mine = holding(thread);
        if (mine != null && mine.hold.confirm()) {
            return reenter(mine, lease, wait);
        }
        LockSpec terms = lease == null ? spec : spec.toBuilder().lease(lease).renew(false).build();
        Acquisition acquisition = client.start(terms, wait, client.id + ":" + thread);
        Hold hold;
        try {
            hold = interruptibly ? client.granted(acquisition) : Holdfast.await(acquisition.result);
        } catch (NotAcquiredException late) {
            return false;
        }
        if (hold == null) {
            return false;
        }
        Holding holding = new Holding(hold, kind == WRITE);
        holding.counts.set(kind, 1);
        client.holdings.put(new Place(name, thread), holding);
        return true;
    }

    private boolean reenter(Holding mine, @Nullable Duration lease, long wait) {
        if (kind == WRITE && !mine.exclusive) {
            if (wait == AT_ONCE) {
                return false;
            }
            throw new DeadlockException("lock '" + name + "': this thread holds the read lock and would wait for itself");
        }
        Hold hold = mine.hold;
        boolean renewed = hold.acquisition.renews;
        if (lease != null && !renewed && lease.compareTo(hold.remaining()) > 0) {
            hold.renew(lease);
        } else if (lease == null && !renewed) {
            hold.keep(spec.lease() == null ? client.lease : spec.lease());
        }
        mine.counts.incrementAndGet(kind);
        return true;
    }

    /** What a thread holds, unless it was lost meanwhile. */
    private @Nullable Holding holding(long thread) {
        Holding holding = client.holdings.get(new Place(name, thread));
        return holding != null && holding.hold.acquisition.isCertain() ? holding : null;
    }

    private Hold mine() {
        Holding holding = holding(Thread.currentThread().getId());
        if (holding == null) {
            throw new IllegalMonitorStateException("lock '" + name + "' is not held by the current thread");
        }
        return holding.hold;
    }

    // ---- Unlocking ----

    /**
     * Gives up one hold of the current thread.
     *
     * @throws IllegalMonitorStateException if the current thread does not hold the lock, or lost it (then the cause says why)
     */
    @Override
    public void unlock() {
        Place place = new Place(name, Thread.currentThread().getId());
        Holding holding = client.holdings.get(place);
        if (holding == null || holding.counts.get(kind) == 0) {
            throw new IllegalMonitorStateException("lock '" + name + "' is not held by thread " + place.thread + " of client " + client.id);
        }
        boolean last = holding.counts.get(READ) + holding.counts.get(WRITE) == 1;
        if (!last && holding.hold.acquisition.isCertain()) {
            holding.counts.decrementAndGet(kind);
            return;
        }
        client.holdings.remove(place);
        try {
            holding.hold.release();
        } catch (LockLostException lost) {
            IllegalMonitorStateException why = new IllegalMonitorStateException("lock '" + name + "' is not held any more by thread " + place.thread + ": " + lost.reason());
            why.initCause(lost);
            throw why;
        }
    }

    /**
     * Restarts the lease of the current thread's hold, with this duration from now on.
     *
     * @throws IllegalMonitorStateException if the current thread does not hold the lock
     */
    public void renew(long leaseTime, TimeUnit unit) {
        mine().renew(leaseTime > 0 ? Duration.ofNanos(unit.toNanos(leaseTime)) : client.lease);
    }

    /** Forgets a hold that the current thread has lost and not unlocked; returns whether there was one. */
    public boolean forgetLost() {
        Place place = new Place(name, Thread.currentThread().getId());
        Holding holding = client.holdings.get(place);
        return holding != null && !holding.hold.acquisition.isCertain() && client.holdings.remove(place, holding);
    }

    /** Releases the lock of all its holders; returns whether it was held. */
    public boolean forceUnlock() {
        return client.force(name);
    }

    /** Not supported. */
    @Override
    public Condition newCondition() {
        throw new UnsupportedOperationException("a distributed lock has no conditions");
    }

    // ---- Asking; by the server's word of now ----

    /** Whether any thread of any client holds the lock. */
    public boolean isLocked() {
        return client.info(name).filter(info -> info.holderCount() > 0 && (kind == READ || info.limit().orElse(1L) == 1)).isPresent();
    }

    /** Whether this thread of this client holds the lock. */
    public boolean isHeldByThread(long threadId) {
        Holding holding = holding(threadId);
        return holding != null && holding.counts.get(kind) > 0 && holding.hold.check();
    }

    /** Whether the current thread holds the lock. */
    public boolean isHeldByCurrentThread() {
        return isHeldByThread(Thread.currentThread().getId());
    }

    /** Whether the current thread holds the lock. */
    public boolean isLockedByCurrentThread() {
        return isHeldByCurrentThread();
    }

    /** How often the current thread holds the lock; 0 if it does not. */
    public int getHoldCount() {
        Holding holding = holding(Thread.currentThread().getId());
        return holding != null && holding.hold.check() ? holding.counts.get(kind) : 0;
    }

    /** How often the current thread holds the lock; 0 if it does not. */
    public int getLockCount() {
        return getHoldCount();
    }

    /**
     * The fencing token of the current thread's hold.
     *
     * @throws IllegalMonitorStateException if the current thread does not hold the lock
     */
    public long getFence() {
        return mine().fence();
    }

    /** Until the lease of the lock ends, in ms; -1 if it does not end; -2 if no thread holds the lock. */
    public long remainTimeToLive() {
        return client.info(name).filter(info -> info.holderCount() > 0).map(info -> info.timeToLive().map(Duration::toMillis).orElse(-1L)).orElse(-2L);
    }

    @Override
    public String toString() {
        return "FencedLock[" + name + "]";
    }
}
