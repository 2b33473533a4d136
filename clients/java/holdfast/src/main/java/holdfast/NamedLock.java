package holdfast;

import java.time.Duration;
import java.util.Objects;
import java.util.Optional;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.function.Function;
import org.jspecify.annotations.Nullable;

/** A lock that can be acquired. Each acquisition is independent of all others: the lock is neither re-entrant nor bound to a thread. */
public final class NamedLock {
    final Holdfast client;
    private final LockSpec spec;

    NamedLock(Holdfast client, LockSpec spec) {
        this.client = client;
        this.spec = Objects.requireNonNull(spec, "spec");
    }

    public LockSpec spec() {
        return spec;
    }

    /** Waits until the lock is granted. */
    public Hold acquire() throws InterruptedException {
        return granted(client.granted(client.start(spec, Rules.ENDLESS, null)));
    }

    /**
     * Waits for at most this time.
     *
     * @throws NotAcquiredException if the lock was not granted in time
     * @throws DeadlockException if waiting would never end
     * @throws InterruptedException if the thread is interrupted; the request is withdrawn in the background
     */
    public Hold acquire(Duration wait) throws InterruptedException {
        return granted(client.granted(client.start(spec, nanos(wait), null)));
    }

    /** Acquires the lock if it is free; returns empty if it is not. */
    public Optional<Hold> tryAcquire() {
        return Optional.ofNullable(client.grantedUninterruptibly(client.start(spec, 0, null)));
    }

    /**
     * Waits for at most this time without blocking a thread. The future is completed on a thread for callbacks with what {@link #acquire(Duration)} returns or
     * throws. If the application completes or cancels it first, the request is withdrawn.
     */
    public CompletableFuture<Hold> acquireAsync(Duration wait) {
        return async(nanos(wait), this::granted);
    }

    CompletableFuture<Hold> acquireAsync() {
        return async(Rules.ENDLESS, this::granted);
    }

    /** Acquires the lock if it is free; the future is completed with empty if it is not. */
    public CompletableFuture<Optional<Hold>> tryAcquireAsync() {
        return async(0, Optional::ofNullable);
    }

    private Hold granted(@Nullable Hold hold) {
        if (hold == null) {
            throw new NotAcquiredException("lock '" + spec.title() + "' is held by another owner", null);
        }
        return hold;
    }

    private <T> CompletableFuture<T> async(long wait, Function<@Nullable Hold, T> outcome) {
        Acquisition acquisition = client.start(spec, wait, null);
        CompletableFuture<T> future = new CompletableFuture<>();
        acquisition.result.thenApply(Holdfast::holdOf).thenApply(outcome)
            .whenComplete((value, why) -> client.deliver(() -> {
                if (!Holdfast.pass(value, why instanceof CompletionException ? why.getCause() : why, future)) {
                    client.serial.run(() -> acquisition.cancel(new CancellationException()));
                }
            }));
        // The application may have cancelled the future, or completed it, for example by a timeout of its own.
        future.whenComplete((value, why) -> client.serial.run(() -> {
            if (why != null || acquisition.state == Acquisition.State.WAITING) {
                acquisition.cancel(why == null ? new CancellationException() : why);
            }
        }));
        return future;
    }

    /** Returns the state of the lock at the server; of several names, that of the first. */
    public Optional<LockInfo> info() {
        return client.info(spec.names().get(0));
    }

    private static long nanos(Duration time) {
        return time.isNegative() ? 0 : time.compareTo(Duration.ofDays(36500)) > 0 ? Rules.ENDLESS : time.toNanos();
    }
}
