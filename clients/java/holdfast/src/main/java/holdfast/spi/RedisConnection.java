package holdfast.spi;

import java.util.List;
import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;

/**
 * One connection to a server. It never repeats a command, never reconnects and has no read timeout: after an error of the
 * transport it is closed for good.
 */
public interface RedisConnection {
    /**
     * Writes the commands in one go and returns without waiting for replies. Never blocks for long, never throws: a connection that can't
     * write is closed.
     *
     * @param replies receives the replies to the commands in their order: {@code Long}, {@code byte[]} (strings and status), {@code List}
     *     (arrays; maps as a flat list of keys and values), {@link RedisError} or null. It returns at once and may be called by any thread
     */
    void send(List<byte[][]> commands, Consumer<@Nullable Object> replies);

    /** Closes the connection without waiting. May be called by any thread, and more than once. */
    void close();
}
