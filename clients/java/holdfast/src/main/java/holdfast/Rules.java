package holdfast;

/** The times of {@code docs/client-protocol.md}, in ns where nothing else is said. */
final class Rules {
    static final long MS = 1_000_000L;
    static final long SECOND = 1_000 * MS;
    /** A time without an end. */
    static final long ENDLESS = Long.MAX_VALUE / 2;
    /** A wait without an answer for so long is asked for again over another connection (B11). */
    static final long QUIET = 2 * SECOND;
    /** How much later than the caller's time an acquisition may end (B13). */
    static final long GRACE = 250 * MS;
    /** A shorter lease may be over before its grant can be confirmed: it counts as granted, and is lost when its time is over. */
    static final long SHORT = 100 * MS;
    /** The longest wait of a request, in ms; a longer one is asked for again (B2). */
    static final long LONGEST_WAIT = 3_600_000L;
    /** The wait of a request that found no connection for a longer one, in ms (B30). */
    static final long POLL = 100;

    private Rules() {}

    /** Whole milliseconds, rounded up, at least 1: 0 would mean for ever (B2). */
    static long ms(long nanos) {
        return nanos <= 0 ? 1 : (nanos - 1) / MS + 1;
    }

    /** How much of a lease is certain by a clock of another speed (B6). */
    static long certain(long lease) {
        return (long) (lease * 0.99);
    }

    /** How long a request without a wait may take (B23). */
    static long silence(long lease) {
        return Math.max(50 * MS, Math.min(SECOND, lease / 8));
    }

    /** When a hold is renewed whose lease began then. Holds that are due within the same hundredth of the lease, at most 10 ms, share a pipeline. */
    static long renewal(long began, long lease) {
        long grid = Math.max(1, Math.min(10 * MS, lease / 100));
        return (began + lease / 4) / grid * grid;
    }
}
