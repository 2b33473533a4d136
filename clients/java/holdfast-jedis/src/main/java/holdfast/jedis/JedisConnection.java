package holdfast.jedis;

import holdfast.spi.RedisConnection;
import holdfast.spi.RedisError;
import java.io.IOException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedTransferQueue;
import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;
import redis.clients.jedis.Connection;
import redis.clients.jedis.exceptions.JedisDataException;
import redis.clients.jedis.util.KeyValue;

/** A connection of Jedis. A thread of its own writes commands and reads replies, since Jedis blocks meanwhile. */
final class JedisConnection implements RedisConnection {
    private static final Logger LOG = LoggerFactory.getLogger(JedisConnection.class);

    private record Batch(List<byte[][]> commands, Consumer<@Nullable Object> replies) {}

    /** Wakes the thread up when the connection is closed. */
    private static final Batch END = new Batch(List.of(), reply -> { });

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
    public void send(List<byte[][]> commands, Consumer<@Nullable Object> replies) {
        batches.add(new Batch(commands, replies));
    }

    @Override
    public void close() {
        closed = true;
        batches.add(END);
        disconnect();
    }

    /** Closes the socket. Jedis 6 can do that only after a flush, which blocks while a write does. */
    private void disconnect() {
        try {
            connection.forceDisconnect();
        } catch (NoSuchMethodError jedis6) {
            flushAndDisconnect();
        } catch (IOException | RuntimeException why) {
            LOG.debug("a connection could not be closed", why);
        }
    }

    private void flushAndDisconnect() {
        try {
            connection.disconnect();
        } catch (RuntimeException why) {
            LOG.debug("a connection was closed without a flush", why);
        }
    }

    private void run() {
        try {
            for (Batch batch = batches.take(); !closed; batch = batches.take()) {
                for (byte[][] command : batch.commands) {
                    connection.sendCommand(() -> command[0], Arrays.copyOfRange(command, 1, command.length));
                }
                for (int i = 0; i < batch.commands.size(); i++) {
                    batch.replies.accept(read());
                }
            }
        } catch (InterruptedException | RuntimeException why) {
            LOG.debug("a connection ended", why);
        } finally {
            onClose.run();
            disconnect();
        }
    }

    private @Nullable Object read() {
        try {
            return plain(connection.getOne());
        } catch (JedisDataException error) {
            return new RedisError(String.valueOf(error.getMessage()));
        }
    }

    /** Converts a reply to the types of {@link RedisConnection#send}: maps of RESP3 become flat lists. */
    private static @Nullable Object plain(@Nullable Object reply) {
        if (!(reply instanceof List<?> list)) {
            return reply;
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
