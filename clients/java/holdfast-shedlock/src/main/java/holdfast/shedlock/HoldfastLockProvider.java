package holdfast.shedlock;

import holdfast.Hold;
import holdfast.Holdfast;
import holdfast.HoldfastException;
import holdfast.LockLostException;
import holdfast.LockSpec;
import java.time.Duration;
import java.time.Instant;
import java.util.Optional;
import net.javacrumbs.shedlock.core.AbstractSimpleLock;
import net.javacrumbs.shedlock.core.ClockProvider;
import net.javacrumbs.shedlock.core.ExtensibleLockProvider;
import net.javacrumbs.shedlock.core.LockConfiguration;
import net.javacrumbs.shedlock.core.SimpleLock;
import net.javacrumbs.shedlock.support.LockException;

/**
 * Locks of scheduled tasks. A lock is held until {@code lockAtMostUntil} or until it is unlocked, whichever is earlier, but never shorter than
 * until {@code lockAtLeastUntil}. It is not renewed by itself; {@code KeepAliveLockProvider} may be put around this provider.
 * {@code lockAtMostFor} is at most 3,650 days. A request without an answer of the server ends in a {@link LockException}.
 */
public final class HoldfastLockProvider implements ExtensibleLockProvider {
    private static final Duration SHORTEST = Duration.ofMillis(1);

    private final Holdfast client;
    private final String prefix;

    /** Locks with the names {@code job-lock:<name>}. */
    public HoldfastLockProvider(Holdfast client) {
        this(client, "job-lock:");
    }

    /** Locks with names of this beginning. */
    public HoldfastLockProvider(Holdfast client, String prefix) {
        this.client = client;
        this.prefix = prefix;
    }

    @Override
    public Optional<SimpleLock> lock(LockConfiguration configuration) {
        LockSpec spec = LockSpec.builder(prefix + configuration.getName()).lease(until(configuration.getLockAtMostUntil())).renew(false).build();
        try {
            return client.lock(spec).tryAcquire().map(hold -> new HoldfastSimpleLock(hold, configuration));
        } catch (HoldfastException why) {
            throw new LockException("lock '" + spec.names().get(0) + "' could not be acquired", why);
        }
    }

    /** A moment that is over counts as a millisecond from now. */
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
            } catch (LockLostException expired) {
                // Its time was over: the lock is free, or another node's, which stays untouched.
                return;
            } catch (HoldfastException why) {
                throw new LockException("lock '" + lockConfiguration.getName() + "' could not be released; it ends with its lease", why);
            }
        }

        @Override
        protected Optional<SimpleLock> doExtend(LockConfiguration configuration) {
            try {
                hold.renew(until(configuration.getLockAtMostUntil()));
                return Optional.of(new HoldfastSimpleLock(hold, configuration));
            } catch (LockLostException expired) {
                return Optional.empty();
            } catch (HoldfastException why) {
                throw new LockException("lock '" + configuration.getName() + "' could not be extended", why);
            }
        }
    }
}
