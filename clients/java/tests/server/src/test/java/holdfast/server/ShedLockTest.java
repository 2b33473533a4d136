package holdfast.server;

import static java.time.temporal.ChronoUnit.MILLIS;
import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;
import static org.awaitility.Awaitility.await;

import holdfast.shedlock.HoldfastLockProvider;
import holdfast.testing.RedisServer;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import net.javacrumbs.shedlock.core.LockConfiguration;
import net.javacrumbs.shedlock.core.LockProvider;
import net.javacrumbs.shedlock.core.SimpleLock;
import net.javacrumbs.shedlock.support.LockException;
import net.javacrumbs.shedlock.support.Utils;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestInfo;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** The requirements in the documentation of ShedLock's {@code LockProvider}. */
@Timeout(600)
class ShedLockTest {
    private static final Duration LONG = Duration.ofSeconds(30);
    private static RedisServer server;
    private static Clients.Opened opened;
    private static Clients.Opened other;
    private HoldfastLockProvider provider;
    private HoldfastLockProvider elsewhere;
    private String name;

    @BeforeAll
    static void start() throws Exception {
        server = RedisServer.withModule();
        opened = Clients.LETTUCE.warm(server.port);
        other = Clients.JEDIS.warm(server.port);
    }

    @AfterAll
    static void stop() throws Exception {
        if (server != null) {
            opened.close();
            other.close();
            server.close();
        }
    }

    @BeforeEach
    void name(TestInfo test) {
        name = test.getTestMethod().orElseThrow().getName();
        provider = new HoldfastLockProvider(opened.client());
        elsewhere = new HoldfastLockProvider(other.client());
    }

    private LockConfiguration configuration(Duration atMost, Duration atLeast) {
        return new LockConfiguration(Instant.now(), name, atMost, atLeast);
    }

    private boolean isLocked() throws Exception {
        return server.exists("job-lock:" + name);
    }

    private Optional<SimpleLock> lock(Duration atMost) {
        return provider.lock(configuration(atMost, Duration.ZERO));
    }

    @Test
    void lock_is_held_once_until_it_is_unlocked() throws Exception {
        SimpleLock first = lock(LONG).orElseThrow();
        assertThat(isLocked()).isTrue();
        assertThat(lock(LONG)).isEmpty();
        assertThat(elsewhere.lock(configuration(LONG, Duration.ZERO))).isEmpty();
        first.unlock();
        assertThat(isLocked()).isFalse();
        for (int i = 0; i < 10; i++) {
            lock(LONG).orElseThrow().unlock();
        }
    }

    @Test
    void owner_begins_with_the_name_of_the_host() {
        SimpleLock lock = lock(LONG).orElseThrow();
        assertThat(opened.client().info("job-lock:" + name).orElseThrow().holders().get(0).owner()).startsWith(Utils.getHostname() + "#");
        lock.unlock();
    }

    @Test
    void second_unlock_is_an_error() {
        SimpleLock lock = lock(LONG).orElseThrow();
        lock.unlock();
        assertThatThrownBy(lock::unlock).isInstanceOf(IllegalStateException.class);
    }

    @Test
    void lock_is_released_when_its_at_most_time_ends() {
        lock(Duration.ofMillis(50)).orElseThrow();
        await().until(() -> !isLocked());
        lock(LONG).orElseThrow().unlock();
    }

    @Test
    void unlock_keeps_the_lock_for_the_at_least_time() throws Exception {
        provider.lock(configuration(LONG, Duration.ofSeconds(20))).orElseThrow().unlock();
        assertThat(elsewhere.lock(configuration(LONG, Duration.ZERO))).isEmpty();
        assertThat((Long) server.call("PTTL", "job-lock:" + name)).isBetween(1L, 20_000L);
    }

    @Test
    void lock_is_released_when_its_at_least_time_ends_after_unlock() throws Exception {
        long began = System.nanoTime();
        provider.lock(configuration(LONG, Duration.ofMillis(500))).orElseThrow().unlock();
        await().until(() -> !isLocked());
        assertThat(System.nanoTime() - began).isGreaterThan(490_000_000L);
    }

    @Test
    void unlock_releases_at_once_when_the_at_least_time_is_over() throws Exception {
        SimpleLock lock = provider.lock(configuration(LONG, Duration.ofMillis(100))).orElseThrow();
        await().pollDelay(150, TimeUnit.MILLISECONDS).until(() -> true);
        lock.unlock();
        assertThat(isLocked()).isFalse();
    }

    @Test
    void lock_has_a_lease_of_a_millisecond_when_its_deadlines_are_past() {
        LockConfiguration past = new LockConfiguration(Instant.now().minus(60, MILLIS), name, Duration.ofMillis(50), Duration.ofMillis(20));
        Optional<SimpleLock> lock = provider.lock(past);
        assertThat(lock).isPresent();
        lock.get().unlock();
        await().until(() -> !isLocked());
    }

    @Test
    void extension_replaces_the_time() throws Exception {
        SimpleLock lock = lock(Duration.ofSeconds(20)).orElseThrow();
        SimpleLock extended = lock.extend(Duration.ofSeconds(60), Duration.ZERO).orElseThrow();
        SimpleLock again = extended.extend(Duration.ofSeconds(60), Duration.ZERO).orElseThrow();
        assertThat((Long) server.call("PTTL", "job-lock:" + name)).isBetween(20_001L, 60_000L);
        again.unlock();
        assertThat(isLocked()).isFalse();
    }

    @Test
    void extension_replaces_the_at_least_time() throws Exception {
        lock(LONG).orElseThrow().extend(LONG, Duration.ofSeconds(20)).orElseThrow().unlock();
        assertThat((Long) server.call("PTTL", "job-lock:" + name)).isBetween(1L, 20_000L);
    }

    @Test
    void lock_can_be_extended_or_unlocked_only_once() {
        SimpleLock lock = lock(LONG).orElseThrow();
        SimpleLock extended = lock.extend(LONG, Duration.ZERO).orElseThrow();
        assertThatThrownBy(() -> lock.extend(LONG, Duration.ZERO)).isInstanceOf(IllegalStateException.class);
        assertThatThrownBy(lock::unlock).isInstanceOf(IllegalStateException.class);
        extended.unlock();
        assertThatThrownBy(() -> extended.extend(LONG, Duration.ZERO)).isInstanceOf(IllegalStateException.class);
    }

    @Test
    void extension_is_refused_when_the_lock_has_expired() {
        for (int i = 0; i < 20; i++) {
            SimpleLock lock = lock(Duration.ofMillis(2)).orElseThrow();
            await().pollDelay(10, TimeUnit.MILLISECONDS).until(() -> true);
            assertThat(lock.extend(LONG, Duration.ZERO)).isEmpty();
        }
    }

    @Test
    void unlock_after_expiry_leaves_the_next_holder_alone() throws Exception {
        SimpleLock first = lock(Duration.ofMillis(20)).orElseThrow();
        await().until(() -> !isLocked());
        SimpleLock next = elsewhere.lock(configuration(LONG, Duration.ZERO)).orElseThrow();
        first.unlock();
        assertThat(isLocked()).isTrue();
        SimpleLock late = new HoldfastLockProvider(opened.client()).lock(new LockConfiguration(Instant.now(), name + "-late", Duration.ofMillis(5), Duration.ofMillis(5))).orElseThrow();
        await().pollDelay(20, TimeUnit.MILLISECONDS).until(() -> true);
        late.unlock();
        next.unlock();
        assertThat(isLocked()).isFalse();
    }

    @ParameterizedTest
    @ValueSource(ints = {0, 20})
    void unlock_and_extension_find_no_lock_after_the_client_was_closed(int atLeast) throws Exception {
        List<SimpleLock> locks = new ArrayList<>();
        try (Clients.Opened closing = Clients.JEDIS.open(server.port)) {
            for (String suffix : List.of("-unlocked", "-extended")) {
                LockConfiguration job = new LockConfiguration(Instant.now(), name + suffix, LONG, Duration.ofSeconds(atLeast));
                locks.add(new HoldfastLockProvider(closing.client()).lock(job).orElseThrow());
            }
        }
        locks.get(0).unlock();
        assertThat(locks.get(1).extend(LONG, Duration.ZERO)).isEmpty();
    }

    @Test
    void job_that_the_server_would_not_take_is_a_lock_exception() {
        LockConfiguration named = new LockConfiguration(Instant.now(), "x".repeat(1024), LONG, Duration.ZERO);
        assertThatThrownBy(() -> provider.lock(named)).isInstanceOf(LockException.class).hasRootCauseInstanceOf(IllegalArgumentException.class);
        Duration century = Duration.ofDays(36_500);
        assertThatThrownBy(() -> lock(century)).isInstanceOf(LockException.class).hasMessageContaining(name);
        SimpleLock lock = lock(LONG).orElseThrow();
        assertThatThrownBy(() -> lock.extend(century, Duration.ZERO)).isInstanceOf(LockException.class);
        opened.client().force("job-lock:" + name);
    }

    @Test
    void concurrent_locks_are_exclusive() throws Exception {
        int[] counter = {0};
        CompletableFuture<?>[] done = new CompletableFuture<?>[8];
        for (int i = 0; i < done.length; i++) {
            HoldfastLockProvider mine = i % 2 == 0 ? provider : elsewhere;
            done[i] = CompletableFuture.runAsync(() -> {
                for (int taken = 0; taken < 30; ) {
                    Optional<SimpleLock> lock = mine.lock(configuration(LONG, Duration.ZERO));
                    if (lock.isPresent()) {
                        taken++;
                        counter[0]++;
                        lock.get().unlock();
                    }
                }
            }, task -> new Thread(task).start());
        }
        CompletableFuture.allOf(done).get(100, TimeUnit.SECONDS);
        assertThat(counter[0]).isEqualTo(240);
    }

    /** The provider of docs/coming-from/shedlock.md for the time of a migration. */
    record Both(LockProvider old, LockProvider next) implements LockProvider {
        @Override
        public Optional<SimpleLock> lock(LockConfiguration job) {
            return old.lock(job).flatMap(outer -> {
                Optional<SimpleLock> inner = next.lock(job);
                if (inner.isEmpty()) {
                    outer.unlock();
                }
                return inner.map(both -> () -> {
                    both.unlock();
                    outer.unlock();
                });
            });
        }
    }

    @Test
    void provider_of_both_locks_excludes_providers_of_either() {
        LockConfiguration job = configuration(LONG, Duration.ZERO);
        LockProvider next = new HoldfastLockProvider(other.client(), "moved:");
        LockProvider both = new Both(provider, next);
        SimpleLock held = both.lock(job).orElseThrow();
        assertThat(provider.lock(job)).isEmpty();
        assertThat(next.lock(job)).isEmpty();
        held.unlock();
        for (LockProvider either : List.of(provider, next)) {
            SimpleLock alone = either.lock(job).orElseThrow();
            assertThat(both.lock(job)).isEmpty();
            alone.unlock();
            both.lock(job).orElseThrow().unlock();
        }
    }
}
