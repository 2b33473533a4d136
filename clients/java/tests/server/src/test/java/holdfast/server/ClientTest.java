package holdfast.server;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;
import static org.awaitility.Awaitility.await;

import holdfast.DeadlockException;
import holdfast.Election;
import holdfast.Hold;
import holdfast.Holdfast;
import holdfast.HoldfastException;
import holdfast.LockInfo;
import holdfast.LockLostException;
import holdfast.LockSpec;
import holdfast.LossReason;
import holdfast.ModuleNotLoadedException;
import holdfast.NotAcquiredException;
import holdfast.jedis.JedisConnector;
import holdfast.spi.Node;
import holdfast.spi.RedisConnection;
import holdfast.testing.FaultProxy;
import holdfast.testing.RedisServer;
import io.lettuce.core.RedisClient;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;
import redis.clients.jedis.DefaultJedisClientConfig;
import redis.clients.jedis.HostAndPort;
import redis.clients.jedis.UnifiedJedis;

/** The client with a real server, over each library. */
@Timeout(600)
class ClientTest {
    private static final Duration WAIT = Duration.ofSeconds(60);
    private static RedisServer server;

    @BeforeAll
    static void start() throws Exception {
        server = RedisServer.withModule();
        Clients.LETTUCE.warm(server.port).close();
        Clients.JEDIS.warm(server.port).close();
    }

    @AfterAll
    static void stop() throws Exception {
        if (server != null) {
            server.close();
        }
    }

    private static String name(Clients library, String test) {
        return test + ":" + library;
    }

    @ParameterizedTest
    @EnumSource
    void lock_excludes_and_hands_over_with_greater_fences(Clients library) throws Exception {
        try (Clients.Opened first = library.open(server.port); Clients.Opened second = library.open(server.port)) {
            String name = name(library, "exclusion");
            Hold hold = first.client().lock(name).acquire(WAIT);
            assertThat(second.client().lock(name).tryAcquire()).isEmpty();
            CompletableFuture<Hold> next = second.client().lock(name).acquireAsync(WAIT);
            await().until(() -> second.client().waiters(name).size() == 1);
            hold.release();
            Hold after = next.get();
            assertThat(after.fence()).isGreaterThan(hold.fence());
            assertThat(after.check()).isTrue();
            after.release();
            assertThat(server.exists(name)).isFalse();
            assertThat(first.client().info(name)).isEmpty();
        }
    }

    @ParameterizedTest
    @EnumSource
    void wait_is_longer_than_the_timeout_of_the_library(Clients library) throws Exception {
        try (Clients.Opened first = library.open(server.port); Clients.Opened second = library.open(server.port)) {
            String name = name(library, "long");
            Hold hold = first.client().lock(name).acquire(WAIT);
            CompletableFuture<Hold> next = second.client().lock(name).acquireAsync(WAIT);
            // After 2 s, a request over another connection takes over the place in the queue.
            await().until(() -> second.client().waiters(name).stream().anyMatch(it -> it.waited().toMillis() > 2300));
            assertThat(second.client().waiters(name)).hasSize(1);
            hold.release();
            next.get().release();
        }
    }

    @ParameterizedTest
    @EnumSource
    void semaphore_readers_and_several_names_work(Clients library) throws Exception {
        try (Clients.Opened opened = library.open(server.port)) {
            Holdfast client = opened.client();
            String name = name(library, "{kinds}");
            Hold one = client.semaphore(name + "s", 2).acquire(WAIT);
            Hold two = client.semaphore(name + "s", 2).acquire(WAIT);
            assertThat(client.semaphore(name + "s", 2).tryAcquire()).isEmpty();
            assertThat(client.info(name + "s").orElseThrow().limit()).contains(2L);
            one.close();
            two.close();
            Hold both = client.acquireAll(List.of(name + "a", name + "b"), WAIT);
            assertThat(client.lock(name + "b").tryAcquire()).isEmpty();
            both.renew();
            assertThat(both.check()).isTrue();
            both.release();
            client.lock(name + "b").tryAcquire().orElseThrow().release();
            Hold reader = client.lock(LockSpec.builder(name + "r").shared().build()).acquire(WAIT);
            client.lock(LockSpec.builder(name + "r").shared().build()).acquire(WAIT).release();
            assertThat(client.lock(name + "r").tryAcquire()).isEmpty();
            reader.release();
        }
    }

    @ParameterizedTest
    @EnumSource
    void release_after_keeps_each_of_several_names(Clients library) throws Exception {
        try (Clients.Opened opened = library.open(server.port)) {
            String[] names = {name(library, "kept:a"), name(library, "kept:b")};
            Hold hold = opened.client().lockAll(names).acquire(WAIT);
            hold.releaseAfter(Duration.ofMinutes(10));
            for (String name : names) {
                LockInfo.Holder holder = opened.client().info(name).orElseThrow().holders().get(0);
                assertThat(holder.owner()).isEqualTo(hold.owner());
                assertThat(holder.token()).isEqualTo(hold.fence() + 1);
                assertThat(holder.timeToLive().orElseThrow()).isGreaterThan(Duration.ofMinutes(5));
            }
        }
    }

    @ParameterizedTest
    @EnumSource
    void forced_lock_is_lost(Clients library) throws Exception {
        try (Clients.Opened first = library.open(server.port); Clients.Opened second = library.open(server.port)) {
            String name = name(library, "force");
            List<LossReason> reported = new CopyOnWriteArrayList<>();
            Hold hold = first.client().lock(LockSpec.builder(name).lease(Duration.ofSeconds(8)).build()).acquire(WAIT).onLost(reported::add);
            LockInfo info = second.client().info(name).orElseThrow();
            assertThat(info.holders()).singleElement().satisfies(it -> {
                assertThat(it.owner()).isEqualTo(hold.owner());
                assertThat(it.token()).isEqualTo(hold.fence());
            });
            assertThat(second.client().force(name)).isTrue();
            assertThat(second.client().force(name)).isFalse();
            await().until(() -> reported.equals(List.of(LossReason.GONE)));
            assertThatThrownBy(hold::release).isInstanceOf(LockLostException.class);
        }
    }

    @ParameterizedTest
    @EnumSource
    void cancelled_and_timed_out_waits_leave_nothing_at_the_server(Clients library) throws Exception {
        try (Clients.Opened first = library.open(server.port); Clients.Opened second = library.open(server.port)) {
            String name = name(library, "cancel");
            Hold hold = first.client().lock(name).acquire(WAIT);
            for (int i = 0; i < 20; i++) {
                CompletableFuture<Hold> pending = second.client().lock(name).acquireAsync(WAIT);
                if (i % 2 == 0) {
                    await().pollInterval(2, TimeUnit.MILLISECONDS).until(() -> first.client().waiters(name).size() == 1);
                }
                pending.cancel(true);
            }
            assertThatThrownBy(() -> second.client().lock(name).acquire(Duration.ofMillis(50))).isInstanceOf(NotAcquiredException.class);
            await().until(() -> first.client().waiters(name).isEmpty());
            hold.release();
            await().until(() -> !server.exists(name));
        }
    }

    @ParameterizedTest
    @EnumSource
    void leader_hands_over_when_closed_and_an_observer_sees_it(Clients library) throws Exception {
        try (Clients.Opened first = library.open(server.port); Clients.Opened second = library.open(server.port)) {
            String name = name(library, "election");
            List<String> terms = new CopyOnWriteArrayList<>();
            Election one = first.client().elect(name, "one:1#%", term -> terms.add("one"), why -> { });
            await().until(() -> terms.size() == 1);
            Election two = second.client().elect(name, "two:2", term -> terms.add("two"), why -> { });
            List<Optional<Election.Leader>> seen = new CopyOnWriteArrayList<>();
            AutoCloseable observer = second.client().observe(name, seen::add);
            await().until(() -> seen.size() == 1 && seen.get(0).map(Election.Leader::value).equals(Optional.of("one:1#%")));
            one.close();
            await().until(() -> terms.equals(List.of("one", "two")) && two.isLeader());
            assertThat(first.client().leader(name)).map(Election.Leader::value).contains("two:2");
            await().until(() -> seen.size() >= 2);
            observer.close();
            two.close();
            await().until(() -> !server.exists(name));
        }
    }

    @ParameterizedTest
    @EnumSource(names = {"LETTUCE", "JEDIS"})
    void ephemeral_leader_is_replaced_when_its_connection_ends(Clients library) throws Exception {
        try (FaultProxy proxy = new FaultProxy(server.port); Clients.Opened first = library.open(proxy.port()); Clients.Opened second = library.open(server.port)) {
            String name = name(library, "ephemeral-election");
            List<String> terms = new CopyOnWriteArrayList<>();
            List<LossReason> lost = new CopyOnWriteArrayList<>();
            // The lease outlasts the test: only the end of the connection ends the term.
            Election one = first.client().elect(LockSpec.builder(name).ephemeral(true).lease(Duration.ofHours(1)).label("one").build(), term -> terms.add("one"), lost::add);
            await().until(() -> terms.equals(List.of("one")));
            assertThat(second.client().leader(name)).map(Election.Leader::value).contains("one");
            Election two = second.client().elect(LockSpec.builder(name).ephemeral(true).label("two").build(), term -> terms.add("two"), why -> { });
            await().until(() -> second.client().waiters(name).size() == 1);
            proxy.cutAll();
            await().until(() -> terms.equals(List.of("one", "two")));
            if (library == Clients.LETTUCE) { // Jedis reads nothing between commands: the former leader would notice only when it renews.
                await().until(() -> lost.size() == 1);
            }
            two.close();
            if (library == Clients.LETTUCE) {
                await().until(() -> terms.equals(List.of("one", "two", "one")));
            }
            one.close();
            await().until(() -> !server.exists(name));
        }
    }

    @ParameterizedTest
    @EnumSource(names = {"LETTUCE", "JEDIS"})
    void election_with_replicas_needs_the_replica(Clients library) throws Exception {
        try (RedisServer primary = RedisServer.withModule();
                RedisServer replica = RedisServer.withModule("--replicaof", "127.0.0.1 " + primary.port, "--repl-diskless-sync-delay", "0");
                Clients.Opened opened = library.open(primary.port)) {
            await().until(() -> primary.ask("INFO", "replication").contains("state=online"));
            LockSpec spec = LockSpec.builder("leader").replicas(1).lease(Duration.ofMinutes(1)).label("one").build();
            List<Long> terms = new CopyOnWriteArrayList<>();
            Election one = opened.client().elect(spec, term -> terms.add(term.fence()), why -> { });
            await().until(() -> terms.size() == 1);
            assertThat(replica.ask("HGET", "leader", "#fence")).isEqualTo(terms.get(0).toString());
            one.close();
            replica.kill();
            long asked = asked(primary);
            Election two = opened.client().elect(spec, term -> terms.add(term.fence()), why -> { });
            await().until(() -> asked(primary) >= asked + 2);
            assertThat(terms).hasSize(1);
            assertThat(two.isLeader()).isFalse();
            two.close();
        }
    }

    /** Returns how many times LOCK.ACQUIRE was called, by the server's count. */
    private static long asked(RedisServer server) throws Exception {
        return Long.parseLong(server.ask("INFO", "commandstats").replaceAll("(?s).*cmdstat_lock\\.acquire:calls=(\\d+).*", "$1"));
    }

    @ParameterizedTest
    @EnumSource(names = {"LETTUCE", "JEDIS"})
    void lock_survives_cut_connections_and_a_pause_of_the_server(Clients library) throws Exception {
        try (RedisServer own = RedisServer.withModule(); FaultProxy proxy = new FaultProxy(own.port); Clients.Opened opened = library.open(proxy.port())) {
            List<LossReason> reported = new CopyOnWriteArrayList<>();
            List<Hold> holds = new ArrayList<>();
            for (int i = 0; i < 20; i++) {
                holds.add(opened.client().lock(LockSpec.builder("k" + i).lease(Duration.ofSeconds(12)).build()).acquire(WAIT).onLost(reported::add));
            }
            for (int i = 0; i < 3; i++) {
                proxy.cutAll();
                opened.client().info("x");
            }
            own.signal("STOP");
            Thread.sleep(1500);
            own.signal("CONT");
            await().until(() -> holds.stream().allMatch(it -> it.remaining().toMillis() > 9000));
            assertThat(reported).isEmpty();
            for (Hold hold : holds) {
                assertThat(hold.check()).isTrue();
                hold.release();
            }
            await().until(() -> own.call("DBSIZE").equals(0L));
        }
    }

    @ParameterizedTest
    @EnumSource(names = {"LETTUCE", "JEDIS"})
    void lock_is_neither_granted_twice_nor_leaked_when_any_message_is_cut(Clients library) throws Exception {
        try (FaultProxy proxy = new FaultProxy(server.port); Clients.Opened faulty = library.open(proxy.port()); Clients.Opened sound = library.open(server.port)) {
            Duration lease = Duration.ofSeconds(60);
            for (int cut = 0; cut < 14; cut++) {
                String name = name(library, "cut" + cut);
                Hold first = sound.client().lock(name).acquire(WAIT);
                proxy.cutAt(cut);
                CompletableFuture<Hold> pending = faulty.client().lock(LockSpec.builder(name).lease(lease).build()).acquireAsync(WAIT);
                await().until(() -> !sound.client().waiters(name).isEmpty());
                first.release();
                Hold second = pending.get();
                assertThat(sound.client().lock(name).tryAcquire()).isEmpty();
                assertThat(second.check()).isTrue();
                second.renew();
                second.release();
                sound.client().lock(name).acquire(Duration.ofSeconds(30)).release();
                await().until(() -> !server.exists(name));
            }
        }
    }

    @ParameterizedTest
    @EnumSource(names = {"LETTUCE", "JEDIS"})
    void threads_are_all_granted_a_few_contended_locks(Clients library) throws Exception {
        try (Clients.Opened opened = library.open(server.port)) {
            String name = name(library, "crowd");
            int[] counters = new int[10];
            List<Thread> threads = new ArrayList<>();
            AtomicInteger failed = new AtomicInteger();
            for (int i = 0; i < 200; i++) {
                int lock = i % 10;
                Thread thread = new Thread(() -> {
                    try {
                        for (int j = 0; j < 5; j++) {
                            try (Hold hold = opened.client().lock(name + lock).acquire(WAIT)) {
                                counters[lock]++;
                            }
                        }
                    } catch (Exception why) {
                        why.printStackTrace();
                        failed.incrementAndGet();
                    }
                });
                threads.add(thread);
                thread.start();
            }
            for (Thread thread : threads) {
                thread.join();
            }
            assertThat(failed.get()).isZero();
            assertThat(counters).containsOnly(100);
        }
    }

    @ParameterizedTest
    @EnumSource(names = {"LETTUCE", "JEDIS"})
    void nested_locks_do_not_block_the_pool(Clients library) throws Exception {
        try (Clients.Opened opened = library.open(server.port)) {
            List<CompletableFuture<Void>> all = new ArrayList<>();
            for (int i = 0; i < 60; i++) {
                int task = i;
                CompletableFuture<Void> done = new CompletableFuture<>();
                all.add(done);
                new Thread(() -> {
                    try (Hold outer = opened.client().semaphore(name(library, "outer"), 40).acquire(WAIT);
                            Hold inner = opened.client().lock(name(library, "inner" + task % 3)).acquire(WAIT)) {
                        done.complete(null);
                    } catch (Exception why) {
                        done.completeExceptionally(why);
                    }
                }).start();
            }
            CompletableFuture.allOf(all.toArray(new CompletableFuture<?>[0])).get(100, TimeUnit.SECONDS);
        }
    }

    @Test
    void create_accepts_clients_of_both_libraries() throws Exception {
        RedisClient lettuce = RedisClient.create("redis://127.0.0.1:" + server.port);
        try (Holdfast client = Holdfast.create(lettuce)) {
            client.lock("own").acquire(WAIT).release();
        } finally {
            lettuce.shutdown();
        }
        try (UnifiedJedis jedis = redis.clients.jedis.RedisClient.create("127.0.0.1", server.port); Holdfast client = Holdfast.create(jedis)) {
            client.lock("own").acquire(WAIT).release();
        }
        assertThatThrownBy(() -> Holdfast.create("no client")).isInstanceOf(IllegalArgumentException.class).hasMessageContaining("holdfast-lettuce");
    }

    @Test
    void acquire_says_that_the_module_is_not_loaded() throws Exception {
        try (RedisServer plain = RedisServer.withoutModule(); Clients.Opened opened = Clients.LETTUCE.open(plain.port)) {
            assertThatThrownBy(() -> opened.client().lock("k").acquire(WAIT)).isInstanceOf(ModuleNotLoadedException.class);
        }
    }

    @Test
    void jedis_connection_closes_while_a_write_is_blocked() throws Exception {
        try (RedisServer paused = RedisServer.withModule()) {
            JedisConnector connector = JedisConnector.of(new HostAndPort("127.0.0.1", paused.port), DefaultJedisClientConfig.builder().build());
            CompletableFuture<Void> closed = new CompletableFuture<>();
            RedisConnection connection = connector.open(Node.PRIMARY, () -> closed.complete(null));
            paused.signal("STOP");
            byte[][] command = {"ECHO".getBytes(), new byte[100]};
            connection.send(Collections.nCopies(300_000, command), reply -> { });
            await().during(500, TimeUnit.MILLISECONDS).until(ClientTest::isJedisWriting);
            CompletableFuture.runAsync(connection::close).get(60, TimeUnit.SECONDS);
            closed.get(60, TimeUnit.SECONDS);
            paused.signal("CONT");
        }
    }

    private static boolean isJedisWriting() {
        return Thread.getAllStackTraces().entrySet().stream().filter(it -> it.getKey().getName().equals("holdfast-jedis"))
            .anyMatch(it -> Arrays.stream(it.getValue()).anyMatch(frame -> frame.getMethodName().equals("write") && frame.getClassName().contains("Socket")));
    }

    @Test
    void cycle_of_threads_is_refused() throws Exception {
        try (Clients.Opened opened = Clients.JEDIS.open(server.port)) {
            Holdfast client = opened.client();
            CompletableFuture<Void> locked = new CompletableFuture<>();
            CompletableFuture<Throwable> outcome = new CompletableFuture<>();
            Thread thread = new Thread(() -> {
                client.fencedLock("cycle-b").lock();
                locked.complete(null);
                try {
                    client.fencedLock("cycle-a").lock();
                    client.fencedLock("cycle-a").unlock();
                    outcome.complete(new AssertionError("acquired"));
                } catch (RuntimeException why) {
                    outcome.complete(why);
                } finally {
                    client.fencedLock("cycle-b").unlock();
                }
            });
            client.fencedLock("cycle-a").lock();
            thread.start();
            locked.join();
            CompletableFuture<Boolean> mine = new CompletableFuture<>();
            try {
                client.fencedLock("cycle-b").lock();
                mine.complete(true);
                client.fencedLock("cycle-b").unlock();
            } catch (DeadlockException why) {
                mine.complete(false);
            }
            client.fencedLock("cycle-a").unlock();
            Throwable other = outcome.get(60, TimeUnit.SECONDS);
            // It unlocks after that, and must have before the client is closed.
            thread.join();
            // One of the two was refused, and the other one acquired the lock.
            assertThat(other instanceof DeadlockException).isEqualTo(mine.join());
        }
    }

    @Test
    void password_and_database_of_the_application_are_used() throws Exception {
        try (RedisServer own = RedisServer.withModule("--requirepass", "secret")) {
            RedisClient lettuce = RedisClient.create("redis://:secret@127.0.0.1:" + own.port + "/3");
            try (Holdfast client = Holdfast.create(lettuce); Hold hold = client.lock("k").acquire(WAIT)) {
                assertThat(lettuce.connect().sync().exists("k")).isEqualTo(1);
                assertThat(hold.check()).isTrue();
            } finally {
                lettuce.shutdown();
            }
            try (Clients.Opened wrong = Clients.LETTUCE.open(own.port)) {
                assertThatThrownBy(() -> wrong.client().lock("k").tryAcquire()).isExactlyInstanceOf(HoldfastException.class).hasMessageStartingWith("NOAUTH");
            }
        }
    }
}
