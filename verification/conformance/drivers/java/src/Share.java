import holdfast.Hold;
import holdfast.Holdfast;
import holdfast.jedis.JedisConnector;
import java.net.URI;
import java.util.concurrent.Callable;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.redisson.api.RLock;
import redis.clients.jedis.DefaultJedisClientConfig;
import redis.clients.jedis.HostAndPort;

/** Counts the grants of Redisson and of the Java client whose threads contend for one lock: {@code Share URL SECONDS THREADS THREADS-OF-REDISSON}. */
public final class Share {
    /** Acquires the lock, and returns the function that releases it. */
    private interface Contender extends Callable<Runnable> { }

    private final AtomicInteger inside = new AtomicInteger();
    private volatile boolean isOver;

    /** Starts threads that acquire and release the lock. Returns the number of their grants, and the longest wait in ms. */
    private AtomicLong[] run(int threads, Contender contender) {
        AtomicLong[] figures = {new AtomicLong(), new AtomicLong()};
        for (int i = 0; i < threads; i++) {
            Thread thread = new Thread(() -> {
                while (true) {
                    long asked = System.nanoTime();
                    Runnable release = call(contender);
                    if (isOver) {
                        return;
                    }
                    if (inside.incrementAndGet() > 1) {
                        throw new IllegalStateException("two are inside");
                    }
                    figures[0].incrementAndGet();
                    figures[1].accumulateAndGet((System.nanoTime() - asked) / 1_000_000, Math::max);
                    inside.decrementAndGet();
                    release.run();
                }
            });
            thread.setDaemon(true);
            thread.start();
        }
        return figures;
    }

    private static Runnable call(Contender contender) {
        try {
            return contender.call();
        } catch (Exception why) {
            throw new IllegalStateException(why);
        }
    }

    public static void main(String[] arguments) throws Exception {
        URI at = URI.create(arguments[0]);
        HostAndPort address = new HostAndPort(at.getHost(), at.getPort());
        Holdfast client = Holdfast.builder(JedisConnector.of(address, DefaultJedisClientConfig.builder().build())).build();
        RLock lock = RedissonDriver.connect(arguments[0], 30_000).getLock("shared");
        Share share = new Share();
        AtomicLong[] ours = share.run(Integer.parseInt(arguments[2]), () -> {
            Hold hold = client.lock("shared").acquire();
            return hold::release;
        });
        AtomicLong[] theirs = share.run(Integer.parseInt(arguments[3]), () -> {
            lock.lock();
            return lock::unlock;
        });
        Thread.sleep(Integer.parseInt(arguments[1]) * 1_000L);
        share.isOver = true;
        System.out.printf("Holdfast: %s grants, longest wait of these %s ms%nRedisson: %s grants, longest wait of these %s ms%n", ours[0], ours[1], theirs[0], theirs[1]);
        // Exits without closing the clients: a close would end the pending waits of their threads with exceptions.
        Runtime.getRuntime().halt(0);
    }
}
