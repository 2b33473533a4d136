package holdfast.spi;

/** An error reply of the server, such as {@code WRONGTYPE Operation against …}. */
public record RedisError(String message) {
    /** Returns the first word of the message. */
    public String code() {
        int end = message.indexOf(' ');
        return end < 0 ? message : message.substring(0, end);
    }
}
