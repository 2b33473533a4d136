import java.net.URI;
import java.time.Duration;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;
import org.redisson.config.ConstantDelay;

/** The driver of Redisson, which uses its own protocol on the same mutexes. Each hold has its own thread id. */
public final class RedissonDriver extends Lines {
    /** The lease that its watchdog renews, in ms: the same as in ../../src/random.rs. */
    private static final int WATCHDOG = 4_000;

    private record Held(RLock lock, long thread) { }

    private final Map<String, Held> holds = new ConcurrentHashMap<>();
    private final AtomicLong threads = new AtomicLong();
    private RedissonClient client;

    /** A client with default settings, except that a repeated request ends sooner. */
    static RedissonClient connect(String url, int watchdog) {
        Config config = new Config().setLockWatchdogTimeout(watchdog).setThreads(4).setNettyThreads(4).setLazyInitialization(true);
        URI at = URI.create(url);
        config.useSingleServer().setAddress("redis://" + at.getHost() + ":" + at.getPort()).setConnectionMinimumIdleSize(1)
            .setConnectionPoolSize(16).setTimeout(2_000).setRetryAttempts(2).setRetryDelay(new ConstantDelay(Duration.ofMillis(300)));
        return Redisson.create(config);
    }

    private Object[] acquire(Call call) throws Exception {
        if (call.is("watched") && call.number("lease") != WATCHDOG) {
            throw new IllegalArgumentException("its watchdog renews leases of " + WATCHDOG + " ms");
        }
        Held hold = new Held(client.getLock(call.list("keys")[0]), threads.incrementAndGet());
        int lease = call.is("watched") ? -1 : call.number("lease");
        if (!call.has("wait")) {
            hold.lock.lockAsync(lease, TimeUnit.MILLISECONDS, hold.thread).get();
        } else if (!hold.lock.tryLockAsync(call.number("wait"), lease, TimeUnit.MILLISECONDS, hold.thread).get()) {
            return new Object[] {"outcome", "not-granted"};
        }
        holds.put(call.text("hold"), hold);
        return new Object[] {"outcome", "held"};
    }

    @Override
    Object[] run(Call call) throws Exception {
        Held hold = holds.get(call.has("hold") ? call.text("hold") : "");
        switch (call.text("call")) {
            case "open" -> client = connect(call.text("url"), WATCHDOG);
            case "acquire" -> {
                return acquire(call);
            }
            case "release" -> {
                hold.lock.unlockAsync(hold.thread).get();
                return new Object[] {"outcome", "released"};
            }
            case "check" -> {
                return new Object[] {"outcome", hold.lock.isHeldByThreadAsync(hold.thread).get() ? "held" : "lost"};
            }
            case "force" -> client.getLock(call.text("key")).forceUnlockAsync().get();
            case "threads" -> {
                return new Object[] {"outcome", "ok", "count", Thread.getAllStackTraces().size()};
            }
            default -> {
                return new Object[] {"outcome", "invalid", "text", "this driver has no " + call.text("call")};
            }
        }
        return new Object[] {"outcome", "ok"};
    }

    @Override
    Object[] failure(Throwable why) {
        Throwable root = why instanceof ExecutionException ? why.getCause() : why;
        if (root instanceof IllegalMonitorStateException) {
            // Redisson does not know the reason.
            return new Object[] {"outcome", "lost"};
        }
        return new Object[] {"outcome", root instanceof IllegalArgumentException ? "invalid" : "connection", "text", text(root)};
    }

    public static void main(String[] arguments) {
        new RedissonDriver().serve();
    }
}
