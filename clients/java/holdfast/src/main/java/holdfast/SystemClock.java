package holdfast;

import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.TimeUnit;

/** The clocks of the Java virtual machine. */
final class SystemClock implements Clock {
    private static final long BASE = System.nanoTime();

    private final ScheduledThreadPoolExecutor timer = new ScheduledThreadPoolExecutor(1, Holdfast.threads("holdfast-timer"));

    @Override
    public long now() {
        return System.nanoTime() - BASE;
    }

    @Override
    public long wall() {
        return System.currentTimeMillis();
    }

    @Override
    public void at(long time, Runnable task) {
        if (!timer.isShutdown()) {
            timer.schedule(task, Math.max(0, time - now()), TimeUnit.NANOSECONDS);
        }
    }

    @Override
    public void close() {
        timer.shutdownNow();
    }
}
