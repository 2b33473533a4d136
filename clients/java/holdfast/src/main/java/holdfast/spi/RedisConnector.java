package holdfast.spi;

/** Opens connections as the application's own Redis client opens its own: TLS, credentials, database, Sentinel and cluster come along. */
public interface RedisConnector {
    /**
     * Opens a new connection and returns when commands can be sent. May block; the client calls it on a thread of its own and stops
     * waiting after two seconds.
     *
     * @param node what {@link #locate} returned, or a node that a redirect of the server named
     * @param onClose to be run when the connection has ended for whatever reason: no reply follows. It returns at once
     * @throws Exception if the connection can't be opened
     */
    RedisConnection open(Node node, Runnable onClose) throws Exception;

    /** The node that serves a slot by the last known map of the cluster. Must not block. */
    default Node locate(int slot) {
        return Node.PRIMARY;
    }

    /** Whether keys are spread over the slots of a cluster. */
    default boolean isCluster() {
        return false;
    }

    /** The primary or the map of the cluster may have changed: look it up again, in the background. Must not block. */
    default void refresh() {}

    /** The client has closed its connections. The application's client stays open. */
    default void close() {}
}
