package holdfast.testing;

import static java.nio.charset.StandardCharsets.UTF_8;

import java.io.BufferedInputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * A server that follows a script: the next answers to each command are queued, and an answer may be silence or a cut. All that it reads is
 * kept.
 */
public final class FakeServer implements AutoCloseable {
    /** Leaves the command unanswered until {@link #answer} is called. */
    public static final String SILENCE = "silence";
    /** Closes the connection without an answer. */
    public static final String CUT = "cut";
    public static final String NIL = "$-1\r\n";

    /** A command that was read. */
    public record Command(int connection, long at, List<String> words) {
        public String name() {
            return words.get(0);
        }

        public boolean has(String word) {
            return words.contains(word);
        }

        /** The number that follows a word. */
        public long number(String word) {
            return Long.parseLong(words.get(words.indexOf(word) + 1));
        }

        public String owner() {
            return words.get(name().startsWith("LOCK.M") ? 2 + Integer.parseInt(words.get(1)) : 2);
        }
    }

    private final ServerSocket listener;
    private final Map<String, Deque<String>> scripts = new ConcurrentHashMap<>();
    private final Map<String, String> defaults = new ConcurrentHashMap<>();
    private final Map<Integer, Socket> sockets = new ConcurrentHashMap<>();
    private final AtomicInteger connections = new AtomicInteger();
    public final List<Command> commands = new CopyOnWriteArrayList<>();
    private volatile boolean refuses;

    public FakeServer() throws IOException {
        listener = new ServerSocket(0, 100, InetAddress.getLoopbackAddress());
        always("LOCK.VERSION", "*6\r\n$8\r\nprotocol\r\n*2\r\n:4\r\n:4\r\n$7\r\nversion\r\n$5\r\n0.4.0\r\n$16\r\nreplicas-timeout\r\n:300\r\n");
        always("LOCK.ACQUIRE", granted(1000, 0));
        always("LOCK.MACQUIRE", granted(1000, 0));
        always("LOCK.RENEW", ":1000\r\n");
        always("LOCK.INFO", NIL);
        always("LOCK.RELEASE", ":1\r\n");
        start("fake-listener", () -> {
            while (!listener.isClosed()) {
                Socket socket = listener.accept();
                if (refuses) {
                    socket.close();
                    continue;
                }
                int id = connections.incrementAndGet();
                sockets.put(id, socket);
                start("fake-connection", () -> serve(id, socket));
            }
        });
    }

    private interface Task {
        void run() throws IOException;
    }

    private static void start(String name, Task task) {
        Thread thread = new Thread(() -> {
            try {
                task.run();
            } catch (IOException ended) {
                // The other side closed the connection.
            }
        }, name);
        thread.setDaemon(true);
        thread.start();
    }

    private void serve(int id, Socket socket) throws IOException {
        BufferedInputStream in = new BufferedInputStream(socket.getInputStream());
        try (socket) {
            while (true) {
                List<String> words = ((List<?>) Resp.read(in)).stream().map(word -> new String((byte[]) word, UTF_8)).toList();
                Command command = new Command(id, System.nanoTime(), words);
                commands.add(command);
                Deque<String> script = scripts.get(command.name());
                String answer;
                synchronized (this) {
                    answer = script == null || script.isEmpty() ? defaults.getOrDefault(command.name(), "-ERR unknown command '" + command.name() + "'\r\n") : script.remove();
                }
                if (answer.equals(CUT)) {
                    return;
                }
                if (!answer.equals(SILENCE)) {
                    answer(id, answer);
                }
            }
        } finally {
            sockets.remove(id);
        }
    }

    public static String granted(long token, long waited) {
        return "*2\r\n:" + token + "\r\n:" + waited + "\r\n";
    }

    /** The answers to the next commands of this name. */
    public synchronized FakeServer next(String command, String... answers) {
        scripts.computeIfAbsent(command, name -> new ArrayDeque<>()).addAll(List.of(answers));
        return this;
    }

    /** The answer to all commands of this name for which nothing else is queued. */
    public FakeServer always(String command, String answer) {
        defaults.put(command, answer);
        return this;
    }

    /** Answers on a connection, later. */
    public void answer(int connection, String answer) throws IOException {
        Socket socket = sockets.get(connection);
        if (socket != null) {
            OutputStream out = socket.getOutputStream();
            synchronized (socket) {
                out.write(answer.getBytes(UTF_8));
                out.flush();
            }
        }
    }

    /** Cuts a connection. */
    public void cut(int connection) throws IOException {
        Socket socket = sockets.get(connection);
        if (socket != null) {
            socket.close();
        }
    }

    /** Closes new connections at once. */
    public void refuse(boolean refuses) {
        this.refuses = refuses;
    }

    public int port() {
        return listener.getLocalPort();
    }

    /** How many connections it has accepted so far. */
    public int accepted() {
        return connections.get();
    }

    public boolean isOpen(int connection) {
        return sockets.containsKey(connection);
    }

    /** The commands of this name that were read so far. */
    public List<Command> read(String name) {
        return commands.stream().filter(command -> command.name().equals(name)).toList();
    }

    public Set<Integer> open() {
        return Set.copyOf(sockets.keySet());
    }

    @Override
    public void close() throws IOException {
        listener.close();
        for (Socket socket : sockets.values()) {
            socket.close();
        }
    }
}
