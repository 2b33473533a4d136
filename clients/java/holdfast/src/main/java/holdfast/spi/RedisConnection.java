package holdfast.spi;

import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * One connection to a server. It never repeats a command, never reconnects and has no read timeout: after an error of the
 * transport it is closed for good.
 */
public interface RedisConnection {
    /** What receives the replies to one call of {@link #send}. Both methods return at once and may be called by any thread. */
    interface Replies {
        /**
         * A reply has been read.
         *
         * @param index the command's place in the list, from 0; replies come in this order
         * @param reply {@code Long}, {@code byte[]} (strings and status), {@code List} (arrays; maps as a flat list of keys and values),
         *     {@link RedisError} or null
         */
        void reply(int index, @Nullable Object reply);

        /** The connection ended before all replies were read. Called at most once, and no reply follows. */
        void broken(Throwable cause);
    }

    /** Writes the commands in one go and returns without waiting for replies. Never blocks for long, never throws. */
    void send(List<byte[][]> commands, Replies replies);

    /** Closes the connection without waiting. May be called by any thread, and more than once. */
    void close();
}
