import holdfast.DeadlockException;
import holdfast.Hold;
import holdfast.Holdfast;
import holdfast.HoldfastException;
import holdfast.LockLostException;
import holdfast.LockSpec;
import holdfast.LossReason;
import holdfast.ModuleNotLoadedException;
import holdfast.NamedLock;
import holdfast.NotAcquiredException;
import holdfast.UnavailableException;
import holdfast.VersionException;
import holdfast.jedis.JedisConnector;
import holdfast.spi.Node;
import java.net.URI;
import java.time.Duration;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import redis.clients.jedis.DefaultJedisClientConfig;
import redis.clients.jedis.HostAndPort;
import redis.clients.jedis.JedisClientConfig;

/** The driver of the Java client for the conformance suite. */
public final class Driver extends Lines {
    private final Map<String, Hold> holds = new ConcurrentHashMap<>();
    private final Map<String, Thread> acquiring = new ConcurrentHashMap<>();
    private volatile Holdfast client;
    private String url;
    private boolean isCold = true;

    private synchronized void open(String server) throws Exception {
        close();
        url = server;
        URI at = URI.create(url);
        HostAndPort address = new HostAndPort(at.getHost(), at.getPort());
        JedisClientConfig config = DefaultJedisClientConfig.builder().build();
        JedisConnector connector = switch (at.getScheme()) {
            case "redis+cluster" -> JedisConnector.cluster(Set.of(address), config);
            case "redis+sentinel" -> JedisConnector.sentinel(at.getPath().substring(1), Set.of(address), config, config);
            default -> JedisConnector.of(address, config);
        };
        if (isCold) {
            // The library is loaded with the first connection, which takes seconds on a busy machine.
            connector.open(Node.PRIMARY, () -> { }).close();
            isCold = false;
        }
        client = Holdfast.builder(connector).build();
    }

    /** The client; opens a new one if it was closed. */
    private synchronized Holdfast client() throws Exception {
        if (client == null) {
            open(url);
        }
        return client;
    }

    private void close() {
        if (client != null) {
            client.close();
            client = null;
        }
    }

    private Object[] acquire(Call call) throws Exception {
        String name = call.text("hold");
        acquiring.put(name, Thread.currentThread());
        Hold hold;
        try {
            NamedLock lock = client().lock(spec(call));
            if (!call.has("wait")) {
                hold = lock.acquire();
            } else if (call.number("wait") > 0) {
                hold = lock.acquire(call.time("wait"));
            } else {
                Optional<Hold> tried = lock.tryAcquire();
                if (tried.isEmpty()) {
                    return new Object[] {"outcome", "not-granted"};
                }
                hold = tried.get();
            }
        } finally {
            acquiring.remove(name);
        }
        holds.put(name, hold);
        hold.onLost(reason -> write("lost", name, "reason", word(reason)));
        return new Object[] {"outcome", "held", "fence", hold.fence()};
    }

    private static LockSpec spec(Call call) {
        LockSpec.Builder terms = LockSpec.builder(call.list("keys")).ephemeral(call.is("ephemeral"));
        if (call.has("lease")) {
            terms.lease(call.time("lease")).renew(call.is("watched"));
        }
        if (call.is("shared")) {
            terms.shared();
        }
        if (call.has("limit")) {
            terms.limit(call.number("limit"));
        }
        if (call.has("replicas")) {
            terms.replicas(call.number("replicas"));
        }
        return terms.build();
    }

    private Object[] check(Hold hold) {
        try {
            if (hold.check()) {
                return new Object[] {"outcome", "held"};
            }
            return new Object[] {"outcome", "lost", "reason", word(hold.lossReason()), "text", hold.toString()};
        } catch (HoldfastException why) {
            return new Object[] {"outcome", "uncertain", "text", text(why)};
        }
    }

    private static String word(LossReason reason) {
        return reason.name().toLowerCase(Locale.ROOT);
    }

    /** The outcome of a failed call, from the client's exception, and from the server's last error if the exception only reports a timeout. */
    @Override
    Object[] failure(Throwable why) {
        if (why instanceof LockLostException lost) {
            return new Object[] {"outcome", "lost", "reason", word(lost.reason()), "text", text(why)};
        }
        Throwable root = why;
        while (root.getCause() != null) {
            root = root.getCause();
        }
        String message = String.valueOf(root.getMessage());
        String outcome = why instanceof InterruptedException || message.equals("the client was closed") ? "cancelled"
            : why instanceof NotAcquiredException ? "not-granted"
            : why instanceof DeadlockException ? "deadlock"
            : why instanceof IllegalArgumentException ? "invalid"
            : message.startsWith("UNCONFIRMED") || message.startsWith("NOREPLICAS") ? "no-replicas"
            : message.startsWith("WRONGTYPE") ? "wrong-type"
            : why instanceof VersionException || why instanceof ModuleNotLoadedException ? "server"
            : why instanceof UnavailableException && !message.matches("[A-Z]+ .*") ? "connection" : "server";
        return new Object[] {"outcome", outcome, "text", text(why)};
    }

    @Override
    Object[] run(Call call) throws Exception {
        Hold hold = holds.get(call.has("hold") ? call.text("hold") : "");
        switch (call.text("call")) {
            case "open" -> open(call.text("url"));
            case "acquire" -> {
                return acquire(call);
            }
            case "release" -> {
                hold.release();
                return new Object[] {"outcome", "released"};
            }
            case "renew" -> {
                hold.renew(call.time("lease"));
                return new Object[] {"outcome", "renewed"};
            }
            case "check" -> {
                return check(hold);
            }
            case "cancel" -> {
                Thread thread = acquiring.get(call.text("hold"));
                if (thread != null) {
                    thread.interrupt();
                }
            }
            case "close" -> close();
            case "threads" -> {
                return new Object[] {"outcome", "ok", "count", Thread.getAllStackTraces().size()};
            }
            default -> {
                return new Object[] {"outcome", "invalid", "text", "this driver has no " + call.text("call")};
            }
        }
        return new Object[] {"outcome", "ok"};
    }

    public static void main(String[] arguments) {
        // The JDK's thread for timed futures never ends, so it counts from the start.
        new CompletableFuture<Void>().completeOnTimeout(null, 1, TimeUnit.MILLISECONDS).join();
        new Driver().serve();
    }
}
