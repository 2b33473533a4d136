package holdfast;

import holdfast.spi.RedisError;
import java.util.List;
import org.jspecify.annotations.Nullable;

/** What an outcome means: a reply, or an exception if no reply arrived. The table of errors in {@code docs/client-protocol.md}. */
enum Verdict {
    /** A positive reply. */
    YES,
    NIL,
    /** The key holds a value that is not a lock. */
    OVERWRITTEN,
    /** The same request may succeed after a pause. */
    PASSING,
    /** Another request of the same owner has taken over the place in the queue. */
    SUPERSEDED,
    /** Another node serves the key. */
    MOVED,
    /** The node is no longer the primary. */
    DEMOTED,
    /** No reply arrived. */
    BROKEN,
    /** A repetition would fail, too. */
    FATAL;

    private static final List<String> PASSING_WORDS = List.of("too many waiters", "being confirmed", "max number of clients reached");

    static Verdict of(@Nullable Object outcome) {
        if (outcome instanceof RedisError error) {
            return switch (error.code()) {
                case "LOADING", "BUSY", "TRYAGAIN", "MASTERDOWN", "MISCONF", "NOREPLICAS", "CLUSTERDOWN", "OOM", "UNCONFIRMED" -> PASSING;
                case "SUPERSEDED" -> SUPERSEDED;
                case "MOVED", "ASK" -> MOVED;
                case "READONLY", "UNBLOCKED" -> DEMOTED;
                case "WRONGTYPE" -> OVERWRITTEN;
                default -> PASSING_WORDS.stream().anyMatch(error.message()::contains) ? PASSING : FATAL;
            };
        }
        if (outcome instanceof Throwable) {
            return outcome instanceof HoldfastException && !(outcome instanceof UnavailableException) ? FATAL : BROKEN;
        }
        // A nil for one of several keys is a loss of all (B35).
        return outcome == null || outcome instanceof List<?> list && list.stream().anyMatch(it -> it == null) ? NIL : YES;
    }

    /** Returns whether the same request may succeed later. */
    boolean passes() {
        return this == PASSING || this == SUPERSEDED || this == MOVED || this == DEMOTED || this == BROKEN;
    }
}
