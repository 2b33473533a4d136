import holdfast.Hold;
import holdfast.Holdfast;
import io.lettuce.core.RedisClient;
import io.lettuce.core.ScriptOutputType;
import io.lettuce.core.api.sync.RedisCommands;
import java.util.Optional;
import java.util.concurrent.CountDownLatch;

/**
 * Leader election with a fenced write: of all processes that run {@code LeaderElection NAME}, one leads and writes. The storage refuses a late write of a former
 * leader.
 *
 * <p>A leader that exits hands over at once; one that is killed is replaced a lease (5 s) later. One that was paused may continue and write before it notices
 * that it no longer leads: the fence of its term is lower than the new leader's, so the storage refuses the write.
 */
public class LeaderElection {
    /** The storage keeps the highest fence that it has seen, and refuses a lower one. Here it is a hash; {@link FencedWrite} does it in SQL. */
    private static final String WRITE = """
        if tonumber(ARGV[1]) < tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) then return 0 end
        redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'by', ARGV[2])
        return 1
        """;

    public static void main(String[] arguments) throws InterruptedException {
        String name = arguments[0];
        RedisClient redis = RedisClient.create(Optional.ofNullable(System.getenv("REDIS_URL")).orElse("redis://127.0.0.1:6379"));
        RedisCommands<String, String> data = redis.connect().sync();
        // A normal exit, INT and TERM included, hands over.
        Holdfast client = Holdfast.create(redis);
        client.elect("scheduler", name, term -> lead(term, data, name), reason -> System.out.println(name + ": " + reason));
        new CountDownLatch(1).await();
    }

    /** Runs on a thread for callbacks for as long as this process leads. */
    private static void lead(Hold term, RedisCommands<String, String> data, String name) {
        System.out.println(name + " leads, term " + term.fence());
        while (term.isHeld()) {
            Long written = data.eval(WRITE, ScriptOutputType.INTEGER, new String[] {"schedule"}, String.valueOf(term.fence()), name);
            if (written == 0) {
                System.out.println(name + ": refused, the term is over");
                return;
            }
            try {
                Thread.sleep(200);
            } catch (InterruptedException stopped) {
                return;
            }
        }
    }
}
