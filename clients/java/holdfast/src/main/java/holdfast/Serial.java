package holdfast;

import java.util.PriorityQueue;
import java.util.Queue;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.atomic.AtomicInteger;
import org.jspecify.annotations.Nullable;

/**
 * Runs the steps of a client's state machine one at a time, and its timers.
 *
 * <p>A step runs on the thread that requests it or, if another thread is running steps, on that one afterwards. So no thread waits for a monitor, and no virtual
 * thread is pinned. Steps are short and run no code of the application.
 */
final class Serial {
    /** A step that runs at a time, unless it is cancelled. */
    final class Timer implements Comparable<Timer> {
        final long at;
        private @Nullable Runnable step;

        Timer(long at, Runnable step) {
            this.at = at;
            this.step = step;
        }

        void cancel() {
            if (step != null) {
                step = null;
                // Timers that are cancelled long before their time would accumulate.
                if (++cancelled > 1000 && cancelled > timers.size() / 2) {
                    timers.removeIf(timer -> timer.step == null);
                    cancelled = 0;
                }
            }
        }

        @Override
        public int compareTo(Timer other) {
            return Long.compare(at, other.at);
        }
    }

    private final Queue<Runnable> steps = new ConcurrentLinkedQueue<>();
    private final AtomicInteger pending = new AtomicInteger();
    private final PriorityQueue<Timer> timers = new PriorityQueue<>();
    final Clock clock;
    /** The thread that runs steps. Other threads may read an old value, but each knows whether it is this one. */
    private @Nullable Thread active;
    /** How many of the timers are cancelled. */
    private int cancelled;
    /** When the next task of the clock runs. */
    private long armed = Long.MAX_VALUE;

    Serial(Clock clock) {
        this.clock = clock;
    }

    long now() {
        return clock.now();
    }

    void run(Runnable step) {
        steps.add(step);
        if (pending.getAndIncrement() == 0) {
            do {
                active = Thread.currentThread();
                attempt(steps.remove());
                active = null;
            } while (pending.decrementAndGet() != 0);
        }
    }

    private static void attempt(Runnable step) {
        try {
            step.run();
        } catch (RuntimeException | Error why) {
            Log.write(log -> log.error("a step of the client failed", why));
        }
    }

    /** Returns whether the current thread is running a step. */
    boolean isStep() {
        return active == Thread.currentThread();
    }

    /** Sets a timer. Must be called in a step, as must {@link Timer#cancel}. */
    Timer after(long nanos, Runnable step) {
        Timer timer = new Timer(now() + Math.max(0, nanos), step);
        timers.add(timer);
        arm();
        return timer;
    }

    private void arm() {
        while (!timers.isEmpty() && timers.peek().step == null) {
            timers.remove();
        }
        if (!timers.isEmpty() && timers.peek().at < armed) {
            armed = timers.peek().at;
            clock.at(armed, () -> run(this::fire));
        }
    }

    private void fire() {
        if (now() < armed) {
            // An earlier timer replaced this task, and was served. The task for the next timer follows.
            return;
        }
        armed = Long.MAX_VALUE;
        while (!timers.isEmpty() && timers.peek().at <= now()) {
            Timer timer = timers.remove();
            Runnable step = timer.step;
            timer.step = null;
            if (step != null) {
                attempt(step);
            }
        }
        arm();
    }
}
