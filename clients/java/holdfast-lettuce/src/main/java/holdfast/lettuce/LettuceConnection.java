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
import java.util.concurrent.CancellationException;
import java.util.concurrent.atomic.AtomicBoolean;
import org.jspecify.annotations.Nullable;

/** A connection of Lettuce that is used by one request at a time. */
final class LettuceConnection implements RedisConnection {
    private final StatefulRedisConnection<byte[], byte[]> connection;
    private final AtomicBoolean closed = new AtomicBoolean();

    LettuceConnection(StatefulRedisConnection<byte[], byte[]> connection, Runnable onClose) {
        this.connection = connection;
        connection.addListener(new RedisConnectionStateListener() {
            @Override
            public void onRedisDisconnected(RedisChannelHandler<?, ?> handler) {
                // Otherwise Lettuce would reconnect and send a blocked command again.
                close();
                onClose.run();
            }
        });
    }

    @Override
    public void send(List<byte[][]> commands, Replies replies) {
        AtomicBoolean broken = new AtomicBoolean();
        List<RedisCommand<byte[], byte[], ?>> batch = new ArrayList<>(commands.size());
        for (int i = 0; i < commands.size(); i++) {
            batch.add(new Request(i, commands.get(i), replies, broken));
        }
        try {
            connection.dispatch(batch);
        } catch (RuntimeException why) {
            if (broken.compareAndSet(false, true)) {
                replies.broken(why);
            }
        }
    }

    @Override
    public void close() {
        if (closed.compareAndSet(false, true)) {
            connection.closeAsync();
        }
    }

    private static CommandArgs<byte[], byte[]> arguments(byte[][] command) {
        CommandArgs<byte[], byte[]> arguments = new CommandArgs<>(ByteArrayCodec.INSTANCE);
        Arrays.stream(command).skip(1).forEach(arguments::add);
        return arguments;
    }

    private static final class Request extends Command<byte[], byte[], Object> {
        private final int index;
        private final Replies replies;
        private final AtomicBoolean broken;

        Request(int index, byte[][] command, Replies replies, AtomicBoolean broken) {
            super(() -> command[0], new AnyOutput(), arguments(command));
            this.index = index;
            this.replies = replies;
            this.broken = broken;
        }

        @Override
        public void complete() {
            super.complete();
            replies.reply(index, getOutput().get());
        }

        @Override
        public boolean completeExceptionally(Throwable why) {
            boolean first = super.completeExceptionally(why);
            fail(why);
            return first;
        }

        @Override
        public void cancel() {
            super.cancel();
            fail(new CancellationException("the connection was closed"));
        }

        private void fail(Throwable why) {
            if (broken.compareAndSet(false, true)) {
                replies.broken(why);
            }
        }
    }

    /** Reads any reply: integers, strings, nil, errors, arrays; maps and sets of RESP3 as flat lists. */
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
