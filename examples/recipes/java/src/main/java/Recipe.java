import java.security.SecureRandom;
import java.time.Duration;
import java.util.HexFormat;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.LockSupport;
import java.util.function.BooleanSupplier;

/** What both Java recipes share: a lock with raw LOCK.* commands over a function that sends one command. */
final class Recipe {
    static final long LEASE = 10_000; // ms; a killed process blocks others for at most this long
    static final long SURE = LEASE / 100 * 99; // ms; a lease counts for this long, from before its request was sent: two clocks may differ by 1 %
    static final long PAUSE = 100; // ms

    /** The connection broke or could not be opened. Error replies are other exceptions. */
    static final class Broken extends Exception {
        Broken(Throwable cause) { super(cause); }
    }

    /** Sends one command and never repeats it. Returns null for nil. */
    interface Send {
        Long send(String command, String key, String... args) throws Broken;
    }

    interface Work {
        void run(long token, BooleanSupplier isHeld) throws Exception;
    }

    private final Send waits;
    private final Send shorts;
    private final String key;
    private final String owner;
    private boolean broke;
    private volatile long certain; // until then no other client can hold the lock

    /** {@code waits} sends commands that block, over a connection of its own without a read timeout. */
    Recipe(Send waits, Send shorts, String key) {
        this.waits = waits;
        this.shorts = shorts;
        this.key = key;
        var id = new byte[16];
        new SecureRandom().nextBytes(id);
        owner = HexFormat.of().formatHex(id); // unique for each acquisition
    }

    private static long now() { return System.nanoTime() / 1_000_000; }

    void withLock(Duration wait, Work work) throws Exception {
        long token = acquire(wait.toMillis());
        var timer = Executors.newSingleThreadScheduledExecutor();
        timer.scheduleWithFixedDelay(() -> {
            while (isHeld() && !timer.isShutdown()) {
                try {
                    renew(token);
                    return;
                } catch (Exception e) {
                    LockSupport.parkNanos(PAUSE * 1_000_000); // asked again while the lease is certain
                }
            }
        }, LEASE / 4, LEASE / 4, TimeUnit.MILLISECONDS);
        try {
            work.run(token, this::isHeld);
        } finally {
            timer.shutdown();
            timer.awaitTermination(LEASE, TimeUnit.MILLISECONDS);
            release(token);
        }
    }

    private boolean isHeld() { return now() < certain; }

    private void renew(long token) throws Broken {
        long sent = now();
        Long renewed = shorts.send("LOCK.RENEW", key, owner, "TOKEN", "" + token, "LEASE", "" + LEASE);
        certain = renewed == null ? Long.MIN_VALUE : sent + SURE; // nil: lost
    }

    private long acquire(long wait) throws Exception {
        long began = now();
        for (long waited = 0; waited < wait; waited = now() - began) { // WAITED keeps the place in the queue
            long sent = now();
            try {
                Long token = waits.send("LOCK.ACQUIRE", key, owner, "HOLDS", "1", "LEASE", "" + LEASE,
                        "WAIT", "" + (wait - waited), "WAITED", "" + waited);
                if (token == null) break;
                certain = sent + SURE;
                if (certain - now() < SURE / 2) renew(token); // the lease began during the wait, but it is not known when
                if (isHeld()) return token;
            } catch (Broken e) {
                broke = true;
                Thread.sleep(PAUSE);
            }
        }
        if (broke) shorts.send("LOCK.RELEASE", key, owner, "ALL"); // a request may still be on its way
        throw new IllegalStateException(key + " was not acquired");
    }

    private void release(long token) throws Exception {
        long deadline = now() + LEASE; // after that the lease has ended anyway
        for (boolean first = true; now() < deadline; first = false) {
            try {
                Long released = shorts.send("LOCK.RELEASE", key, owner, "TOKEN", "" + token);
                if (broke) shorts.send("LOCK.RELEASE", key, owner, "ALL"); // a request that was sent twice may be in the queue
                if (released == null && first) throw new IllegalStateException(key + " had been lost");
                return; // nil to a repetition: the first reply was lost
            } catch (Broken e) {
                broke = true;
                Thread.sleep(PAUSE);
            }
        }
    }

    void main(Send incr) throws Exception {
        withLock(Duration.ofSeconds(30), (token, isHeld) -> {
            System.out.println("held " + token);
            if (incr.send("INCRBY", "inside:" + key, "1") != 1) throw new IllegalStateException("two processes hold the lock");
            Thread.sleep(LEASE / 2); // the work
            if (!isHeld.getAsBoolean()) throw new IllegalStateException("lost");
            incr.send("INCRBY", "inside:" + key, "-1");
        });
        System.out.println("released");
    }
}
