package holdfast.spi;

/** A server of a cluster, or the one primary that a connector without a cluster knows. */
public record Node(String host, int port) {
    /** The primary, wherever it is now: what connectors without a cluster serve all keys with. */
    public static final Node PRIMARY = new Node("", 0);

    @Override
    public String toString() {
        return equals(PRIMARY) ? "the primary" : host + ":" + port;
    }
}
