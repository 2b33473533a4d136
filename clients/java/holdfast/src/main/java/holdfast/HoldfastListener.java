package holdfast;

import java.time.Duration;

/** Receives events, for metrics and logs. The methods are called on a thread for callbacks and may block. */
public interface HoldfastListener {
    /** A lock was acquired after this wait. */
    default void acquired(String name, Duration waited) {}

    /** An acquisition ended without the lock after this wait: the lock was held, or the acquisition failed or was cancelled. */
    default void notAcquired(String name, Duration waited) {}

    /** A hold was lost. */
    default void lost(String name, LossReason reason) {}

    /** A lock was released after having been held for this time. */
    default void released(String name, Duration held) {}
}
