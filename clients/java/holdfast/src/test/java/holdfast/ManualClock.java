package holdfast;

import java.time.Duration;
import java.util.Comparator;
import java.util.PriorityQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;

/** A clock that a test advances, from one task to the next: no test depends on how fast the machine is. */
final class ManualClock implements Clock {
    private record Task(long at, long number, Runnable action) {}

    private final PriorityQueue<Task> tasks = new PriorityQueue<>(Comparator.comparingLong(Task::at).thenComparingLong(Task::number));
    private long now;
    private long scheduled;
    /** For how long the machine was suspended, in ms: the wall clock is ahead by that. */
    volatile long suspended;

    @Override
    public synchronized long now() {
        return now;
    }

    @Override
    public long wall() {
        return now() / 1_000_000 + suspended;
    }

    @Override
    public synchronized void at(long time, Runnable action) {
        tasks.add(new Task(Math.max(now, time), scheduled++, action));
    }

    @Override
    public synchronized void close() {
        tasks.clear();
    }

    /** Returns how many tasks have not run. */
    synchronized int tasks() {
        return tasks.size();
    }

    private boolean step(long until) {
        Task task;
        synchronized (this) {
            task = tasks.peek();
            if (task == null || task.at > until) {
                return false;
            }
            tasks.remove();
            now = task.at;
        }
        task.action.run();
        return true;
    }

    void advance(long ms) {
        long until = now() + TimeUnit.MILLISECONDS.toNanos(ms);
        while (step(until)) {
            continue;
        }
        synchronized (this) {
            now = until;
        }
    }

    /** Advances the clock until a condition holds, by ten minutes at most. */
    void until(BooleanSupplier condition) {
        long most = now() + Duration.ofMinutes(10).toNanos();
        while (!condition.getAsBoolean()) {
            if (!step(most)) {
                throw new AssertionError("the condition never holds");
            }
        }
    }

    /** Advances the clock until a future is completed, and returns its result or throws its exception. */
    <T> T get(CompletableFuture<T> future) throws InterruptedException {
        until(future::isDone);
        return Holdfast.result(future);
    }
}
