package holdfast;

import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;

/**
 * The state of a lock at the server.
 *
 * @param limit how many owners may hold it; 0: any number; empty while no owner holds it
 * @param fence the newest fencing token; empty if unknown
 * @param timeToLive until the last lease ends; empty if it does not end, or while no owner holds the lock
 * @param holders the holders whose leases end last, at most 1,000
 * @param holderCount how many owners hold it
 * @param waiterCount how many requests wait for it
 */
public record LockInfo(Optional<Long> limit, Optional<Long> fence, Optional<Duration> timeToLive, List<Holder> holders, long holderCount, long waiterCount) {
    /** Reads the reply to LOCK.INFO; unknown fields are ignored. */
    static LockInfo of(Object reply) {
        Map<String, Object> map = Reply.map(reply);
        List<Holder> holders = Reply.maps(map.get("holders")).stream().map(Holder::of).toList();
        return new LockInfo(Reply.number(map.get("limit")), Reply.number(map.get("fence")), Reply.time(map.get("ttl")), holders,
            Reply.number(map.get("holder_count")).orElse((long) holders.size()), Reply.number(map.get("waiters")).orElse(0L));
    }

    /**
     * An owner that holds the lock.
     *
     * @param token its fencing token; 0 if unknown, as for a lock that Redisson wrote
     * @param holds its hold count
     */
    public record Holder(String owner, long token, long holds, Optional<Duration> timeToLive) {
        private static Holder of(Map<String, Object> map) {
            return new Holder(String.valueOf(Reply.text(map.get("owner"))), Reply.number(map.get("token")).orElse(0L), Reply.number(map.get("holds")).orElse(1L), Reply.time(map.get("ttl")));
        }
    }

    /**
     * A request that waits.
     *
     * @param waited for how long it has waited
     * @param remaining for how long it will wait at most; empty: without a limit
     */
    public record Waiter(String owner, Duration waited, Optional<Duration> remaining) {
        static Waiter of(Map<String, Object> map) {
            return new Waiter(String.valueOf(Reply.text(map.get("owner"))), Reply.time(map.get("waited")).orElseThrow(), Reply.time(map.get("remaining")));
        }
    }
}
