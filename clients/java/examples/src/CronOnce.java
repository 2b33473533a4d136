import holdfast.Hold;
import holdfast.Holdfast;
import holdfast.LockSpec;
import io.lettuce.core.RedisClient;
import io.lettuce.core.api.StatefulRedisConnection;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Optional;

/**
 * A cron job that runs once in a fleet: cron starts {@code CronOnce PERIOD COMMAND [ARGUMENT...]} on every host at the same time, and one host does the work.
 *
 * <p>PERIOD names the run, such as the day. A host whose clock is late finds that the work was done. If the working host is killed, its lock expires a lease
 * later, and the next start does the work: at least once, and never twice at the same time.
 */
public class CronOnce {
    public static void main(String[] arguments) throws Exception {
        RedisClient redis = RedisClient.create(Optional.ofNullable(System.getenv("REDIS_URL")).orElse("redis://127.0.0.1:6379"));
        int code;
        try (Holdfast client = Holdfast.create(redis); StatefulRedisConnection<String, String> data = redis.connect()) {
            code = once(client, data, arguments[0], Arrays.asList(arguments).subList(1, arguments.length));
        } finally {
            redis.shutdown();
        }
        System.exit(code);
    }

    /** Returns the exit code of the command, or 0 if another host runs or has run it. */
    static int once(Holdfast client, StatefulRedisConnection<String, String> data, String period, List<String> command) throws Exception {
        Optional<Hold> acquired = client.lock(LockSpec.builder("cron:report").lease(Duration.ofSeconds(5)).build()).tryAcquire();
        if (acquired.isEmpty()) {
            System.out.println("another host is at it");
            return 0;
        }
        // The end of the block throws if the lock was lost.
        try (Hold hold = acquired.get()) {
            if (period.equals(data.sync().get("cron:report:done"))) {
                System.out.println(period + " is done");
                return 0;
            }
            Process work = new ProcessBuilder(command).inheritIO().start();
            // The loss of the lock ends the work: another host may have begun it.
            hold.onLost(reason -> work.destroy());
            int code = work.waitFor();
            if (code == 0) {
                data.sync().set("cron:report:done", period);
            }
            return code;
        }
    }
}
