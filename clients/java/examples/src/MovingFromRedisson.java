import holdfast.Holdfast;
import io.lettuce.core.RedisClient;
import java.util.Optional;
import java.util.concurrent.locks.Lock;
import org.redisson.Redisson;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * Moving from Redisson one bean at a time: {@code MovingFromRedisson}. Of two beans that use a lock of one name, one has moved. The locks exclude each other, in
 * one process as here, or in two. A process that is killed blocks others for its lease: by default 30 s in Redisson, and 10 s here.
 */
public class MovingFromRedisson {
    private static int booked;

    public static void main(String[] arguments) throws InterruptedException {
        String url = Optional.ofNullable(System.getenv("REDIS_URL")).orElse("redis://127.0.0.1:6379");
        Config config = new Config();
        config.useSingleServer().setAddress(url);
        RedissonClient redisson = Redisson.create(config);
        RedisClient redis = RedisClient.create(url);
        try (Holdfast holdfast = Holdfast.create(redis)) {
            Lock billing = redisson.getLock("invoice");
            Lock reminders = holdfast.fencedLock("invoice"); // was: redisson.getLock("invoice")
            show("Redisson", billing, reminders);
            show("Holdfast", reminders, billing);
            Thread[] beans = {new Thread(() -> book(billing)), new Thread(() -> book(reminders))};
            for (Thread bean : beans) {
                bean.start();
            }
            for (Thread bean : beans) {
                bean.join();
            }
            System.out.println("booked " + booked + " of 200");
        } finally {
            redis.shutdown();
            redisson.shutdown();
        }
    }

    static void show(String holder, Lock held, Lock other) {
        held.lock();
        try {
            System.out.println(holder + " holds the lock, the other bean " + (other.tryLock() ? "holds it too" : "does not"));
        } finally {
            held.unlock();
        }
    }

    static void book(Lock lock) {
        for (int i = 0; i < 100; i++) {
            lock.lock();
            try {
                booked++;
            } finally {
                lock.unlock();
            }
        }
    }
}
