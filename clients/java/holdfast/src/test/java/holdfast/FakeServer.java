package holdfast;

import static java.nio.charset.StandardCharsets.UTF_8;

import holdfast.spi.Node;
import holdfast.spi.RedisConnection;
import holdfast.spi.RedisConnector;
import holdfast.testing.Resp;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Deque;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.function.Consumer;

/**
 * A server within the process that follows a script. It replies immediately, in the requesting thread, and takes its times from the test's clock. A script has
 * the next answers to each command, which may be silence or a cut.
 */
class FakeServer implements RedisConnector {
    /** Leaves the command unanswered until {@link #answer} is called. */
    static final String SILENCE = "silence";
    /** Closes the connection without an answer. */
    static final String CUT = "cut";
    static final String VERSION = "*6\r\n$8\r\nprotocol\r\n*2\r\n:4\r\n:4\r\n$7\r\nversion\r\n$5\r\n0.4.0\r\n$16\r\nreplicas-timeout\r\n:300\r\n";
    static final String NIL = "$-1\r\n";

    /** What the server does with attempts to connect. */
    enum Door { OPEN, REFUSES, ACCEPTS_AND_CLOSES }

    /** A command that was read, its connection, and the time in ms. */
    record Command(int connection, long at, List<String> words) {
        String name() {
            return words.get(0);
        }

        boolean has(String word) {
            return words.contains(word);
        }

        /** Returns the number that follows a word. */
        long number(String word) {
            return Long.parseLong(words.get(words.indexOf(word) + 1));
        }

        String owner() {
            return words.get(name().startsWith("LOCK.M") ? 2 + Integer.parseInt(words.get(1)) : 2);
        }
    }

    final List<Command> commands = new CopyOnWriteArrayList<>();
    /** The times of the attempts to connect, in ms. */
    final List<Long> attempts = new ArrayList<>();
    Door door = Door.OPEN;
    boolean cluster;
    int refreshes;
    private final ManualClock clock;
    private final Map<Integer, FakeServer> others = new HashMap<>();
    private final Map<String, Deque<String>> scripts = new HashMap<>();
    private final Map<String, String> defaults = new HashMap<>();
    private final Map<Integer, Connection> open = new TreeMap<>();
    private int accepted;

    FakeServer(ManualClock clock) {
        this.clock = clock;
        always("LOCK.VERSION", VERSION);
        always("LOCK.ACQUIRE", granted(1000, 0));
        always("LOCK.MACQUIRE", granted(1000, 0));
        always("LOCK.RENEW", ":1000\r\n");
        always("LOCK.INFO", NIL);
        always("LOCK.RELEASE", ":1\r\n");
    }

    static String granted(long token, long waited) {
        return "*2\r\n:" + token + "\r\n:" + waited + "\r\n";
    }

    /** Adds answers to the next commands of this name. */
    FakeServer next(String command, String... answers) {
        scripts.computeIfAbsent(command, name -> new ArrayDeque<>()).addAll(List.of(answers));
        return this;
    }

    /** Sets the answer to commands of this name for which no other was added. */
    FakeServer always(String command, String answer) {
        defaults.put(command, answer);
        return this;
    }

    /** Makes this a node of a cluster, and adds the node at this port. */
    void node(int port, FakeServer other) {
        cluster = true;
        others.put(port, other);
    }

    /** Returns how many connections were accepted. */
    int accepted() {
        return accepted;
    }

    boolean isOpen(int connection) {
        return open.containsKey(connection);
    }

    Set<Integer> open() {
        return Set.copyOf(open.keySet());
    }

    /** Returns the commands of this name that were read. */
    List<Command> read(String name) {
        return commands.stream().filter(command -> command.name().equals(name)).toList();
    }

    /** Answers the oldest command of a connection that was left unanswered. */
    void answer(int connection, String answer) {
        Connection to = open.get(connection);
        if (to != null) {
            to.pending.remove().accept(parse(answer));
        }
    }

    void cut(int connection) {
        Connection cut = open.get(connection);
        if (cut != null) {
            cut.end();
        }
    }

    void cutAll() {
        open().forEach(this::cut);
    }

    private static Object parse(String answer) {
        try {
            return Resp.read(new ByteArrayInputStream(answer.getBytes(UTF_8)));
        } catch (IOException why) {
            throw new UncheckedIOException(why);
        }
    }

    @Override
    public boolean isCluster() {
        return cluster;
    }

    @Override
    public void refresh() {
        refreshes++;
    }

    @Override
    public RedisConnection open(Node node, Runnable onClose) throws IOException {
        FakeServer server = node.equals(Node.PRIMARY) ? this : others.get(node.port());
        server.attempts.add(clock.now() / 1_000_000);
        if (server.door == Door.REFUSES) {
            throw new IOException("refused");
        }
        Connection connection = server.new Connection(++server.accepted, onClose);
        server.open.put(connection.id, connection);
        if (server.door == Door.ACCEPTS_AND_CLOSES) {
            clock.at(clock.now() + 1_000_000, connection::end);
        }
        return connection;
    }

    private final class Connection implements RedisConnection {
        final int id;
        final Deque<Consumer<Object>> pending = new ArrayDeque<>();
        private final Runnable onClose;

        Connection(int id, Runnable onClose) {
            this.id = id;
            this.onClose = onClose;
        }

        @Override
        public void send(List<byte[][]> batch, Consumer<Object> replies) {
            for (byte[][] words : batch) {
                if (!isOpen(id)) {
                    return;
                }
                Command command = new Command(id, clock.now() / 1_000_000, Arrays.stream(words).map(word -> new String(word, UTF_8)).toList());
                if (door == Door.ACCEPTS_AND_CLOSES) {
                    pending.add(replies);
                    continue;
                }
                commands.add(command);
                Deque<String> script = scripts.get(command.name());
                String answer = script == null || script.isEmpty() ? defaults.getOrDefault(command.name(), "-ERR unknown command '" + command.name() + "'\r\n") : script.remove();
                if (answer.equals(CUT)) {
                    end();
                    return;
                } else if (answer.equals(SILENCE)) {
                    pending.add(replies);
                } else {
                    replies.accept(parse(answer));
                }
            }
        }

        void end() {
            if (open.remove(id) != null) {
                onClose.run();
            }
        }

        @Override
        public void close() {
            end();
        }
    }
}
