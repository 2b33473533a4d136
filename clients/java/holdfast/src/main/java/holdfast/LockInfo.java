package holdfast;

import java.time.Duration;
import java.util.List;
import java.util.Optional;

/**
 * What the server says of a lock.
 *
 * @param limit how many owners may hold it; 0: any number; empty while no owner holds it
 * @param fence the newest fencing token; empty if unknown
 * @param timeToLive until the last lease ends; empty if it does not end, or while no owner holds the lock
 * @param holders those whose leases end last, at most 1,000
 * @param holderCount how many hold it
 * @param waiterCount how many wait for it
 */
public record LockInfo(Optional<Long> limit, Optional<Long> fence, Optional<Duration> timeToLive, List<Holder> holders, long holderCount, long waiterCount) {
    /**
     * An owner that holds the lock.
     *
     * @param token its fencing token; 0 if unknown (a lock that Redisson wrote)
     * @param holds how often it was taken and not yet released
     */
    public record Holder(String owner, long token, long holds, Optional<Duration> timeToLive) {}

    /**
     * A request that waits.
     *
     * @param waited for how long
     * @param remaining for how long it will wait at most; empty: without a limit
     */
    public record Waiter(String owner, Duration waited, Optional<Duration> remaining) {}
}
