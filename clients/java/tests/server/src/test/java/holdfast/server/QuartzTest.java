package holdfast.server;

import static org.assertj.core.api.Assertions.assertThat;
import static org.awaitility.Awaitility.await;

import holdfast.quartz.FleetTriggerListener;
import holdfast.testing.RedisServer;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Date;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.quartz.DisallowConcurrentExecution;
import org.quartz.Job;
import org.quartz.JobBuilder;
import org.quartz.JobExecutionContext;
import org.quartz.Scheduler;
import org.quartz.SimpleScheduleBuilder;
import org.quartz.TriggerBuilder;
import org.quartz.impl.StdSchedulerFactory;
import org.quartz.listeners.JobListenerSupport;

@Timeout(600)
class QuartzTest {
    private static final List<Long> RUNS = new CopyOnWriteArrayList<>();
    private static final List<Long> FENCES = new CopyOnWriteArrayList<>();

    /** Notes its fire time and its fence. */
    public static final class Noting implements Job {
        @Override
        public void execute(JobExecutionContext context) {
            RUNS.add(context.getScheduledFireTime().getTime());
            FENCES.add((Long) context.get(FleetTriggerListener.FENCE));
        }
    }

    /** Does nothing, on one node at a time. */
    @DisallowConcurrentExecution
    public static final class Exclusive implements Job {
        @Override
        public void execute(JobExecutionContext context) {}
    }

    @Test
    void fire_time_is_released_when_the_jobs_own_lock_fails() throws Exception {
        try (RedisServer server = RedisServer.withModule(); Clients.Opened opened = Clients.LETTUCE.warm(server.port)) {
            server.call("SET", "quartz:DEFAULT.exclusive", "something else than a lock");
            Properties properties = new Properties();
            properties.setProperty("org.quartz.scheduler.instanceName", "exclusive");
            properties.setProperty("org.quartz.threadPool.threadCount", "1");
            Scheduler scheduler = new StdSchedulerFactory(properties).getScheduler();
            CompletableFuture<Void> vetoed = new CompletableFuture<>();
            scheduler.getListenerManager().addTriggerListener(new FleetTriggerListener(opened.client()));
            scheduler.getListenerManager().addJobListener(new JobListenerSupport() {
                @Override
                public String getName() {
                    return "vetoed";
                }

                @Override
                public void jobExecutionVetoed(JobExecutionContext context) {
                    vetoed.complete(null);
                }
            });
            scheduler.scheduleJob(JobBuilder.newJob(Exclusive.class).withIdentity("exclusive").build(), TriggerBuilder.newTrigger().startNow().build());
            scheduler.start();
            vetoed.get(60, TimeUnit.SECONDS);
            await().until(() -> opened.client().holds().isEmpty() && server.call("DBSIZE").equals(1L));
            scheduler.shutdown(true);
        }
    }

    @Test
    void each_fire_time_runs_on_one_of_three_schedulers() throws Exception {
        try (RedisServer server = RedisServer.withModule(); Clients.Opened opened = Clients.LETTUCE.warm(server.port)) {
            Date begin = new Date(System.currentTimeMillis() + 500);
            List<Scheduler> fleet = new ArrayList<>();
            for (int i = 0; i < 3; i++) {
                Properties properties = new Properties();
                properties.setProperty("org.quartz.scheduler.instanceName", "node" + i);
                properties.setProperty("org.quartz.threadPool.threadCount", "2");
                Scheduler scheduler = new StdSchedulerFactory(properties).getScheduler();
                scheduler.getListenerManager().addTriggerListener(new FleetTriggerListener(opened.client(), "quartz:", Duration.ofMinutes(10)));
                scheduler.scheduleJob(JobBuilder.newJob(Noting.class).withIdentity("report").build(), TriggerBuilder.newTrigger().startAt(begin)
                    .withSchedule(SimpleScheduleBuilder.simpleSchedule().withIntervalInMilliseconds(300).withRepeatCount(4)
                        .withMisfireHandlingInstructionIgnoreMisfires()).build());
                fleet.add(scheduler);
            }
            for (Scheduler scheduler : fleet) {
                scheduler.start();
            }
            await().until(() -> RUNS.size() >= 5);
            for (Scheduler scheduler : fleet) {
                scheduler.shutdown(true);
            }
            assertThat(RUNS).hasSize(5).doesNotHaveDuplicates();
            assertThat(FENCES).hasSize(5).doesNotContainNull();
            assertThat(server.call("DBSIZE")).isEqualTo(5L);
        }
    }
}
