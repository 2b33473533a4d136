package holdfast.spi;

/** Opens connections as the application's Redis client does: with its TLS, credentials and database, to its server, Sentinel's primary or cluster. */
public interface RedisConnector {
    /**
     * Opens a connection and returns when commands can be sent. May block: the client calls it on a thread of its own, and waits for two seconds.
     *
     * @param node the result of {@link #locate}, or the target of a redirect
     * @param onClose must be run when the connection has ended for any reason, after the last reply. It returns at once
     * @throws Exception if the connection can't be opened
     */
    RedisConnection open(Node node, Runnable onClose) throws Exception;

    /** Returns the node that serves a slot, by the last known map of the cluster. Must not block. */
    default Node locate(int slot) {
        return Node.PRIMARY;
    }

    /** Returns whether this connects to a cluster. */
    default boolean isCluster() {
        return false;
    }

    /** Looks up the primary or the map of the cluster again, in the background: it may have changed. Must not block. */
    default void refresh() {}

    /** Frees resources of the connector, after the client has closed its connections. Must not close the application's client. */
    default void close() {}
}
