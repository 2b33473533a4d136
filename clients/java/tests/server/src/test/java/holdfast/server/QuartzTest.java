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
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.quartz.DisallowConcurrentExecution;
import org.quartz.Job;
import org.quartz.JobBuilder;
import org.quartz.JobDetail;
import org.quartz.JobExecutionContext;
import org.quartz.JobExecutionException;
import org.quartz.Scheduler;
import org.quartz.SchedulerException;
import org.quartz.SimpleScheduleBuilder;
import org.quartz.Trigger;
import org.quartz.TriggerBuilder;
import org.quartz.impl.StdSchedulerFactory;
import org.quartz.listeners.JobListenerSupport;
import org.quartz.listeners.TriggerListenerSupport;

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
    void jobs_own_lock_is_released_when_the_lock_of_the_fire_time_fails() throws Exception {
        try (RedisServer server = RedisServer.withModule(); Clients.Opened opened = Clients.LETTUCE.warm(server.port)) {
            Date begin = new Date(System.currentTimeMillis() + 500);
            server.call("SET", "quartz:DEFAULT.exclusive@DEFAULT.exclusive@" + begin.getTime(), "something else than a lock");
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
            scheduler.scheduleJob(JobBuilder.newJob(Exclusive.class).withIdentity("exclusive").build(), TriggerBuilder.newTrigger().withIdentity("exclusive").startAt(begin).build());
            scheduler.start();
            vetoed.get(60, TimeUnit.SECONDS);
            await().until(() -> opened.client().holds().isEmpty() && server.call("DBSIZE").equals(1L));
            scheduler.shutdown(true);
        }
    }

    @Test
    void execution_ends_when_the_client_was_closed_before_it() throws Exception {
        try (RedisServer server = RedisServer.withModule(); Clients.Opened opened = Clients.LETTUCE.warm(server.port)) {
            Scheduler scheduler = scheduler("closed", opened);
            opened.client().close();
            JobDetail job = JobBuilder.newJob(Exclusive.class).withIdentity("refused").storeDurably().build();
            Trigger trigger = TriggerBuilder.newTrigger().withIdentity("refused").startNow().build();
            CountDownLatch vetoed = new CountDownLatch(1);
            scheduler.getListenerManager().addJobListener(new JobListenerSupport() {
                @Override
                public String getName() {
                    return "refused";
                }

                @Override
                public void jobExecutionVetoed(JobExecutionContext context) {
                    vetoed.countDown();
                }
            });
            scheduler.scheduleJob(job, trigger);
            scheduler.start();
            assertThat(vetoed.await(30, TimeUnit.SECONDS)).isTrue();
            // The trigger fired once, and its execution has ended.
            await().until(() -> scheduler.getTrigger(trigger.getKey()) == null);
            scheduler.shutdown(true);
        }
    }

    @Test
    void job_ends_when_the_client_is_closed_during_it() throws Exception {
        try (RedisServer server = RedisServer.withModule(); Clients.Opened opened = Clients.LETTUCE.warm(server.port)) {
            Scheduler scheduler = scheduler("closing", opened);
            CountDownLatch executed = new CountDownLatch(1);
            scheduler.getListenerManager().addJobListener(new JobListenerSupport() {
                @Override
                public String getName() {
                    return "closes";
                }

                @Override
                public void jobToBeExecuted(JobExecutionContext context) {
                    opened.client().close();
                    executed.countDown();
                }
            });
            Trigger trigger = TriggerBuilder.newTrigger().withIdentity("closing").startNow().build();
            scheduler.scheduleJob(JobBuilder.newJob(Exclusive.class).withIdentity("closing").storeDurably().build(), trigger);
            scheduler.start();
            assertThat(executed.await(30, TimeUnit.SECONDS)).isTrue();
            await().until(() -> scheduler.getTrigger(trigger.getKey()) == null);
            scheduler.shutdown(true);
        }
    }

    /** Requests twice to be executed again. */
    @DisallowConcurrentExecution
    public static final class Refiring implements Job {
        static final List<Integer> COUNTS = new CopyOnWriteArrayList<>();

        @Override
        public void execute(JobExecutionContext context) throws JobExecutionException {
            COUNTS.add(context.getRefireCount());
            if (context.getRefireCount() < 2) {
                throw new JobExecutionException("again", true);
            }
        }
    }

    private static Scheduler scheduler(String name, Clients.Opened opened) throws SchedulerException {
        return scheduler(name, opened, Duration.ofMillis(1));
    }

    private static Scheduler scheduler(String name, Clients.Opened opened, Duration keep) throws SchedulerException {
        Properties properties = new Properties();
        properties.setProperty("org.quartz.scheduler.instanceName", name);
        properties.setProperty("org.quartz.threadPool.threadCount", "1");
        Scheduler scheduler = new StdSchedulerFactory(properties).getScheduler();
        scheduler.getListenerManager().addTriggerListener(new FleetTriggerListener(opened.client(), "quartz:", keep));
        return scheduler;
    }

    @Test
    void job_that_asks_to_be_executed_again_keeps_its_locks() throws Exception {
        try (RedisServer server = RedisServer.withModule(); Clients.Opened opened = Clients.LETTUCE.warm(server.port)) {
            Scheduler scheduler = scheduler("refiring", opened);
            scheduler.scheduleJob(JobBuilder.newJob(Refiring.class).build(), TriggerBuilder.newTrigger().startNow().build());
            scheduler.start();
            await().until(() -> Refiring.COUNTS.size() == 3 && opened.client().holds().isEmpty() && server.call("DBSIZE").equals(0L));
            assertThat(Refiring.COUNTS).containsExactly(0, 1, 2);
            scheduler.shutdown(true);
        }
    }

    @Test
    void locks_are_released_when_another_listener_vetoes() throws Exception {
        try (RedisServer server = RedisServer.withModule(); Clients.Opened opened = Clients.LETTUCE.warm(server.port)) {
            Scheduler scheduler = scheduler("vetoed", opened);
            CompletableFuture<Integer> held = new CompletableFuture<>();
            scheduler.getListenerManager().addTriggerListener(new TriggerListenerSupport() {
                @Override
                public String getName() {
                    return "vetoes";
                }

                @Override
                public boolean vetoJobExecution(Trigger trigger, JobExecutionContext context) {
                    held.complete(opened.client().holds().size());
                    return true;
                }
            });
            scheduler.scheduleJob(JobBuilder.newJob(Exclusive.class).build(), TriggerBuilder.newTrigger().startNow().build());
            scheduler.start();
            assertThat(held.get(60, TimeUnit.SECONDS)).isEqualTo(2);
            await().until(() -> opened.client().holds().isEmpty() && server.call("DBSIZE").equals(0L));
            scheduler.shutdown(true);
        }
    }

    @Test
    void locks_are_released_at_the_threads_next_execution_when_a_job_listener_throws() throws Exception {
        try (RedisServer server = RedisServer.withModule(); Clients.Opened opened = Clients.LETTUCE.warm(server.port)) {
            Scheduler scheduler = scheduler("throwing", opened);
            List<String> ended = new CopyOnWriteArrayList<>();
            scheduler.getListenerManager().addJobListener(new JobListenerSupport() {
                @Override
                public String getName() {
                    return "throws";
                }

                @Override
                public void jobWasExecuted(JobExecutionContext context, JobExecutionException failure) {
                    ended.add(context.getJobDetail().getKey().getName());
                    if (ended.size() == 1) {
                        throw new IllegalStateException("a fault");
                    }
                }
            });
            scheduler.start();
            for (String name : List.of("first", "second")) {
                scheduler.scheduleJob(JobBuilder.newJob(Exclusive.class).withIdentity(name).build(), TriggerBuilder.newTrigger().startNow().build());
                await().until(() -> ended.contains(name));
            }
            await().until(() -> opened.client().holds().isEmpty() && server.call("DBSIZE").equals(0L));
            scheduler.shutdown(true);
        }
    }

    /** Counts its runs. */
    public static final class Counting implements Job {
        static final AtomicInteger RUNS = new AtomicInteger();

        @Override
        public void execute(JobExecutionContext context) {
            RUNS.incrementAndGet();
        }
    }

    @Test
    void job_runs_once_for_each_of_its_triggers_and_manual_triggers() throws Exception {
        try (RedisServer server = RedisServer.withModule(); Clients.Opened opened = Clients.LETTUCE.warm(server.port)) {
            Scheduler scheduler = scheduler("triggers", opened, Duration.ofMinutes(10));
            JobDetail job = JobBuilder.newJob(Counting.class).withIdentity("counting").storeDurably().build();
            scheduler.addJob(job, false);
            Date now = new Date();
            for (String tenant : List.of("one", "two")) {
                scheduler.scheduleJob(TriggerBuilder.newTrigger().forJob(job).withIdentity(tenant).startAt(now).build());
            }
            for (int i = 0; i < 20; i++) {
                scheduler.triggerJob(job.getKey());
            }
            scheduler.start();
            await().until(() -> Counting.RUNS.get() == 22);
            scheduler.shutdown(true);
        }
    }

    /** Its first run ends after three executions were vetoed. */
    @DisallowConcurrentExecution
    public static final class Lasting implements Job {
        static final CountDownLatch VETOES = new CountDownLatch(3);
        static final List<Long> RUNS = new CopyOnWriteArrayList<>();

        @Override
        public void execute(JobExecutionContext context) {
            RUNS.add(context.getScheduledFireTime().getTime());
            try {
                VETOES.await(60, TimeUnit.SECONDS);
            } catch (InterruptedException why) {
                throw new IllegalStateException(why);
            }
        }
    }

    @Test
    void fire_times_during_an_exclusive_run_follow_it() throws Exception {
        try (RedisServer server = RedisServer.withModule(); Clients.Opened opened = Clients.LETTUCE.warm(server.port)) {
            Date begin = new Date(System.currentTimeMillis() + 500);
            List<Scheduler> fleet = List.of(scheduler("lasting-one", opened, Duration.ofMinutes(10)), scheduler("lasting-two", opened, Duration.ofMinutes(10)));
            for (Scheduler scheduler : fleet) {
                scheduler.getListenerManager().addJobListener(new JobListenerSupport() {
                    @Override
                    public String getName() {
                        return "vetoes";
                    }

                    @Override
                    public void jobExecutionVetoed(JobExecutionContext context) {
                        Lasting.VETOES.countDown();
                    }
                });
                scheduler.scheduleJob(JobBuilder.newJob(Lasting.class).withIdentity("lasting").build(), TriggerBuilder.newTrigger().withIdentity("lasting").startAt(begin)
                    .withSchedule(SimpleScheduleBuilder.simpleSchedule().withIntervalInMilliseconds(100).withRepeatCount(2)
                        .withMisfireHandlingInstructionIgnoreMisfires()).build());
                scheduler.start();
            }
            await().until(() -> Lasting.RUNS.size() == 3);
            for (Scheduler scheduler : fleet) {
                scheduler.shutdown(true);
            }
            assertThat(Lasting.RUNS).doesNotHaveDuplicates();
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
                scheduler.scheduleJob(JobBuilder.newJob(Noting.class).withIdentity("report").build(), TriggerBuilder.newTrigger().withIdentity("report").startAt(begin)
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
