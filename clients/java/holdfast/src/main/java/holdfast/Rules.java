package holdfast;

/** The times of {@code docs/client-protocol.md}, in ns unless stated otherwise. */
final class Rules {
    static final long MS = 1_000_000L;
    static final long SECOND = 1_000 * MS;
    /** A time without an end. */
    static final long ENDLESS = Long.MAX_VALUE / 2;
    /** After so long without a reply, a wait is requested again over another connection (B11). */
    static final long QUIET = 2 * SECOND;
    /** How long after the caller's time an acquisition may end (B13). */
    static final long GRACE = 250 * MS;
    /** A grant with a shorter lease counts however late it is read: there is no time to renew it first. */
    static final long SHORT = 100 * MS;
    /** The greatest WAIT of a request, in ms; a longer wait is repeated (B2). */
    static final long LONGEST_WAIT = 3_600_000L;
    /** An ephemeral hold is renewed at least so often: a server with an idle {@code timeout} would close its connection (B33). */
    static final long LONGEST_IDLE = 2 * SECOND;

    private Rules() {}

    /** Converts to whole milliseconds, rounded up, at least 1: 0 would mean for ever (B2). */
    static long ms(long nanos) {
        return nanos <= 0 ? 1 : (nanos - 1) / MS + 1;
    }

    /** Returns the part of a lease that is certain by a clock whose speed differs from the server's (B6). */
    static long certain(long lease) {
        return (long) (lease * 0.99);
    }

    /** Returns the WAIT of a request that polls, in ms: the more of them are due, the shorter, so that each is soon sent (B30). */
    static long poll(int due) {
        return Math.max(5, Math.min(100, ms(SECOND / due)));
    }

    /** Returns how long a request without WAIT may take (B23). */
    static long silence(long lease) {
        return Math.max(50 * MS, Math.min(SECOND, lease / 8));
    }

    /**
     * Returns when to renew a lease that began at a time: a quarter later, rounded down to a hundredth of the lease, at most 10 ms, so that renewals share
     * pipelines. An ephemeral hold is renewed after {@link #LONGEST_IDLE} if that is earlier.
     */
    static long renewal(long began, long lease, boolean ephemeral) {
        long grid = Math.max(1, Math.min(10 * MS, lease / 100));
        long interval = ephemeral ? Math.min(LONGEST_IDLE, lease / 4) : lease / 4;
        return (began + interval) / grid * grid;
    }
}
