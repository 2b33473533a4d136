package holdfast;

/** Why a hold is lost. */
public enum LossReason {
    /** The lease ended before it was renewed: the server was unreachable, the process was paused, or the hold is not renewed. */
    EXPIRED,
    /** The server no longer knows the hold: it was forced, deleted, or lost in a failover; or its lease ended there. */
    GONE,
    /** The key holds something that is not a lock. */
    CHANGED,
    /** The connection of an ephemeral hold ended. */
    DISCONNECTED
}
