package holdfast;

import java.lang.ref.Cleaner;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Consumer;
import java.util.function.Supplier;
import org.jspecify.annotations.Nullable;
import org.slf4j.LoggerFactory;

/**
 * A lock that is held. It may be used and released by any thread. Garbage collection does not release it: a hold that is forgotten is
 * logged, and is still renewed.
 */
public final class Hold implements AutoCloseable {
    private static final Cleaner CLEANER = Cleaner.create(Holdfast.threads("holdfast-forgotten"));

    final Acquisition acquisition;

    Hold(Acquisition acquisition) {
        this.acquisition = acquisition;
        CLEANER.register(this, ifForgotten(acquisition.spec.title(), acquisition.renews));
    }

    /** The cleaner keeps this action: it must not refer to the acquisition, whose callbacks may refer to the hold. */
    private static Runnable ifForgotten(String title, AtomicBoolean renews) {
        return () -> {
            if (renews.get()) {
                LoggerFactory.getLogger(Holdfast.class).warn("the hold of lock '{}' was forgotten without a release; it goes on being renewed", title);
            }
        };
    }

    /** The fencing token: greater than that of any earlier hold of any lock on this server. */
    public long fence() {
        return acquisition.token;
    }

    /** The owner by which the server knows this hold. */
    public String owner() {
        return acquisition.owner;
    }

    public LockSpec spec() {
        return acquisition.spec;
    }

    /** Whether the lock is certainly held now, without asking the server. */
    public boolean isHeld() {
        return acquisition.isHeld();
    }

    /** For how long the lock is certain unless it is renewed; zero if it is not held. */
    public Duration remaining() {
        return isHeld() ? Duration.ofNanos(Math.max(0, acquisition.certain - acquisition.client.serial.now())) : Duration.ZERO;
    }

    /** Why the hold was lost; null if it was not. */
    public @Nullable LossReason lossReason() {
        return acquisition.end.getNow(null);
    }

    /**
     * Asks the server whether this hold has the lock, without renewing it. If thousands of owners hold it and the server does not list this one, the answer
     * is that of {@link #isHeld}.
     */
    public boolean check() {
        return Holdfast.await(acquisition.client.check(acquisition));
    }

    /** Calls back once, on a thread for callbacks, when the lock is lost; at once if it is lost already. */
    public Hold onLost(Consumer<LossReason> action) {
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

    /** Restarts the lease with this duration, which may be shorter, from now on. One that the server refuses changes nothing. */
    public void renew(Duration lease) {
        Holdfast.await(renew(lease, false, acquisition.client.timeout, acquisition::notRenewed));
    }

    /** The same. The client renews the lease from now on if {@code goesOn}; the future fails after the limit, in ns. */
    CompletableFuture<Void> renew(Duration lease, boolean goesOn, long limit, Supplier<Throwable> late) {
        LockSpec.checkLease(lease);
        return acquisition.client.call(limit, future -> acquisition.renew(lease, goesOn, future), late);
    }

    /**
     * Releases the lock. Returns within the client's timeout; if the server does not reply, the release continues in the background.
     *
     * @throws LockLostException if the lock had been lost
     * @throws IllegalStateException if it was released before
     */
    public void release() {
        Holdfast.await(releaseAsync(null));
    }

    /** Releases the lock without waiting for it. The future is completed on a thread for callbacks. */
    public CompletableFuture<Void> releaseAsync() {
        CompletableFuture<Void> future = new CompletableFuture<>();
        releaseAsync(null).whenComplete((released, why) -> acquisition.client.deliver(() -> Holdfast.pass(released, why, future)));
        return future;
    }

    /** Instead of a release: the lock stays held for so long, counted from now, and is renewed no more. */
    public void releaseAfter(Duration time) {
        LockSpec.checkLease(time);
        Holdfast.await(releaseAsync(time));
    }

    private CompletableFuture<Void> releaseAsync(@Nullable Duration keep) {
        return acquisition.client.call(future -> acquisition.release(keep, future),
            () -> new UnavailableException("lock '" + acquisition.spec.title() + "': the release was not confirmed in time and goes on in the background", null));
    }

    /**
     * Releases the lock, if it was not released before.
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
