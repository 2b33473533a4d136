package holdfast;

import java.time.Duration;
import java.util.Objects;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicIntegerArray;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.Lock;
import org.jspecify.annotations.Nullable;

/**
 * A re-entrant lock with a fencing token, which belongs to the thread that acquired it. Objects of the same client, name and scope are the same lock. If the
 * thread ends without unlocking, the client keeps and renews the lock.
 *
 * <p>The methods are those of {@link Lock}, and others with the names that Redisson's {@code RLock} and Hazelcast's {@code FencedLock} use. With a lease of
 * 0 or less, the client renews the lock until it is unlocked. A positive lease is not renewed: the lock is released when it ends. Re-entry is counted in the
 * client, usually without a request: it keeps the token, never shortens the lease, and does not notice that another client has just forced the lock. If a
 * thread lost the lock and locks again, it has one hold with a greater token.
 *
 * <p>Locking without a time limit throws {@link DeadlockException} if the wait would never end. A timed try in such a cycle ends with its time and returns
 * false. It does so at once if its own thread holds the read lock and tries the write lock.
 *
 * <p>While the server does not reply, waits go on; a timed try returns false when its time is over. Other methods throw {@link UnavailableException}.
 */
public final class FencedLock implements Lock {
    /** The key of a thread's holding of a name in a scope. */
    record Place(String name, long thread, @Nullable Object scope) {}

    /**
     * A thread's hold of a name. Only that thread changes it.
     *
     * @param thread the thread
     * @param counts how often the thread has locked and not unlocked it, as a reader and as a writer
     */
    record Holding(Thread thread, Hold hold, AtomicIntegerArray counts) {}

    private static final long AT_ONCE = 0;
    private static final int READ = 0;
    private static final int WRITE = 1;

    private final Holdfast client;
    private final LockSpec spec;
    private final String name;
    private final int kind;
    private final @Nullable Object scope;

    FencedLock(Holdfast client, LockSpec spec, @Nullable Object scope) {
        this.client = client;
        this.spec = spec;
        this.scope = scope;
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

    /** Waits until the lock is granted, whether or not the thread is interrupted. The lock is released when the lease ends. */
    public void lock(long leaseTime, TimeUnit unit) {
        lockAndGetFence(leaseTime, unit);
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
        return tryLockAndGetFence() != 0;
    }

    @Override
    public boolean tryLock(long waitTime, TimeUnit unit) throws InterruptedException {
        return tryLock(waitTime, -1, unit);
    }

    /**
     * Waits for at most {@code waitTime}; if that is less than 1 ms, not at all.
     *
     * @return whether the lock was acquired; it is released when {@code leaseTime} is over
     */
    public boolean tryLock(long waitTime, long leaseTime, TimeUnit unit) throws InterruptedException {
        return acquire(wait(waitTime, unit), leaseTime, unit, true) != 0;
    }

    /** Locks, and returns the fencing token. */
    public long lockAndGetFence() {
        return lockAndGetFence(-1, TimeUnit.MILLISECONDS);
    }

    /** Locks with a lease, and returns the fencing token. */
    public long lockAndGetFence(long leaseTime, TimeUnit unit) {
        return acquireUninterruptibly(Rules.ENDLESS, leaseTime, unit);
    }

    /** Tries to lock; returns the fencing token, or 0 if the lock is held by another thread. */
    public long tryLockAndGetFence() {
        return acquireUninterruptibly(AT_ONCE, -1, TimeUnit.MILLISECONDS);
    }

    /** Waits for at most this time; returns the fencing token, or 0. */
    public long tryLockAndGetFence(long waitTime, TimeUnit unit) throws InterruptedException {
        return acquire(wait(waitTime, unit), -1, unit, true);
    }

    /** Converts to ns. The server counts whole milliseconds: a shorter time is no wait. */
    private static long wait(long time, TimeUnit unit) {
        long nanos = unit.toNanos(time);
        return nanos < Rules.MS ? AT_ONCE : Math.min(nanos, Rules.ENDLESS);
    }

    private long acquireUninterruptibly(long wait, long leaseTime, TimeUnit unit) {
        try {
            return acquire(wait, leaseTime, unit, false);
        } catch (InterruptedException never) {
            throw new IllegalStateException(never);
        }
    }

    /** Returns the fencing token, or 0. */
    private long acquire(long wait, long leaseTime, TimeUnit unit, boolean interruptibly) throws InterruptedException {
        Objects.requireNonNull(unit, "unit");
        if (interruptibly && Thread.interrupted()) {
            throw new InterruptedException();
        }
        boolean isTimed = wait < Rules.ENDLESS;
        long until = client.serial.now() + wait;
        LockSpec terms = leaseTime > 0 ? spec.toBuilder().lease(Duration.ofNanos(unit.toNanos(leaseTime))).renew(false).build() : spec;
        long thread = Thread.currentThread().getId();
        Holding mine = holding(thread);
        if (mine != null) {
            try {
                return reenter(mine, terms, wait, interruptibly);
            } catch (NotAcquiredException late) {
                return 0;
            } catch (LockLostException lost) {
                // Continue as if the loss had been noticed before.
                wait = wait == AT_ONCE ? AT_ONCE : Math.max(1, until - client.serial.now());
            }
        }
        String actor = client.id + ":" + thread;
        Hold hold;
        try {
            hold = request(terms, wait, actor, interruptibly);
        } catch (DeadlockException why) {
            // A timed try ends the cycle itself, unless another thread does before. It goes on as an owner that takes no part in the search for deadlocks.
            if (!isTimed && isDeadlock(actor)) {
                throw why;
            }
            hold = request(terms, Math.max(AT_ONCE, until - client.serial.now()), null, interruptibly);
        }
        if (hold == null) {
            return 0;
        }
        AtomicIntegerArray counts = new AtomicIntegerArray(2);
        counts.set(kind, 1);
        client.keep(place(thread), new Holding(Thread.currentThread(), hold, counts));
        return hold.fence();
    }

    /** Whether no holder is a hold that this thread has lost and the server still has: that would end by itself. */
    private boolean isDeadlock(String actor) {
        return client.info(name).filter(info -> info.holders().stream().noneMatch(it -> it.owner().startsWith(actor + "##") && !client.isOwner(it.owner()))).isPresent();
    }

    private @Nullable Hold request(LockSpec terms, long wait, @Nullable String actor, boolean interruptibly) throws InterruptedException {
        Acquisition acquisition = client.start(terms, wait, actor);
        try {
            return interruptibly ? client.granted(acquisition) : client.grantedUninterruptibly(acquisition);
        } catch (NotAcquiredException late) {
            return null;
        }
    }

    private long reenter(Holding mine, LockSpec terms, long wait, boolean interruptibly) throws InterruptedException {
        if (kind == WRITE && mine.hold.spec().limit() != 1) {
            if (wait < Rules.ENDLESS) {
                return 0;
            }
            throw new DeadlockException("lock '" + name + "': this thread holds the read lock and would wait for itself");
        }
        Hold hold = mine.hold;
        Duration left = hold.remaining();
        Duration lease = leaseOf(terms);
        boolean longer = lease.compareTo(left) > 0;
        if (!hold.acquisition.renews.get() && (terms.renew() || longer)) {
            renew(hold, longer ? lease : left, terms.renew(), wait, interruptibly);
        } else if (!hold.isHeld()) {
            // Only the wall clock says that the lease is over.
            renew(hold, Duration.ofNanos(hold.acquisition.lease), false, wait, interruptibly);
        }
        mine.counts.updateAndGet(kind, Math::incrementExact);
        return hold.fence();
    }

    /** Renews the hold within the caller's time or, as for any try and if that is shorter, the client's timeout. */
    private void renew(Hold hold, Duration lease, boolean keepsRenewing, long wait, boolean interruptibly) throws InterruptedException {
        boolean isShort = wait != AT_ONCE && wait < client.timeout;
        CompletableFuture<Void> renewed = hold.renew(lease, keepsRenewing, isShort ? wait : client.timeout,
            () -> isShort ? new NotAcquiredException("lock '" + name + "' was not renewed in time", null) : hold.acquisition.notRenewed());
        try {
            if (interruptibly) {
                Holdfast.result(renewed);
            } else {
                Holdfast.await(renewed);
            }
        } catch (NotAcquiredException | UnavailableException | InterruptedException why) {
            if (keepsRenewing) {
                // The thread has not entered the lock again: its lease ends, as before.
                client.serial.run(() -> hold.acquisition.renews.set(false));
            }
            throw why;
        }
    }

    private Duration leaseOf(LockSpec terms) {
        return terms.lease() == null ? client.lease : terms.lease();
    }

    /** Returns what a thread holds, unless that was lost. */
    private @Nullable Holding holding(long thread) {
        Holding holding = client.holdings.get(place(thread));
        return holding != null && holding.hold.acquisition.isCertain() ? holding : null;
    }

    private Place place(long thread) {
        return new Place(name, thread, scope);
    }

    private Hold mine() {
        Holding holding = holding(Thread.currentThread().getId());
        if (holding == null || holding.counts.get(kind) == 0) {
            throw notHeld(null);
        }
        return holding.hold;
    }

    private IllegalMonitorStateException notHeld(@Nullable RuntimeException why) {
        String text = "lock '" + name + "' is not held by thread " + Thread.currentThread().getId() + " of client " + client.id;
        IllegalMonitorStateException error = new IllegalMonitorStateException(why == null ? text : text + ": " + why.getMessage());
        error.initCause(why);
        return error;
    }

    // ---- Unlocking ----

    /**
     * Undoes one lock of the current thread, and releases the lock with the last.
     *
     * @throws IllegalMonitorStateException if the current thread does not hold the lock, or lost it, which is then the cause; the next holder keeps the lock
     */
    @Override
    public void unlock() {
        Place place = place(Thread.currentThread().getId());
        Holding holding = client.holdings.get(place);
        if (holding == null || holding.counts.get(kind) == 0) {
            throw notHeld(null);
        }
        boolean last = holding.counts.get(READ) + holding.counts.get(WRITE) == 1;
        if (!last && holding.hold.acquisition.isCertain()) {
            holding.counts.decrementAndGet(kind);
            return;
        }
        client.holdings.remove(place);
        try {
            holding.hold.release();
        } catch (LockLostException | IllegalStateException why) {
            throw notHeld(why);
        }
    }

    /**
     * Restarts the lease of the current thread's hold, with this duration from now on; 0 or less means the lock's own lease.
     *
     * @throws IllegalMonitorStateException if the current thread does not hold the lock, or lost it, which is then the cause
     */
    public void renew(long leaseTime, TimeUnit unit) {
        try {
            mine().renew(leaseTime > 0 ? Duration.ofNanos(unit.toNanos(leaseTime)) : leaseOf(spec));
        } catch (LockLostException lost) {
            throw notHeld(lost);
        }
    }

    /**
     * Forgets a hold that the current thread has lost and not unlocked. Returns whether there was one that was renewed until it was lost: the end of a lease
     * that is not renewed is expected.
     */
    public boolean forgetLost() {
        Place place = place(Thread.currentThread().getId());
        Holding holding = client.holdings.get(place);
        return holding != null && !holding.hold.acquisition.isCertain() && client.holdings.remove(place, holding) && holding.hold.acquisition.isOrWasRenewed();
    }

    /** Releases the lock for all its holders; returns whether it was held. */
    public boolean forceUnlock() {
        return client.force(name);
    }

    /** Not supported. */
    @Override
    public Condition newCondition() {
        throw new UnsupportedOperationException("a distributed lock has no conditions");
    }

    // ---- Queries, which ask the server ----

    /** Returns whether any thread of any client holds the lock. */
    public boolean isLocked() {
        return isHeldByCurrentThread() || client.info(name).filter(info -> info.holderCount() > 0 && info.limit().orElse(1L) == spec.limit()).isPresent();
    }

    /** Returns whether this thread of this client holds the lock. */
    public boolean isHeldByThread(long threadId) {
        return holds(threadId) > 0;
    }

    /** Returns whether the current thread holds the lock. */
    public boolean isHeldByCurrentThread() {
        return getHoldCount() > 0;
    }

    /** Returns whether the current thread holds the lock. */
    public boolean isLockedByCurrentThread() {
        return isHeldByCurrentThread();
    }

    /** Returns how often the current thread holds the lock; 0 if it does not. */
    public int getHoldCount() {
        return holds(Thread.currentThread().getId());
    }

    private int holds(long thread) {
        Holding holding = holding(thread);
        return holding != null && holding.hold.check() ? holding.counts.get(kind) : 0;
    }

    /** Returns how often the current thread holds the lock. If it does not, returns 1 if another thread does, however often, or 0. */
    public int getLockCount() {
        int mine = getHoldCount();
        return mine == 0 && isLocked() ? 1 : mine;
    }

    /**
     * Returns the fencing token of the current thread's hold, without asking the server.
     *
     * @throws IllegalMonitorStateException if the current thread does not hold the lock
     */
    public long getFence() {
        return mine().fence();
    }

    /** Returns the time until the lease of the lock ends, in ms; -1 if it does not end; -2 if no thread holds the lock. */
    public long remainTimeToLive() {
        return client.info(name).filter(info -> info.holderCount() > 0).map(info -> info.timeToLive().map(Duration::toMillis).orElse(-1L)).orElse(-2L);
    }

    @Override
    public String toString() {
        return "FencedLock[" + name + "]";
    }
}
