package example;

import holdfast.Holdfast;
import net.javacrumbs.shedlock.spring.annotation.EnableSchedulerLock;
import net.javacrumbs.shedlock.spring.annotation.SchedulerLock;
import org.springframework.beans.factory.annotation.Value;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.scheduling.annotation.EnableScheduling;
import org.springframework.scheduling.annotation.Scheduled;

/**
 * A job that runs on one node of a fleet. Start it twice: {@code java -jar boot-cron.jar --node=a} and {@code --node=b}. The starter makes the
 * {@code LockProvider}; {@code spring.data.redis.*} says where the server is.
 */
@SpringBootApplication
@EnableScheduling
@EnableSchedulerLock(defaultLockAtMostFor = "5m")
public class ReportApplication {
    private final Holdfast client;

    @Value("${node:a}")
    private String node;

    public ReportApplication(Holdfast client) {
        this.client = client;
    }

    public static void main(String[] arguments) {
        SpringApplication.run(ReportApplication.class, arguments);
    }

    /** Held for at least 900 ms, so that a node whose clock is late does not run the same second again. */
    @Scheduled(cron = "* * * * * *")
    @SchedulerLock(name = "report", lockAtLeastFor = "900ms")
    public void report() {
        System.out.println("report by " + node + ", holds " + client.holds());
    }
}
