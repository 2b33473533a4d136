package holdfast.jedis;

import holdfast.spi.RedisConnection;
import holdfast.spi.RedisError;
import java.io.IOException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.LinkedTransferQueue;
import java.util.concurrent.BlockingQueue;
import org.jspecify.annotations.Nullable;
import redis.clients.jedis.Connection;
import redis.clients.jedis.exceptions.JedisDataException;
import redis.clients.jedis.util.KeyValue;

/** A connection of Jedis, with a thread that writes commands and reads replies, since Jedis blocks while it does. */
final class JedisConnection implements RedisConnection {
    private record Batch(List<byte[][]> commands, Replies replies) {}

    private static final Batch END = new Batch(List.of(), new Replies() {
        @Override
        public void reply(int index, @Nullable Object reply) {}

        @Override
        public void broken(Throwable cause) {}
    });

    private final Connection connection;
    private final Runnable onClose;
    private final BlockingQueue<Batch> batches = new LinkedTransferQueue<>();
    private volatile boolean closed;

    JedisConnection(Connection connection, Runnable onClose) {
        this.connection = connection;
        this.onClose = onClose;
        Thread thread = new Thread(this::run, "holdfast-jedis");
        thread.setDaemon(true);
        thread.start();
    }

    @Override
    public void send(List<byte[][]> commands, Replies replies) {
        batches.add(new Batch(commands, replies));
    }

    @Override
    public void close() {
        closed = true;
        batches.add(END);
        disconnect();
    }

    private void disconnect() {
        try {
            connection.disconnect();
        } catch (RuntimeException closing) {
            connection.setBroken();
        }
    }

    private void run() {
        Throwable why = null;
        while (!closed && why == null) {
            try {
                Batch batch = batches.take();
                why = batch == END ? new IOException("the connection was closed") : exchange(batch);
            } catch (InterruptedException interrupted) {
                why = interrupted;
            }
        }
        Throwable cause = why == null ? new IOException("the connection was closed") : why;
        closed = true;
        onClose.run();
        disconnect();
        // A batch that is sent from now on fails when the pool learns that the connection is closed.
        for (Batch batch = batches.poll(); batch != null; batch = batches.poll()) {
            batch.replies.broken(cause);
        }
    }

    private @Nullable Throwable exchange(Batch batch) {
        try {
            for (byte[][] command : batch.commands) {
                connection.sendCommand(() -> command[0], Arrays.copyOfRange(command, 1, command.length));
            }
            for (int i = 0; i < batch.commands.size(); i++) {
                batch.replies.reply(i, read());
            }
            return null;
        } catch (RuntimeException why) {
            batch.replies.broken(why);
            return why;
        }
    }

    private @Nullable Object read() {
        try {
            return plain(connection.getOne());
        } catch (JedisDataException error) {
            return new RedisError(String.valueOf(error.getMessage()));
        }
    }

    /** Maps of RESP3 as flat lists; errors in arrays. */
    private static @Nullable Object plain(@Nullable Object reply) {
        if (reply instanceof JedisDataException error) {
            return new RedisError(String.valueOf(error.getMessage()));
        }
        if (!(reply instanceof List<?> list)) {
            return reply instanceof Boolean value ? Long.valueOf(value ? 1 : 0) : reply;
        }
        List<@Nullable Object> flat = new ArrayList<>(list.size());
        for (Object element : list) {
            if (element instanceof KeyValue<?, ?> pair) {
                flat.add(plain(pair.getKey()));
                flat.add(plain(pair.getValue()));
            } else {
                flat.add(plain(element));
            }
        }
        return flat;
    }
}
