package holdfast.testing;

import holdfast.spi.Node;
import holdfast.spi.RedisConnection;
import holdfast.spi.RedisConnector;
import java.io.BufferedInputStream;
import java.io.EOFException;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.Deque;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.atomic.AtomicInteger;

/** Connections over plain sockets, so that the core is tested without a Redis library. */
public final class SocketConnector implements RedisConnector {
    private final int port;
    private final boolean cluster;
    public final AtomicInteger opened = new AtomicInteger();
    /** When each attempt to connect began, in ns. */
    public final List<Long> attempts = new CopyOnWriteArrayList<>();
    private final AtomicInteger under = new AtomicInteger();
    /** The most attempts that were under way at a time since it was last set. */
    public final AtomicInteger most = new AtomicInteger();
    public volatile boolean fails;
    public final AtomicInteger refreshes = new AtomicInteger();

    public SocketConnector(int port) {
        this(port, false);
    }

    public SocketConnector(int port, boolean cluster) {
        this.port = port;
        this.cluster = cluster;
    }

    @Override
    public boolean isCluster() {
        return cluster;
    }

    @Override
    public void refresh() {
        refreshes.incrementAndGet();
    }

    @Override
    public RedisConnection open(Node node, Runnable onClose) throws IOException {
        attempts.add(System.nanoTime());
        opened.incrementAndGet();
        most.accumulateAndGet(under.incrementAndGet(), Math::max);
        try {
            if (fails) {
                throw new IOException("refused");
            }
            Socket socket = new Socket();
            socket.setTcpNoDelay(true);
            socket.connect(new InetSocketAddress(InetAddress.getLoopbackAddress(), node.equals(Node.PRIMARY) ? port : node.port()), 1500);
            return new Connection(socket, onClose);
        } finally {
            under.decrementAndGet();
        }
    }

    private static final class Connection implements RedisConnection {
        private record Batch(int size, Replies replies) {}

        private final Socket socket;
        private final Deque<Batch> batches = new ArrayDeque<>();
        private int index;
        private IOException broken;

        Connection(Socket socket, Runnable onClose) {
            this.socket = socket;
            Thread reader = new Thread(() -> {
                try (BufferedInputStream in = new BufferedInputStream(socket.getInputStream())) {
                    while (true) {
                        deliver(Resp.read(in));
                    }
                } catch (IOException why) {
                    fail(why);
                }
                onClose.run();
            }, "test-reader");
            reader.setDaemon(true);
            reader.start();
        }

        private void deliver(Object reply) {
            Batch batch;
            int place;
            synchronized (batches) {
                batch = batches.peek();
                place = index++;
                if (index == batch.size) {
                    batches.remove();
                    index = 0;
                }
            }
            batch.replies.reply(place, reply);
        }

        private void fail(IOException why) {
            List<Batch> left;
            synchronized (batches) {
                broken = why;
                left = List.copyOf(batches);
                batches.clear();
            }
            left.forEach(batch -> batch.replies.broken(why));
        }

        @Override
        public void send(List<byte[][]> commands, Replies replies) {
            synchronized (batches) {
                if (broken == null) {
                    batches.add(new Batch(commands.size(), replies));
                }
            }
            if (broken != null) {
                replies.broken(new EOFException("closed before"));
                return;
            }
            try {
                for (byte[][] command : commands) {
                    socket.getOutputStream().write(Resp.command(Arrays.asList(command)));
                }
            } catch (IOException why) {
                fail(why);
            }
        }

        @Override
        public void close() {
            try {
                socket.close();
            } catch (IOException closing) {
                throw new AssertionError(closing);
            }
        }
    }
}
