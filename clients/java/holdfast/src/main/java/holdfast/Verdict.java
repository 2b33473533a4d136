package holdfast;

import holdfast.spi.RedisError;
import java.util.List;
import org.jspecify.annotations.Nullable;

/** What a reply means, or an error that came instead of one: the table of errors in {@code docs/client-protocol.md}. */
enum Verdict {
    YES,
    NIL,
    /** The key holds something that is not a lock. */
    OVERWRITTEN,
    /** The same request may succeed after a pause. */
    PASSING,
    /** A later request of the same owner has taken over the place in the queue. */
    SUPERSEDED,
    /** The key is served by another node. */
    MOVED,
    /** The node is not the primary any more. */
    DEMOTED,
    /** No reply came. */
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
        // One nil of several keys is a loss of all (B35).
        return outcome == null || outcome instanceof List<?> list && list.stream().anyMatch(it -> it == null) ? NIL : YES;
    }

    /** Whether the same request may succeed later. */
    boolean passes() {
        return this == PASSING || this == SUPERSEDED || this == MOVED || this == DEMOTED || this == BROKEN;
    }
}
