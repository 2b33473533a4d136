package holdfast.spi;

import java.util.List;
import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;

/**
 * A connection to a server. It never repeats a command, never reconnects, and has no read timeout. After a failure of the transport it is closed for good.
 */
public interface RedisConnection {
    /**
     * Writes the commands in one pipeline, without waiting for replies. Never blocks and never throws: a connection that can't write is closed.
     *
     * @param replies receives the replies in the order of the commands: {@code Long}, {@code byte[]} (strings and status replies), {@code List} (arrays; maps
     *     as a flat list of keys and values), {@link RedisError} or null. It returns at once; any thread may call it
     */
    void send(List<byte[][]> commands, Consumer<@Nullable Object> replies);

    /** Closes the connection without blocking. Any thread may call this, and more than once. */
    void close();
}
