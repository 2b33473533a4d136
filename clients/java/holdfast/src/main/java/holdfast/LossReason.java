package holdfast;

/** Why a hold was lost. */
public enum LossReason {
    /** The lease ended before it was renewed: the server was unreachable, the process was paused, or the hold is not renewed. */
    EXPIRED,
    /** The server no longer has the hold: it was force-released, deleted, or lost in a failover, or its lease ended. */
    GONE,
    /** The key holds a value that is not a lock. */
    CHANGED,
    /** The connection of an ephemeral hold ended. */
    DISCONNECTED
}
