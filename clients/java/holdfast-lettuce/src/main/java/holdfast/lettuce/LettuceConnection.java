package holdfast.lettuce;

import holdfast.spi.RedisConnection;
import holdfast.spi.RedisError;
import io.lettuce.core.RedisChannelHandler;
import io.lettuce.core.RedisConnectionStateListener;
import io.lettuce.core.api.StatefulRedisConnection;
import io.lettuce.core.codec.ByteArrayCodec;
import io.lettuce.core.output.CommandOutput;
import io.lettuce.core.protocol.Command;
import io.lettuce.core.protocol.CommandArgs;
import io.lettuce.core.protocol.RedisCommand;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Deque;
import java.util.List;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** A connection of Lettuce, closed for good when it breaks. */
final class LettuceConnection implements RedisConnection {
    private static final Logger LOG = LoggerFactory.getLogger(LettuceConnection.class);

    private final StatefulRedisConnection<byte[], byte[]> connection;
    private final Runnable onClose;
    private final AtomicBoolean closed = new AtomicBoolean();

    LettuceConnection(StatefulRedisConnection<byte[], byte[]> connection, Runnable onClose) {
        this.connection = connection;
        this.onClose = onClose;
        connection.addListener(new RedisConnectionStateListener() {
            @Override
            public void onRedisDisconnected(RedisChannelHandler<?, ?> handler) {
                // Otherwise Lettuce would reconnect, and send a pending command again.
                close();
            }
        });
    }

    @Override
    public void send(List<byte[][]> commands, Consumer<@Nullable Object> replies) {
        List<RedisCommand<byte[], byte[], ?>> batch = new ArrayList<>(commands.size());
        commands.forEach(command -> batch.add(new Request(command, replies)));
        try {
            connection.dispatch(batch);
        } catch (RuntimeException why) {
            close();
            LOG.debug("a connection can't write", why);
        }
    }

    @Override
    public void close() {
        if (closed.compareAndSet(false, true)) {
            connection.closeAsync();
            onClose.run();
        }
    }

    private static CommandArgs<byte[], byte[]> arguments(byte[][] command) {
        CommandArgs<byte[], byte[]> arguments = new CommandArgs<>(ByteArrayCodec.INSTANCE);
        Arrays.stream(command).skip(1).forEach(arguments::add);
        return arguments;
    }

    private final class Request extends Command<byte[], byte[], Object> {
        private final Consumer<@Nullable Object> replies;

        Request(byte[][] command, Consumer<@Nullable Object> replies) {
            super(() -> command[0], new AnyOutput(), arguments(command));
            this.replies = replies;
        }

        @Override
        public void complete() {
            super.complete();
            replies.accept(getOutput().get());
        }

        @Override
        public boolean completeExceptionally(Throwable why) {
            LettuceConnection.this.close();
            LOG.debug("a connection ended", why);
            return super.completeExceptionally(why);
        }
    }

    /** Reads any reply: an integer, a string, nil, an error, or an array. Maps and sets of RESP3 become flat lists. */
    private static final class AnyOutput extends CommandOutput<byte[], byte[], Object> {
        private final Deque<List<@Nullable Object>> open = new ArrayDeque<>();

        AnyOutput() {
            super(ByteArrayCodec.INSTANCE, null);
        }

        private void add(@Nullable Object value) {
            if (open.isEmpty()) {
                output = value;
            } else {
                open.peek().add(value);
            }
        }

        @Override
        public void set(@Nullable ByteBuffer bytes) {
            add(bytes == null ? null : codec.decodeValue(bytes));
        }

        @Override
        public void set(long integer) {
            add(integer);
        }

        @Override
        public void setError(ByteBuffer message) {
            add(new RedisError(StandardCharsets.UTF_8.decode(message).toString()));
        }

        @Override
        public void setError(String message) {
            add(new RedisError(message));
        }

        @Override
        public void multi(int count) {
            if (count < 0) {
                add(null);
                return;
            }
            List<@Nullable Object> list = new ArrayList<>(Math.min(count, 1024));
            add(list);
            open.push(list);
        }

        @Override
        public void complete(int depth) {
            while (open.size() > depth) {
                open.pop();
            }
        }
    }
}
