import holdfast.Election;
import holdfast.Holdfast;
import io.lettuce.core.RedisClient;
import java.util.concurrent.CountDownLatch;

/** One of several processes leads. Start it in two terminals and stop the leader: the other one takes over at once; after kill -9, within 5 s. */
public class Leader {
    public static void main(String[] arguments) throws InterruptedException {
        String me = arguments.length > 0 ? arguments[0] : "process " + ProcessHandle.current().pid();
        RedisClient redis = RedisClient.create("redis://127.0.0.1:6379");
        Holdfast client = Holdfast.create(redis);
        Election election = client.elect("shop:leader", me,
            term -> System.out.println(me + " leads, term " + term.fence()),
            reason -> System.out.println(me + " leads no more: " + reason));
        System.out.println("the leader is " + client.leader("shop:leader"));
        new CountDownLatch(1).await();
        election.close();
    }
}
