import java.security.SecureRandom;
import java.time.Duration;
import java.util.HexFormat;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;

/** What both Java recipes share: a lock with raw LOCK.* commands over a function that sends one command. */
final class Recipe {
    static final long LEASE = 10_000; // ms; a killed process blocks others for at most this long
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
        void run(long token, AtomicBoolean lost) throws Exception;
    }

    private final Send waits;
    private final Send shorts;
    private final String key;
    private final String owner;
    private boolean broke;

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
        var lost = new AtomicBoolean();
        var timer = Executors.newSingleThreadScheduledExecutor();
        long[] certain = {now() + LEASE};
        timer.scheduleAtFixedRate(() -> {
            long sent = now();
            try {
                if (shorts.send("LOCK.RENEW", key, owner, "TOKEN", "" + token, "LEASE", "" + LEASE) == null) lost.set(true);
                else certain[0] = sent + LEASE;
            } catch (Exception e) { /* asked again while the lease is certain */ }
            if (now() >= certain[0]) lost.set(true);
        }, LEASE / 4, LEASE / 4, TimeUnit.MILLISECONDS);
        try {
            work.run(token, lost);
        } finally {
            timer.shutdown();
            timer.awaitTermination(LEASE, TimeUnit.MILLISECONDS);
            release(token);
        }
    }

    private long acquire(long wait) throws Exception {
        long began = now();
        for (long waited = 0; waited < wait; waited = now() - began) { // WAITED keeps the place in the queue
            try {
                Long token = waits.send("LOCK.ACQUIRE", key, owner, "HOLDS", "1", "LEASE", "" + LEASE,
                        "WAIT", "" + (wait - waited), "WAITED", "" + waited);
                if (token != null) return token;
                break;
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
        withLock(Duration.ofSeconds(30), (token, lost) -> {
            System.out.println("held " + token);
            if (incr.send("INCRBY", "inside:" + key, "1") != 1) throw new IllegalStateException("two processes hold the lock");
            Thread.sleep(LEASE / 2); // the work
            if (lost.get()) throw new IllegalStateException("lost");
            incr.send("INCRBY", "inside:" + key, "-1");
        });
        System.out.println("released");
    }
}
