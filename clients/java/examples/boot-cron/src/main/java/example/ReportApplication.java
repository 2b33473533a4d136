package example;

import net.javacrumbs.shedlock.spring.annotation.EnableSchedulerLock;
import net.javacrumbs.shedlock.spring.annotation.SchedulerLock;
import org.springframework.beans.factory.annotation.Value;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.data.redis.core.StringRedisTemplate;
import org.springframework.scheduling.annotation.EnableScheduling;
import org.springframework.scheduling.annotation.Scheduled;

/**
 * A job that runs on one node of a fleet at a time. Start it twice: {@code java -jar boot-cron.jar --node=a} and {@code --node=b}. The starter makes the
 * {@code LockProvider}; {@code spring.data.redis.*} names the server.
 *
 * <p>A node that is killed during the report blocks the others for {@code lockAtMostFor}: ShedLock's locks are not renewed.
 */
@SpringBootApplication
@EnableScheduling
@EnableSchedulerLock(defaultLockAtMostFor = "30s")
public class ReportApplication {
    private final StringRedisTemplate redis;

    @Value("${node:a}")
    private String node;

    public ReportApplication(StringRedisTemplate redis) {
        this.redis = redis;
    }

    public static void main(String[] arguments) {
        SpringApplication.run(ReportApplication.class, arguments);
    }

    /** Held for at least 900 ms, so that a node whose clock is late does not run the same second again. */
    @Scheduled(cron = "* * * * * *")
    @SchedulerLock(name = "report", lockAtLeastFor = "900ms")
    public void report() {
        redis.opsForList().rightPush("report:log", node);
    }
}
