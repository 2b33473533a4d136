package holdfast.boot;

import holdfast.Holdfast;
import org.springframework.context.SmartLifecycle;

/**
 * Closes the client when the application context is closed: after the web server and the schedulers have waited for running tasks, and before the connection
 * factory (phase 0) shuts down the Redis client, which releases need. A destroy method would run too late.
 */
final class HoldfastLifecycle implements SmartLifecycle {
    private final Holdfast client;
    private volatile boolean running;

    HoldfastLifecycle(Holdfast client) {
        this.client = client;
    }

    @Override
    public void start() {
        running = true;
    }

    @Override
    public void stop() {
        running = false;
        client.close();
    }

    @Override
    public boolean isRunning() {
        return running;
    }

    /** Higher phases stop first. */
    @Override
    public int getPhase() {
        return 1;
    }

    /** Spring 7 would pause the contexts of tests by stopping this, but a closed client can't be started again. */
    public boolean isPauseable() {
        return false;
    }
}
