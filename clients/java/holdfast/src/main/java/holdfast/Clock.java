package holdfast;

/** Where a client's time comes from. */
interface Clock {
    /** The monotonic clock in ns, from an origin of its own. */
    long now();

    /** The wall clock in ms. */
    long wall();

    /** Runs a task once, at this time of the monotonic clock or soon after. */
    void at(long time, Runnable task);

    /** No task runs any more. */
    void close();
}
