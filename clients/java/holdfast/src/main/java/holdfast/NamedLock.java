package holdfast;

import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import org.jspecify.annotations.Nullable;

/** A lock that is described but not held. Each acquisition is independent of all others: it is not re-entrant and not bound to a thread. */
public final class NamedLock {
    final Holdfast client;
    private final LockSpec spec;

    NamedLock(Holdfast client, LockSpec spec) {
        this.client = client;
        this.spec = spec;
    }

    public LockSpec spec() {
        return spec;
    }

    /** Waits until the lock is granted. */
    public Hold acquire() throws InterruptedException {
        return acquire(client.start(spec, Acquisition.ENDLESS, null));
    }

    /**
     * Waits for at most this time.
     *
     * @throws NotAcquiredException if the lock was not granted in time
     * @throws DeadlockException if waiting would never end
     * @throws InterruptedException if the thread is interrupted; the request is withdrawn in the background
     */
    public Hold acquire(Duration wait) throws InterruptedException {
        if (wait.isZero() || wait.isNegative()) {
            return tryAcquire().orElseThrow(() -> new NotAcquiredException("lock '" + spec.title() + "' is held", null));
        }
        return acquire(client.start(spec, nanos(wait), null));
    }

    private static Hold acquire(Acquisition acquisition) throws InterruptedException {
        try {
            return Holdfast.result(acquisition.result);
        } catch (InterruptedException why) {
            acquisition.client.serial.run(() -> acquisition.cancel(new NotAcquiredException("interrupted", why)));
            throw why;
        }
    }

    /** Acquires the lock if it is free now. */
    public Optional<Hold> tryAcquire() {
        return Optional.ofNullable(Holdfast.await(client.start(spec, 0, null).result));
    }

    /**
     * Waits for at most this time without a thread. The future is completed on a thread for callbacks, with what {@link #acquire(Duration)}
     * returns or throws. Cancelling it withdraws the request.
     */
    public CompletableFuture<Hold> acquireAsync(Duration wait) {
        return async(client.start(spec, Math.max(1, nanos(wait)), null));
    }

    /** Acquires the lock if it is free now; the future is completed with empty if it is not. */
    public CompletableFuture<Optional<Hold>> tryAcquireAsync() {
        CompletableFuture<Optional<Hold>> told = new CompletableFuture<>();
        async(client.start(spec, 0, null)).whenComplete((hold, why) -> {
            if (why != null) {
                told.completeExceptionally(why);
            } else if (!told.complete(Optional.ofNullable(hold)) && hold != null) {
                hold.close();
            }
        });
        return told;
    }

    CompletableFuture<Hold> acquireAsync() {
        return async(client.start(spec, Acquisition.ENDLESS, null));
    }

    private CompletableFuture<Hold> async(Acquisition acquisition) {
        CompletableFuture<Hold> told = new CompletableFuture<>();
        client.serial.run(() -> acquisition.result.whenComplete((hold, why) -> client.callback(() -> deliver(told, hold, why))));
        told.whenComplete((hold, why) -> {
            if (told.isCancelled()) {
                client.serial.run(() -> acquisition.cancel(why));
            }
        });
        return told;
    }

    private void deliver(CompletableFuture<Hold> told, @Nullable Hold hold, @Nullable Throwable why) {
        if (why != null) {
            told.completeExceptionally(why);
        } else {
            told.complete(hold);
        }
    }

    /** What the server says of the lock (of its first name). */
    public Optional<LockInfo> info() {
        return client.info(spec.names().get(0));
    }

    static long nanos(Duration time) {
        return time.compareTo(Duration.ofDays(36500)) > 0 ? Acquisition.ENDLESS : time.toNanos();
    }
}
