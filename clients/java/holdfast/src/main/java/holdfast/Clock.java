package holdfast;

/** The clocks of a client. */
interface Clock {
    /** Returns the time of the monotonic clock, in ns. */
    long now();

    /** Returns the time of the wall clock, in ms. */
    long wall();

    /** Runs a task once, at this time of the monotonic clock or soon after. */
    void at(long time, Runnable task);

    /** Drops all tasks. */
    void close();
}
