package holdfast.spi;

/** A node of a cluster or, without a cluster, the primary. */
public record Node(String host, int port) {
    /** The present primary, which serves all keys of a connector without a cluster. */
    public static final Node PRIMARY = new Node("", 0);

    @Override
    public String toString() {
        return equals(PRIMARY) ? "the primary" : host + ":" + port;
    }
}
