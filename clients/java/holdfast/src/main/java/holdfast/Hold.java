package holdfast;

import java.lang.ref.Cleaner;
import java.time.Duration;
import java.util.Objects;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Consumer;
import java.util.function.Supplier;
import org.jspecify.annotations.Nullable;

/**
 * A lock that is held. Any thread may use and release it. The garbage collector never releases a lock: a hold that was forgotten is logged, and is still
 * renewed.
 */
public final class Hold implements AutoCloseable {
    private static final Cleaner CLEANER = Cleaner.create(Holdfast.threads("holdfast-forgotten"));

    final Acquisition acquisition;

    Hold(Acquisition acquisition) {
        this.acquisition = acquisition;
        CLEANER.register(this, ifForgotten(acquisition.spec.title(), acquisition.renews));
    }

    /** The cleaner refers to this action, so it must not refer to the acquisition, whose callbacks may refer to the hold. */
    private static Runnable ifForgotten(String title, AtomicBoolean renews) {
        return () -> {
            if (renews.get()) {
                Log.write(log -> log.warn("the hold of lock '{}' was forgotten without a release; it is still renewed", title));
            }
        };
    }

    /** Returns the fencing token, which is greater than that of any earlier hold of any lock on this server. */
    public long fence() {
        return acquisition.token;
    }

    /** Returns the owner by which the server knows this hold. */
    public String owner() {
        return acquisition.owner;
    }

    public LockSpec spec() {
        return acquisition.spec;
    }

    /** Returns whether the lock is certainly held now, without asking the server. */
    public boolean isHeld() {
        return acquisition.isHeld();
    }

    /** Returns for how long the lock is certainly held without another renewal; zero if it is not held. */
    public Duration remaining() {
        return isHeld() ? Duration.ofNanos(Math.max(0, acquisition.certain - acquisition.client.serial.now())) : Duration.ZERO;
    }

    /** Returns why the hold was lost; null if it was not. */
    public @Nullable LossReason lossReason() {
        return acquisition.end.getNow(null);
    }

    /**
     * Asks the server whether it still has this hold, without renewing it. If thousands of owners hold the lock and the reply does not show this one, returns
     * {@link #isHeld}.
     */
    public boolean check() {
        return Holdfast.await(acquisition.client.check(acquisition));
    }

    /** Calls {@code action} once, on a thread for callbacks, when the lock is lost; at once if it is lost already. */
    public Hold onLost(Consumer<LossReason> action) {
        Objects.requireNonNull(action, "action");
        acquisition.end.thenAccept(why -> {
            if (why != null) {
                acquisition.client.callback(() -> action.accept(why));
            }
        });
        return this;
    }

    /**
     * Restarts the lease, with its duration.
     *
     * @throws LockLostException if the lock is lost
     */
    public void renew() {
        renew(Duration.ofNanos(acquisition.lease));
    }

    /** Restarts the lease with this duration, which may be shorter, from now on. If the server refuses the duration, the former one stays. */
    public void renew(Duration lease) {
        Holdfast.await(renew(lease, false, acquisition.client.timeout, acquisition::notRenewed));
    }

    /** The same. If {@code keepsRenewing}, the client renews the lease from now on. The future fails after {@code limit}, in ns. */
    CompletableFuture<Void> renew(Duration lease, boolean keepsRenewing, long limit, Supplier<Throwable> late) {
        LockSpec.checkTime("lease", lease);
        return acquisition.client.call(limit, future -> acquisition.renew(lease, keepsRenewing, future), late);
    }

    /**
     * Releases the lock. If the server does not reply within the client's timeout, throws {@link UnavailableException}, and the release continues in the
     * background.
     *
     * @throws LockLostException if the lock had been lost
     * @throws IllegalStateException if it was released before
     */
    public void release() {
        Holdfast.await(releaseAsync(null));
    }

    /** Releases the lock without waiting for the reply. The future is completed on a thread for callbacks. */
    public CompletableFuture<Void> releaseAsync() {
        CompletableFuture<Void> future = new CompletableFuture<>();
        releaseAsync(null).whenComplete((released, why) -> acquisition.client.deliver(() -> Holdfast.pass(released, why, future)));
        return future;
    }

    /** Stops the renewal and lets the lock expire after this time, counted from now: for jobs that must not run twice within it. */
    public void releaseAfter(Duration time) {
        LockSpec.checkTime("time", time);
        Holdfast.await(releaseAsync(time));
    }

    private CompletableFuture<Void> releaseAsync(@Nullable Duration keep) {
        return acquisition.client.call(future -> acquisition.release(keep, future),
            () -> new UnavailableException("lock '" + acquisition.spec.title() + "': the release was not confirmed in time and continues in the background", null));
    }

    /**
     * Releases the lock, unless it was released before.
     *
     * @throws LockLostException if the lock had been lost
     */
    @Override
    public void close() {
        try {
            release();
        } catch (IllegalStateException released) {
            return;
        }
    }

    @Override
    public String toString() {
        return "Hold[" + acquisition.spec.title() + ", fence " + fence() + ", " + acquisition.state + "]";
    }
}
