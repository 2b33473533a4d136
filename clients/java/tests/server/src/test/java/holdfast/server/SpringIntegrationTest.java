package holdfast.server;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;
import static org.awaitility.Awaitility.await;

import holdfast.DeadlockException;
import holdfast.integration.HoldfastLockRegistry;
import holdfast.testing.RedisServer;
import java.time.Duration;
import java.util.ConcurrentModificationException;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.springframework.integration.leader.Context;
import org.springframework.integration.leader.DefaultCandidate;
import org.springframework.integration.support.leader.LockRegistryLeaderInitiator;
import org.springframework.integration.support.locks.DistributedLock;

@Timeout(600)
class SpringIntegrationTest {
    private static RedisServer server;
    private static Clients.Opened one;
    private static Clients.Opened two;
    private static HoldfastLockRegistry registry;
    private static HoldfastLockRegistry elsewhere;

    @BeforeAll
    static void start() throws Exception {
        server = RedisServer.withModule();
        one = Clients.LETTUCE.warm(server.port);
        two = Clients.JEDIS.warm(server.port);
        registry = new HoldfastLockRegistry(one.client(), "reg:");
        elsewhere = new HoldfastLockRegistry(two.client(), "reg:");
    }

    @AfterAll
    static void stop() throws Exception {
        if (server != null) {
            one.close();
            two.close();
            server.close();
        }
    }

    @Test
    void lock_is_exclusive_and_re_entrant() throws Exception {
        DistributedLock lock = registry.obtain("a");
        lock.lock();
        assertThat(registry.obtain("a").tryLock()).isTrue();
        assertThat(elsewhere.obtain("a").tryLock(50, TimeUnit.MILLISECONDS)).isFalse();
        lock.unlock();
        lock.unlock();
        assertThat(elsewhere.obtain("a").tryLock()).isTrue();
        elsewhere.obtain("a").unlock();
        assertThatThrownBy(lock::unlock).isInstanceOf(IllegalMonitorStateException.class);
        assertThat(registry.executeLocked("a", () -> elsewhere.obtain("a").tryLock())).isFalse();
        assertThatThrownBy(() -> registry.obtain(7)).isInstanceOf(IllegalArgumentException.class);
    }

    @Test
    void key_has_one_lock_object_until_unused_objects_expire() {
        DistributedLock lock = registry.obtain("o");
        DistributedLock unused = registry.obtain("p");
        registry.expireUnusedOlderThan(60_000);
        assertThat(registry.obtain("o")).isSameAs(lock).isNotEqualTo(registry.obtain("p")).isNotEqualTo(elsewhere.obtain("o"));
        assertThat(registry.obtain("p")).isSameAs(unused);
        lock.lock();
        registry.expireUnusedOlderThan(0);
        assertThat(registry.obtain("p")).isNotSameAs(unused);
        assertThat(registry.obtain("o")).isSameAs(lock);
        lock.unlock();
        assertThat(elsewhere.obtain("o").tryLock()).isTrue();
        elsewhere.obtain("o").unlock();
    }

    @Test
    void registries_of_one_client_exclude_each_other_in_one_thread() throws Exception {
        HoldfastLockRegistry other = new HoldfastLockRegistry(one.client(), "reg:");
        registry.obtain("s").lock();
        assertThat(other.obtain("s").tryLock()).isFalse();
        assertThat(other.obtain("s").tryLock(50, TimeUnit.MILLISECONDS)).isFalse();
        assertThatThrownBy(other.obtain("s")::lock).isInstanceOf(DeadlockException.class);
        assertThatThrownBy(() -> other.renewLock("s")).isInstanceOf(IllegalStateException.class);
        assertThatThrownBy(other.obtain("s")::unlock).isInstanceOf(IllegalMonitorStateException.class);
        registry.renewLock("s");
        registry.obtain("s").unlock();
        assertThat(other.obtain("s").tryLock()).isTrue();
        other.obtain("s").unlock();
    }

    @Test
    void first_try_succeeds_when_the_time_to_live_has_ended() throws Exception {
        DistributedLock lock = registry.obtain("t");
        for (int i = 0; i < 3; i++) {
            lock.lock(Duration.ofMillis(100));
            await().until(() -> !server.exists("reg:t"));
            assertThat(i == 0 ? lock.tryLock() : i == 1 ? lock.tryLock(60, TimeUnit.SECONDS) : lock.tryLock(Duration.ofSeconds(60), Duration.ofSeconds(60))).isTrue();
            lock.unlock();
        }
        lock.lock();
        server.call("LOCK.FORCE", "reg:t");
        assertThatThrownBy(() -> registry.renewLock("t")).isInstanceOf(IllegalStateException.class);
        assertThat(lock.tryLock()).isFalse();
        assertThat(lock.tryLock()).isTrue();
        lock.unlock();
    }

    @Test
    void renewal_of_a_lost_lock_is_refused() throws Exception {
        registry.obtain("r").lock();
        server.call("LOCK.FORCE", "reg:r");
        assertThatThrownBy(() -> registry.renewLock("r")).isInstanceOf(IllegalStateException.class);
        assertThatThrownBy(() -> registry.obtain("r").unlock()).isInstanceOf(ConcurrentModificationException.class);
    }

    @Test
    void time_to_live_is_set_by_lock_and_renew() throws Exception {
        DistributedLock lock = registry.obtain("b");
        lock.lock(Duration.ofSeconds(20));
        registry.renewLock("b", Duration.ofSeconds(60));
        assertThat((Long) server.call("PTTL", "reg:b")).isGreaterThan(20_000);
        registry.renewLock("b");
        lock.unlock();
        assertThatThrownBy(() -> registry.renewLock("b")).isInstanceOf(IllegalStateException.class);
        assertThat(lock.tryLock(Duration.ofSeconds(60), Duration.ofMillis(100))).isTrue();
        await().until(() -> !server.exists("reg:b"));
        assertThatThrownBy(lock::unlock).isInstanceOf(ConcurrentModificationException.class);
    }

    @Test
    void time_to_live_must_be_positive_and_a_wait_may_be_of_any_length() throws Exception {
        DistributedLock lock = registry.obtain("d");
        assertThatThrownBy(() -> lock.lock(Duration.ZERO)).isInstanceOf(IllegalArgumentException.class);
        assertThatThrownBy(() -> lock.tryLock(Duration.ZERO, Duration.ofSeconds(-1))).isInstanceOf(IllegalArgumentException.class);
        for (long seconds : new long[] {Long.MIN_VALUE, Long.MAX_VALUE}) {
            assertThat(lock.tryLock(Duration.ofSeconds(seconds), Duration.ofSeconds(60))).isTrue();
            assertThatThrownBy(() -> registry.renewLock("d", Duration.ofSeconds(seconds))).isInstanceOf(IllegalArgumentException.class);
            lock.unlock();
        }
    }

    @Test
    void leader_initiator_elects_and_hands_over() throws Exception {
        List<String> events = new CopyOnWriteArrayList<>();
        LockRegistryLeaderInitiator first = initiator(registry, "first", events);
        first.start();
        await().until(() -> events.contains("first leads"));
        LockRegistryLeaderInitiator second = initiator(elsewhere, "second", events);
        second.start();
        server.call("LOCK.FORCE", "reg:leaders");
        await().until(() -> events.contains("first leads no more"));
        first.stop();
        await().until(() -> events.contains("second leads"));
        second.stop();
        await().until(() -> !server.exists("reg:leaders"));
    }

    private static LockRegistryLeaderInitiator initiator(HoldfastLockRegistry registry, String name, List<String> events) {
        LockRegistryLeaderInitiator initiator = new LockRegistryLeaderInitiator(registry, new DefaultCandidate(name, "leaders") {
            @Override
            public void onGranted(Context context) {
                events.add(name + " leads");
            }

            @Override
            public void onRevoked(Context context) {
                events.add(name + " leads no more");
            }
        });
        initiator.setHeartBeatMillis(100);
        initiator.setBusyWaitMillis(50);
        return initiator;
    }

    @Test
    void unlock_is_refused_when_another_thread_holds_the_lock() throws Exception {
        registry.obtain("c").lock();
        CompletableFuture<Throwable> thrown = new CompletableFuture<>();
        new Thread(() -> {
            try {
                registry.obtain("c").unlock();
            } catch (Throwable why) {
                thrown.complete(why);
            }
        }).start();
        assertThat(thrown.get(60, TimeUnit.SECONDS)).isInstanceOf(IllegalMonitorStateException.class);
        registry.obtain("c").unlock();
    }
}
