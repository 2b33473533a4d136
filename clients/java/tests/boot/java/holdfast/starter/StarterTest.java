package holdfast.starter;

import static org.assertj.core.api.Assertions.assertThat;
import static org.awaitility.Awaitility.await;

import holdfast.Hold;
import holdfast.Holdfast;
import holdfast.boot.HoldfastEndpoint;
import holdfast.testing.RedisServer;
import io.micrometer.core.instrument.MeterRegistry;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.TimeUnit;
import net.javacrumbs.shedlock.core.LockProvider;
import net.javacrumbs.shedlock.spring.annotation.EnableSchedulerLock;
import net.javacrumbs.shedlock.spring.annotation.SchedulerLock;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;
import org.springframework.beans.factory.annotation.Value;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.WebApplicationType;
import org.springframework.boot.autoconfigure.EnableAutoConfiguration;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.boot.builder.SpringApplicationBuilder;
import org.springframework.context.ConfigurableApplicationContext;
import org.springframework.context.SmartLifecycle;
import org.springframework.context.annotation.Configuration;
import org.springframework.integration.support.locks.LockRegistry;
import org.springframework.scheduling.annotation.EnableScheduling;
import org.springframework.scheduling.annotation.Scheduled;
import org.springframework.scheduling.concurrent.ThreadPoolTaskScheduler;

/** The starter in a Spring Boot application that sets only {@code spring.data.redis.*}. */
@Timeout(600)
class StarterTest {
    private static RedisServer server;

    @BeforeAll
    static void start() throws Exception {
        server = RedisServer.withModule();
    }

    @AfterAll
    static void stop() throws Exception {
        if (server != null) {
            server.close();
        }
    }

    /** An application with a job that is scheduled on every node and runs once in the fleet. */
    @SpringBootApplication
    @EnableScheduling
    @EnableSchedulerLock(defaultLockAtMostFor = "30m")
    static class Application {
        static final List<String> RUNS = new CopyOnWriteArrayList<>();

        @Value("${node:none}")
        private String node;

        @Scheduled(fixedRate = 100)
        @SchedulerLock(name = "job", lockAtLeastFor = "10m")
        public void job() {
            RUNS.add(node);
        }
    }

    private static ConfigurableApplicationContext run(String client, String node) {
        return new SpringApplicationBuilder(Application.class).web(WebApplicationType.NONE).properties(Map.of(
            "spring.data.redis.host", "127.0.0.1", "spring.data.redis.port", String.valueOf(server.port), "spring.data.redis.client-type", client, "node", node,
            "logging.level.root", "WARN", "spring.main.banner-mode", "off")).run();
    }

    @ParameterizedTest
    @ValueSource(strings = {"lettuce", "jedis"})
    void starter_provides_beans_that_work(String driver) throws Exception {
        try (ConfigurableApplicationContext context = run(driver, "one")) {
            Holdfast client = context.getBean(Holdfast.class);
            try (Hold hold = client.lock("boot").acquire(Duration.ofSeconds(200))) {
                assertThat(context.getBean(HoldfastEndpoint.class).holds().holds()).anySatisfy(it -> {
                    assertThat(it.names()).containsExactly("boot");
                    assertThat(it.fence()).isEqualTo(hold.fence());
                });
            }
            assertThat(context.getBean(LockProvider.class).getClass().getSimpleName()).isEqualTo("HoldfastLockProvider");
            LockRegistry registry = context.getBean(LockRegistry.class);
            assertThat(registry.obtain("r").tryLock(60, TimeUnit.SECONDS)).isTrue();
            assertThat(server.exists("lock:r")).isTrue();
            registry.obtain("r").unlock();
            MeterRegistry metrics = context.getBean(MeterRegistry.class);
            await().untilAsserted(() -> assertThat(metrics.get("holdfast.acquire").tag("outcome", "acquired").timer().count()).isPositive());
            await().untilAsserted(() -> assertThat(metrics.get("holdfast.hold").timer().count()).isPositive());
            Object indicator = context.getBean("holdfastHealthIndicator");
            Object health = indicator.getClass().getMethod("health").invoke(indicator);
            assertThat(health.toString()).startsWith("UP").contains("holds");
        }
        await("the connections are closed").until(() -> server.ask("CLIENT", "LIST").lines().count() == 1);
    }

    /** Like a scheduler: when the application ends, it waits for a task that holds a lock. */
    private static final class Scheduler implements SmartLifecycle {
        private final Hold hold;
        private boolean heldToTheEnd;
        private boolean running = true;

        Scheduler(Hold hold) {
            this.hold = hold;
        }

        @Override
        public void start() {}

        @Override
        public void stop() {
            heldToTheEnd = hold.check();
            running = false;
        }

        @Override
        public boolean isRunning() {
            return running;
        }

        @Override
        public int getPhase() {
            return ThreadPoolTaskScheduler.DEFAULT_PHASE;
        }
    }

    @ParameterizedTest
    @ValueSource(strings = {"lettuce", "jedis"})
    void context_releases_its_locks_after_the_schedulers_have_stopped_when_closed(String driver) throws Exception {
        Scheduler scheduler;
        try (ConfigurableApplicationContext context = run(driver, "one")) {
            scheduler = new Scheduler(context.getBean(Holdfast.class).lock("closing").acquire(Duration.ofSeconds(200)));
            context.getBeanFactory().registerSingleton("closing", scheduler);
        }
        assertThat(scheduler.heldToTheEnd).isTrue();
        assertThat(server.exists("closing")).isFalse();
    }

    @Test
    void scheduled_job_runs_once_in_a_fleet_of_two() throws Exception {
        server.call("FLUSHALL");
        Application.RUNS.clear();
        try (ConfigurableApplicationContext one = run("lettuce", "one"); ConfigurableApplicationContext two = run("jedis", "two")) {
            await().until(() -> !Application.RUNS.isEmpty());
            // Both request the lock every 100 ms, and it is held for ten minutes.
            long asked = asked();
            await().until(() -> asked() > asked + 10);
            assertThat(Application.RUNS).hasSize(1);
            assertThat(server.exists("job-lock:job")).isTrue();
        }
    }

    /** Returns how many times LOCK.ACQUIRE was called, by the server's count. */
    private static long asked() throws Exception {
        String stats = new String((byte[]) server.call("INFO", "commandstats"));
        return Long.parseLong(stats.replaceAll("(?s).*cmdstat_lock\\.acquire:calls=(\\d+).*", "$1"));
    }

    @Test
    void application_without_redis_starts() {
        try (ConfigurableApplicationContext context = new SpringApplicationBuilder(Bare.class).web(WebApplicationType.NONE).properties(Map.of("spring.autoconfigure.exclude",
            "org.springframework.boot.autoconfigure.data.redis.RedisAutoConfiguration,org.springframework.boot.data.redis.autoconfigure.DataRedisAutoConfiguration".split(",")[
                SpringApplication.class.getPackage().getImplementationVersion().startsWith("3") ? 0 : 1], "logging.level.root", "WARN")).run()) {
            assertThat(context.getBeanProvider(Holdfast.class).getIfAvailable()).isNull();
        }
    }

    /** An application that uses no Redis. */
    @Configuration(proxyBeanMethods = false)
    @EnableAutoConfiguration
    static class Bare {}
}
