package holdfast.integration;

import holdfast.FencedLock;
import holdfast.Holdfast;
import java.time.Duration;
import java.util.concurrent.TimeUnit;

/** What the two registries share. */
final class Registry {
    private final Holdfast client;
    private final String prefix;

    Registry(Holdfast client, String prefix) {
        this.client = client;
        this.prefix = prefix;
    }

    FencedLock lock(Object key) {
        if (!(key instanceof String name)) {
            throw new IllegalArgumentException("a lock key is a String, not " + key);
        }
        return client.fencedLock(prefix + name);
    }

    /** A null or zero time means the client's lease. */
    void renew(Object key, Duration lease) {
        try {
            lock(key).renew(lease.toMillis(), TimeUnit.MILLISECONDS);
        } catch (IllegalMonitorStateException why) {
            throw new IllegalStateException("Could not renew the lock '" + key + "': it is not held by this thread", why);
        }
    }
}
