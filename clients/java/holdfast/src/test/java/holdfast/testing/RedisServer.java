package holdfast.testing;

import java.io.IOException;
import java.net.BindException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.regex.Pattern;
import java.util.stream.Stream;
import org.awaitility.Awaitility;
import org.junit.jupiter.api.Assumptions;

/** A real server. {@code HOLDFAST_MODULE} names the module, and {@code HOLDFAST_SERVER} the program, by default {@code redis-server}. */
public final class RedisServer implements AutoCloseable {
    static {
        // A wait for a condition must not fail on a busy machine.
        Awaitility.setDefaultTimeout(Duration.ofMinutes(2));
    }

    private static final String PROGRAM = System.getenv().getOrDefault("HOLDFAST_SERVER", "redis-server");
    /** What a server or a Sentinel logs once it accepts connections. */
    private static final Pattern READY = Pattern.compile("eady to accept connections|Sentinel ID is");

    /** The folder of its files. */
    public final Path folder;
    public final int port;
    private Process process;

    private RedisServer() throws IOException {
        folder = Files.createTempDirectory("holdfast-redis");
        port = freePort();
    }

    /** Returns a port that was free a moment ago, low enough for a cluster's bus. */
    public static int freePort() throws IOException {
        while (true) {
            try (ServerSocket free = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
                if (free.getLocalPort() < 55_000) {
                    return free.getLocalPort();
                }
            }
        }
    }

    public static boolean isAvailable() {
        return System.getenv("HOLDFAST_MODULE") != null;
    }

    /** Starts a server with the module. */
    public static RedisServer withModule(String... options) throws IOException {
        Assumptions.assumeTrue(isAvailable(), "HOLDFAST_MODULE names no module");
        List<String> all = new ArrayList<>(List.of("--loadmodule", System.getenv("HOLDFAST_MODULE")));
        all.addAll(List.of(options));
        return started(all);
    }

    /** Starts a server without the module. */
    public static RedisServer withoutModule(String... options) throws IOException {
        return started(List.of(options));
    }

    /** Starts a Sentinel that watches a primary by the name {@code main}. */
    public static RedisServer sentinel(RedisServer primary) throws IOException {
        return started(sentinel -> {
            Path file = Files.writeString(sentinel.folder.resolve("sentinel.conf"), String.join("\n", "sentinel monitor main 127.0.0.1 " + primary.port + " 1",
                "sentinel down-after-milliseconds main 500", "sentinel failover-timeout main 3000", ""));
            return List.of(file.toString(), "--sentinel");
        });
    }

    private static RedisServer started(List<String> options) throws IOException {
        return started(server -> {
            List<String> all = new ArrayList<>(List.of("--save", "", "--enable-debug-command", "yes"));
            all.addAll(options);
            return all;
        });
    }

    /** Makes the first options of a server, which may name files in its folder. */
    private interface Options {
        List<String> of(RedisServer server) throws IOException;
    }

    private static RedisServer started(Options options) throws IOException {
        while (true) {
            RedisServer server = new RedisServer();
            try {
                server.start(options.of(server));
                return server;
            } catch (BindException taken) {
                server.close(); // another process uses the port: try another one
            }
        }
    }

    private void start(List<String> options) throws IOException {
        List<String> command = new ArrayList<>(List.of(PROGRAM));
        command.addAll(options);
        command.addAll(List.of("--port", String.valueOf(port), "--bind", "127.0.0.1", "--dir", folder.toString()));
        Path log = folder.resolve("log");
        process = new ProcessBuilder(command).redirectErrorStream(true).redirectOutput(log.toFile()).start();
        long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(60);
        // A connection would not tell whether this server or that of another process listens on the port; its log does.
        while (true) {
            String text = Files.readString(log);
            if (READY.matcher(text).find()) {
                return;
            }
            if (text.contains("Address already in use")) {
                throw new BindException("port " + port);
            }
            if (System.nanoTime() > until || !process.isAlive()) {
                throw new IOException("the server did not start: " + text);
            }
            try {
                Thread.sleep(10);
            } catch (InterruptedException stopped) {
                throw new IOException(stopped);
            }
        }
    }

    /** Sends a command over a connection of its own. */
    public Object call(String... words) throws IOException {
        try (Socket socket = new Socket()) {
            socket.connect(new InetSocketAddress(InetAddress.getLoopbackAddress(), port), 10_000);
            socket.setSoTimeout(40_000);
            socket.getOutputStream().write(Resp.command(Arrays.stream(words).map(word -> word.getBytes(StandardCharsets.UTF_8)).toList()));
            return Resp.read(socket.getInputStream());
        }
    }

    /** Waits until the time to live of a key has grown. */
    public void awaitRenewal(String key) {
        AtomicLong least = new AtomicLong(Long.MAX_VALUE);
        Awaitility.await().until(() -> {
            long left = (Long) call("PTTL", key);
            least.accumulateAndGet(left, Math::min);
            return left > least.get() + 500;
        });
    }

    /** Sends a command and returns its reply as text. */
    public String ask(String... words) throws IOException {
        Object reply = call(words);
        return reply instanceof byte[] bytes ? new String(bytes, StandardCharsets.UTF_8) : String.valueOf(reply);
    }

    public boolean exists(String key) throws IOException {
        return call("EXISTS", key).equals(1L);
    }

    /** Sends a signal, such as STOP or CONT. */
    public void signal(String name) throws IOException {
        try {
            new ProcessBuilder("kill", "-" + name, String.valueOf(process.pid())).start().waitFor();
        } catch (InterruptedException stopped) {
            throw new IOException(stopped);
        }
    }

    /** Ends the server with SIGKILL. */
    public void kill() {
        process.destroyForcibly();
        try {
            process.waitFor();
        } catch (InterruptedException stopped) {
            Thread.currentThread().interrupt();
        }
    }

    /** Ends the server, whose module must not have reported an internal error. */
    @Override
    public void close() throws IOException {
        kill();
        List<String> errors;
        try (Stream<String> lines = Files.lines(folder.resolve("log"), StandardCharsets.ISO_8859_1)) {
            errors = lines.filter(line -> line.contains("internal error")).toList();
        }
        try (Stream<Path> files = Files.walk(folder)) {
            for (Path file : files.sorted(Comparator.reverseOrder()).toList()) {
                Files.delete(file);
            }
        }
        if (!errors.isEmpty()) {
            throw new AssertionError(errors);
        }
    }
}
