package holdfast.shedlock;

import holdfast.Hold;
import holdfast.Holdfast;
import holdfast.HoldfastException;
import holdfast.LockLostException;
import holdfast.LockSpec;
import java.time.Duration;
import java.time.Instant;
import java.util.Objects;
import java.util.Optional;
import net.javacrumbs.shedlock.core.AbstractSimpleLock;
import net.javacrumbs.shedlock.core.ClockProvider;
import net.javacrumbs.shedlock.core.ExtensibleLockProvider;
import net.javacrumbs.shedlock.core.LockConfiguration;
import net.javacrumbs.shedlock.core.SimpleLock;
import net.javacrumbs.shedlock.support.LockException;
import net.javacrumbs.shedlock.support.Utils;

/**
 * A lock provider for ShedLock. A lock is held until it is unlocked, but until {@code lockAtLeastUntil} at least and {@code lockAtMostUntil} at most. It is not
 * renewed; {@code KeepAliveLockProvider} may wrap this provider. {@code lockAtMostFor} is at most 3,650 days. A longer one, a name that the server does not
 * take, and a request without a reply of the server end in a {@link LockException}. Closing the client releases its locks, also those that should be held longer.
 */
public final class HoldfastLockProvider implements ExtensibleLockProvider {
    private static final Duration SHORTEST = Duration.ofMillis(1);

    private final Holdfast client;
    private final String prefix;

    /** Makes a provider of locks with the names {@code job-lock:<name>}. */
    public HoldfastLockProvider(Holdfast client) {
        this(client, "job-lock:");
    }

    /** Makes a provider of locks whose names begin with this prefix. */
    public HoldfastLockProvider(Holdfast client, String prefix) {
        this.client = Objects.requireNonNull(client, "client");
        this.prefix = Objects.requireNonNull(prefix, "prefix");
    }

    @Override
    public Optional<SimpleLock> lock(LockConfiguration configuration) {
        String name = prefix + configuration.getName();
        try {
            LockSpec spec = LockSpec.builder(name).lease(until(configuration.getLockAtMostUntil())).renew(false).label(Utils.getHostname()).build();
            return client.lock(spec).tryAcquire().map(hold -> new HoldfastSimpleLock(hold, configuration));
        } catch (HoldfastException | IllegalArgumentException why) {
            throw new LockException("lock '" + name + "' could not be acquired", why);
        }
    }

    /** Returns the time until a moment; a millisecond if it is past. */
    private static Duration until(Instant moment) {
        Duration time = Duration.between(ClockProvider.now(), moment);
        return time.compareTo(SHORTEST) < 0 ? SHORTEST : time;
    }

    private static final class HoldfastSimpleLock extends AbstractSimpleLock {
        private final Hold hold;

        HoldfastSimpleLock(Hold hold, LockConfiguration configuration) {
            super(configuration);
            this.hold = hold;
        }

        @Override
        protected void doUnlock() {
            try {
                Duration rest = Duration.between(ClockProvider.now(), lockConfiguration.getLockAtLeastUntil());
                if (rest.compareTo(SHORTEST) < 0) {
                    hold.release();
                } else {
                    hold.releaseAfter(rest);
                }
            } catch (LockLostException | IllegalStateException notHeld) {
                // The time was over, and the lock may be another node's; or the client was closed, and has released the lock.
                return;
            } catch (HoldfastException why) {
                throw new LockException("lock '" + lockConfiguration.getName() + "' could not be released; it expires with its lease", why);
            }
        }

        @Override
        protected Optional<SimpleLock> doExtend(LockConfiguration configuration) {
            try {
                hold.renew(until(configuration.getLockAtMostUntil()));
                return Optional.of(new HoldfastSimpleLock(hold, configuration));
            } catch (LockLostException | IllegalStateException notHeld) {
                return Optional.empty();
            } catch (HoldfastException | IllegalArgumentException why) {
                throw new LockException("lock '" + configuration.getName() + "' could not be extended", why);
            }
        }
    }
}
