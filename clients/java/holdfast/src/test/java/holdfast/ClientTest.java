package holdfast;

import static holdfast.FakeServer.CUT;
import static holdfast.FakeServer.NIL;
import static holdfast.FakeServer.SILENCE;
import static holdfast.FakeServer.granted;
import static java.nio.charset.StandardCharsets.UTF_8;
import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import holdfast.spi.Node;
import holdfast.spi.RedisConnection;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.PrintStream;
import java.lang.ref.WeakReference;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentLinkedDeque;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

/** What the client shares between acquisitions: its waits, the pool, versions, callbacks; and how it is closed. */
class ClientTest extends ScriptedFixture {
    @Test
    void cancelled_timers_leave_no_task_in_the_clock() throws Exception {
        acquired(lease(60_000));
        for (int i = 0; i < 100; i++) {
            release(acquired(client.lock("other")));
            clock.advance(2000);
        }
        assertThat(clock.tasks()).isLessThan(20);
    }

    @Test
    void only_the_oldest_wait_for_a_mutex_is_at_the_server() throws Exception {
        server.always(ACQUIRE, SILENCE);
        List<CompletableFuture<Hold>> pending = List.of(client.lock("k").acquireAsync(WAIT), client.lock("k").acquireAsync(WAIT), client.lock("k").acquireAsync(WAIT));
        FakeServer.Command first = eventually(ACQUIRE, 1).get(0);
        client.lock("x").info();
        assertThat(server.read(ACQUIRE)).hasSize(1);
        clock.advance(5);
        server.answer(first.connection(), granted(1, 0));
        get(pending.get(0));
        FakeServer.Command second = eventually(ACQUIRE, 2).get(1);
        assertThat(second.has("WAITED")).isTrue();
        pending.get(1).cancel(true);
        assertThat(eventually(ACQUIRE, 3).get(2).owner()).isNotEqualTo(second.owner());
        client.semaphore("s", 2).acquireAsync(WAIT);
        client.semaphore("s", 2).acquireAsync(WAIT);
        eventually(ACQUIRE, 5);
    }

    @Test
    void waits_leave_two_connections_free() throws Exception {
        close(client);
        client = build(server, 4);
        server.always(ACQUIRE, SILENCE);
        client.lock("a").acquireAsync(WAIT);
        client.lock("b").acquireAsync(WAIT);
        eventually(ACQUIRE, 2);
        // A third wait first sends a request without WAIT, and then polls.
        server.next(ACQUIRE, NIL, NIL);
        CompletableFuture<Hold> third = client.lock("c").acquireAsync(WAIT);
        assertThat(eventually(ACQUIRE, 3).get(2).has("WAIT")).isFalse();
        client.info("x");
        FakeServer.Command poll = eventually(ACQUIRE, 4).get(3);
        assertThat(poll.number("WAIT")).isEqualTo(100);
        assertThat(poll.owner()).isEqualTo(server.read(ACQUIRE).get(2).owner());
        // When a place is free, it waits at the server.
        server.answer(server.read(ACQUIRE).get(0).connection(), granted(5, 0));
        clock.until(() -> server.read(ACQUIRE).stream().filter(it -> it.owner().equals(poll.owner())).anyMatch(it -> it.has("WAIT") && it.number("WAIT") > 100));
        third.cancel(true);
        assertThat(server.accepted()).isLessThanOrEqualTo(4);
    }

    @ParameterizedTest
    @CsvSource({"26, 40", "302, 5"})
    void polls_wait_shorter_the_more_are_due(int waits, long wait) throws Exception {
        close(client);
        client = build(server, 3);
        server.always(ACQUIRE, SILENCE);
        client.semaphore("s", 2).acquireAsync(WAIT);
        eventually(ACQUIRE, 1);
        server.always(ACQUIRE, NIL);
        for (int i = 0; i < waits; i++) {
            client.semaphore("s", 2).acquireAsync(WAIT);
        }
        eventually(ACQUIRE, 1 + waits);
        // The first request that polls is not answered, so that all other waits become due.
        server.next(ACQUIRE, SILENCE);
        FakeServer.Command first = eventually(ACQUIRE, 2 + waits).get(1 + waits);
        clock.advance(500);
        server.answer(first.connection(), NIL);
        assertThat(eventually(ACQUIRE, 3 + waits).get(2 + waits).number("WAIT")).isEqualTo(wait);
    }

    @Test
    void late_end_of_an_older_poll_does_not_end_the_polls() throws Exception {
        close(client);
        client = build(server, 3);
        server.always("LOCK.MACQUIRE", SILENCE);
        client.lock(LockSpec.builder("a", "b").build()).acquireAsync(Duration.ofSeconds(30));
        clock.until(() -> server.read("LOCK.MACQUIRE").size() == 1);
        // The first poll of "c" is silent and superseded. While its connection is still open, "c" waits for its next turn behind "d".
        server.next(ACQUIRE, NIL, NIL, SILENCE, NIL, SILENCE);
        CompletableFuture<Hold> polled = client.lock("c").acquireAsync(Duration.ofSeconds(30));
        client.lock("d").acquireAsync(Duration.ofSeconds(30));
        assertThat(get(polled).fence()).isEqualTo(1000);
        assertThat(server.read(ACQUIRE)).hasSize(7);
    }

    @Test
    void empty_name_is_a_name_like_any_other() throws Exception {
        close(client);
        client = build(server, 4);
        server.next(ACQUIRE, SILENCE, SILENCE, NIL, granted(5, 0));
        client.semaphore("s", 2).acquireAsync(WAIT);
        client.semaphore("s", 2).acquireAsync(WAIT);
        eventually(ACQUIRE, 2);
        // This wait joins the line of its mutex and, to poll, that of polls: their keys must differ.
        assertThat(acquired(client.lock("")).fence()).isEqualTo(5);
        assertThat(server.read(ACQUIRE).get(3).words()).contains("", "100");
    }

    @Test
    void wait_without_a_place_first_sends_no_wait_when_it_waited_in_the_client() throws Exception {
        close(client);
        client = build(server, 4);
        server.always(ACQUIRE, SILENCE);
        client.lock("a").acquireAsync(WAIT);
        client.lock("b").acquireAsync(WAIT);
        eventually(ACQUIRE, 2);
        server.next(ACQUIRE, granted(5, 0), NIL);
        CompletableFuture<Hold> oldest = client.lock("c").acquireAsync(WAIT);
        client.lock("c").acquireAsync(WAIT);
        get(oldest);
        List<FakeServer.Command> asked = eventually(ACQUIRE, 4);
        assertThat(asked.subList(2, 4)).noneMatch(it -> it.has("WAIT") || it.has("WAITED"));
        FakeServer.Command poll = eventually(ACQUIRE, 5).get(4);
        assertThat(poll.number("WAIT")).isEqualTo(100);
        assertThat(poll.has("WAITED")).isTrue();
    }

    @ParameterizedTest
    @EnumSource(names = {"REFUSES", "ACCEPTS_AND_CLOSES"})
    void outage_costs_at_most_40_attempts_in_10_s(FakeServer.Door door) throws Exception {
        acquired(client.lock("k"));
        server.door = door;
        server.cutAll();
        server.attempts.clear();
        List<CompletableFuture<Hold>> waiting = new ArrayList<>();
        for (int i = 0; i < 1000; i++) {
            waiting.add(client.lock("o" + i).acquireAsync(Duration.ofSeconds(60)));
        }
        clock.advance(10_000);
        assertThat(server.attempts.size()).isBetween(10, 40);
        // The first attempt may replace a dead idle connection. Then the pause doubles each time; with jitter, it is at least half as long.
        for (int i = 2; i < server.attempts.size(); i++) {
            assertThat(server.attempts.get(i) - server.attempts.get(i - 1)).as("pause before attempt %d", i).isGreaterThanOrEqualTo(Math.min(9L << (i - 2), 500));
        }
        server.door = FakeServer.Door.OPEN;
        for (CompletableFuture<Hold> future : waiting) {
            assertThat(get(future).isHeld()).isTrue();
        }
        assertThat(server.open().size()).isLessThanOrEqualTo(32);
    }

    @Test
    void idle_connection_is_replaced_at_once_when_dead() throws Exception {
        release(acquired(client.lock("k")));
        server.next(ACQUIRE, CUT);
        assertThat(acquired(client.lock("k")).isHeld()).isTrue();
        List<FakeServer.Command> asked = server.read(ACQUIRE);
        assertThat(asked.get(2).connection()).isNotEqualTo(asked.get(1).connection());
    }

    @Test
    void readonly_closes_the_idle_connections_and_refreshes_the_primary() throws Exception {
        release(acquired(client.lock("k")));
        int first = server.read(ACQUIRE).get(0).connection();
        server.next(ACQUIRE, "-READONLY x\r\n");
        acquired(client.lock("k"));
        assertThat(server.refreshes).isPositive();
        assertThat(server.isOpen(first)).isFalse();
    }

    @Test
    void redirect_is_followed_in_a_cluster() throws Exception {
        FakeServer other = new FakeServer(clock).always(ACQUIRE, granted(77, 0));
        server.node(1, other);
        server.node(2, server);
        Holdfast cluster = build(server, 32);
        server.next(ACQUIRE, "-MOVED " + Reply.slot("k".getBytes()) + " 127.0.0.1:1\r\n");
        Hold hold = acquired(cluster.lock("k"));
        assertThat(hold.fence()).isEqualTo(77);
        release(hold);
        assertThat(other.read(RELEASE)).hasSize(1);
        assertThat(server.read(ACQUIRE)).hasSize(1);
        other.next(ACQUIRE, "-ASK " + Reply.slot("k".getBytes()) + " 127.0.0.1:2\r\n");
        server.always("ASKING", "+OK\r\n");
        acquired(cluster.lock("k"));
        assertThat(server.read("ASKING")).hasSize(1);
        close(cluster);
    }

    @ParameterizedTest
    @ValueSource(strings = {"MOVED 1 127.0.0.1:1", "ASK 1 127.0.0.1:1"})
    void redirect_is_an_error_when_the_client_is_for_one_server(String redirect) {
        server.next(ACQUIRE, "-" + redirect + "\r\n");
        assertThatThrownBy(() -> acquired(client.lock("k"))).hasMessageContaining("node of a cluster").hasMessageContaining(redirect);
        assertThat(server.read(ACQUIRE)).hasSize(1);
    }

    @Test
    void release_sends_asking_before_each_command_after_a_redirect() throws Exception {
        FakeServer other = new FakeServer(clock).always("ASKING", "+OK\r\n");
        server.node(1, other);
        Holdfast cluster = build(server, 32);
        String redirect = "-ASK " + Reply.slot("k".getBytes()) + " 127.0.0.1:1\r\n";
        server.next(ACQUIRE, CUT).next(RELEASE, redirect, redirect);
        Hold hold = acquired(cluster.lock("k"));
        release(hold);
        assertThat(other.commands).extracting(FakeServer.Command::name).containsExactly("LOCK.VERSION", "ASKING", RELEASE, "ASKING", RELEASE);
        assertThat(other.read(RELEASE).get(1).has("ALL")).isTrue();
        // No reply was taken for another: the connection is used again.
        assertThat(other.open()).isNotEmpty();
        server.next("LOCK.INFO", redirect);
        finish(Call.start(() -> assertThat(cluster.info("k")).isEmpty()));
        assertThat(other.accepted()).isEqualTo(1);
        close(cluster);
    }

    @Test
    void query_follows_a_redirect_at_once() throws Exception {
        FakeServer other = new FakeServer(clock).always("ASKING", "+OK\r\n");
        server.node(1, other);
        Holdfast cluster = build(server, 32);
        server.always("LOCK.INFO", "-ASK " + Reply.slot("k".getBytes()) + " 127.0.0.1:1\r\n");
        finish(Call.start(() -> assertThat(cluster.info("k")).isEmpty()));
        assertThat(server.read("LOCK.INFO")).hasSize(1);
        assertThat(other.read("LOCK.INFO")).hasSize(1);
        close(cluster);
    }

    @ParameterizedTest
    @ValueSource(strings = {"MOVED", "MOVED x 127.0.0.1:1", "MOVED 1 nonsense", "ASK 1 127.0.0.1:99999999999"})
    void acquire_is_repeated_after_an_unreadable_redirect(String redirect) throws Exception {
        server.cluster = true;
        Holdfast cluster = build(server, 32);
        server.next(ACQUIRE, "-" + redirect + "\r\n").next(RENEW, "-" + redirect + "\r\n");
        Hold hold = acquired(cluster.lock("k"));
        clock.advance(60_000);
        assertThat(hold.isHeld()).isTrue();
        close(cluster);
    }

    @Test
    void redirect_without_a_host_leads_to_the_host_that_replied() throws Exception {
        FakeServer other = new FakeServer(clock).next(ACQUIRE, "-MOVED " + Reply.slot("k".getBytes()) + " :2\r\n");
        List<Node> nodes = new ArrayList<>();
        FakeServer cluster = new FakeServer(clock) {
            @Override
            public RedisConnection open(Node node, Runnable onClose) throws IOException {
                nodes.add(node);
                return super.open(node, onClose);
            }

            @Override
            public Node locate(int slot) {
                return new Node("host", 1);
            }
        };
        cluster.node(1, other);
        cluster.node(2, server);
        Holdfast opened = build(cluster, 32);
        acquired(opened.lock("k"));
        assertThat(nodes).containsExactly(new Node("host", 1), new Node("host", 2));
        close(opened);
    }

    @Test
    void slots_are_those_of_the_cluster_specification() {
        assertThat(Reply.slot("123456789".getBytes())).isEqualTo(0x31C3 & 0x3fff);
        assertThat(Reply.slot("{user1000}.following".getBytes())).isEqualTo(Reply.slot("user1000".getBytes()));
        assertThat(Reply.slot("foo{}{bar}".getBytes())).isEqualTo(Reply.slot("foo{}{bar}".getBytes()));
    }

    // ---- Versions ----

    @Test
    void acquire_says_that_the_module_is_not_loaded_on_an_unknown_command() {
        server.always("LOCK.VERSION", "-ERR unknown command 'LOCK.VERSION'\r\n").always(ACQUIRE, "-ERR unknown command 'LOCK.ACQUIRE'\r\n");
        assertThatThrownBy(() -> acquired(client.lock("k"))).isInstanceOf(ModuleNotLoadedException.class).hasMessageContaining("loadmodule");
    }

    @Test
    void server_without_lock_version_is_too_old() {
        server.always("LOCK.VERSION", "-ERR unknown command 'LOCK.VERSION'\r\n").always(ACQUIRE, "-ERR wrong number of arguments\r\n");
        assertThatThrownBy(() -> get(client.lock("k").tryAcquireAsync())).isInstanceOf(VersionException.class).hasMessageContaining("too old");
    }

    @ParameterizedTest
    @ValueSource(ints = {3, 5})
    void version_exception_says_which_side_is_too_old(int protocol) {
        server.always("LOCK.VERSION", "*4\r\n$8\r\nprotocol\r\n*2\r\n:" + protocol + "\r\n:" + protocol + "\r\n$7\r\nversion\r\n$5\r\n0.9.0\r\n");
        assertThatThrownBy(() -> acquired(client.lock("k"))).isInstanceOf(VersionException.class)
            .hasMessageContaining(protocol == 3 ? "module is too old" : "client is too old").hasMessageContaining("0.9.0");
    }

    // ---- Check and force ----

    @ParameterizedTest
    @ValueSource(ints = {1, 2})
    void check_reports_a_loss_only_if_all_holders_are_shown(int holders) throws Exception {
        Hold hold = acquired(client.semaphore("k", 2));
        server.always("LOCK.INFO", "*4\r\n$7\r\nholders\r\n*1\r\n*4\r\n$5\r\nowner\r\n$4\r\nelse\r\n$5\r\ntoken\r\n:9\r\n$12\r\nholder_count\r\n:" + holders + "\r\n");
        assertThat(hold.check()).isEqualTo(holders == 2);
        assertThat(hold.lossReason()).isEqualTo(holders == 2 ? null : LossReason.GONE);
    }

    @Test
    void force_is_not_repeated_after_a_lost_reply() {
        server.next("LOCK.FORCE", CUT);
        assertThatThrownBy(() -> client.force("k")).isInstanceOf(UnavailableException.class);
        assertThat(server.read("LOCK.FORCE")).hasSize(1);
    }

    @Test
    void force_is_repeated_if_it_was_refused_or_never_written() throws Exception {
        server.next("LOCK.FORCE", "-LOADING x\r\n").always("LOCK.FORCE", ":1\r\n");
        server.door = FakeServer.Door.REFUSES;
        Call forcing = Call.start(() -> assertThat(client.force("k")).isTrue());
        while (forcing.thread().getState() != Thread.State.WAITING) {
            Thread.onSpinWait();
        }
        assertThat(server.attempts).hasSize(1);
        server.door = FakeServer.Door.OPEN;
        finish(forcing);
        assertThat(server.read("LOCK.FORCE")).hasSize(2);
    }

    // ---- Closing, handles, callbacks ----

    @Test
    void close_releases_holds_and_cancels_waits() throws Exception {
        acquired(client.lock("k"));
        server.always(ACQUIRE, SILENCE);
        CompletableFuture<Hold> pending = client.lock("other").acquireAsync(WAIT);
        eventually(ACQUIRE, 2);
        close(client);
        assertThat(server.read(RELEASE)).anyMatch(it -> it.has("TOKEN"));
        assertThat(server.read(RELEASE)).anyMatch(it -> it.has("ALL"));
        assertThatThrownBy(() -> get(pending)).isInstanceOf(HoldfastException.class);
        assertThatThrownBy(() -> client.lock("k").tryAcquire()).isInstanceOf(IllegalStateException.class);
        assertThat(server.open()).isEmpty();
    }

    @Test
    void pending_release_fails_when_the_client_is_closed() throws Exception {
        Hold hold = acquired(client.lock("k"));
        server.door = FakeServer.Door.REFUSES;
        server.cutAll();
        CompletableFuture<Void> released = hold.releaseAsync();
        assertThat(released).isNotDone();
        client.close();
        assertThatThrownBy(released::join).hasRootCauseInstanceOf(HoldfastException.class).hasMessageContaining("the client");
    }

    @ParameterizedTest
    @ValueSource(classes = {RejectedExecutionException.class, IllegalStateException.class})
    void callbacks_run_on_a_thread_of_the_client_when_the_executor_rejects_them(Class<? extends RuntimeException> rejection) throws Exception {
        close(client);
        ExecutorService worker = Executors.newCachedThreadPool(task -> new Thread(task, "worker"));
        client = Holdfast.builder(server).controlledBy(clock, worker).callbacks(task -> {
            throw rejection == IllegalStateException.class ? new IllegalStateException() : new RejectedExecutionException();
        }).build();
        CompletableFuture<String> lost = new CompletableFuture<>();
        server.next(ACQUIRE, SILENCE).next(RENEW, NIL);
        CompletableFuture<String> acquired = client.lock("k").acquireAsync(WAIT).thenApply(hold -> {
            hold.onLost(why -> lost.complete(Thread.currentThread().getName()));
            return Thread.currentThread().getName();
        });
        answerToWorker(ACQUIRE, granted(7, 0));
        assertThat(acquired.join()).isEqualTo("worker");
        clock.advance(2500);
        assertThat(lost.join()).isEqualTo("worker");
    }

    @Test
    void callbacks_run_on_a_thread_of_the_client_when_the_executor_would_run_them_in_the_caller() throws Exception {
        close(client);
        ExecutorService worker = Executors.newCachedThreadPool();
        client = Holdfast.builder(server).controlledBy(clock, worker).callbacks(Runnable::run).build();
        server.next(ACQUIRE, SILENCE);
        // In a step, the release would wait for itself.
        CompletableFuture<Void> released = client.lock("k").acquireAsync(WAIT).thenAccept(Hold::release);
        answerToWorker(ACQUIRE, granted(7, 0));
        released.get(30, TimeUnit.SECONDS);
        assertThat(server.read(RELEASE)).hasSize(1);
    }

    @Test
    void acquisition_ends_when_no_thread_can_be_had_for_a_listener() throws Exception {
        close(client);
        boolean[] isExhausted = {false};
        client = Holdfast.builder(server).controlledBy(clock, direct(() -> isExhausted[0])).listener(new HoldfastListener() { }).build();
        server.next(ACQUIRE, SILENCE);
        CompletableFuture<Hold> acquired = client.lock("k").acquireAsync(WAIT);
        isExhausted[0] = true;
        server.answer(eventually(ACQUIRE, 1).get(0).connection(), granted(7, 0));
        assertThat(get(acquired).fence()).isEqualTo(7);
        isExhausted[0] = false;
    }

    @Test
    void elected_and_lost_are_called_as_soon_as_a_thread_can_be_had() throws Exception {
        close(client);
        boolean[] isExhausted = {false};
        client = Holdfast.builder(server).controlledBy(clock, direct(() -> isExhausted[0])).build();
        List<Object> calls = new ArrayList<>();
        server.next(ACQUIRE, SILENCE, SILENCE);
        try (Election election = client.elect("e", "me", term -> calls.add(term.fence()), calls::add)) {
            FakeServer.Command asked = eventually(ACQUIRE, 1).get(0);
            isExhausted[0] = true;
            server.answer(asked.connection(), granted(1000, 0));
            clock.advance(3000);
            assertThat(calls).isEmpty();
            isExhausted[0] = false;
            clock.until(() -> calls.equals(List.of(1000L)));
            isExhausted[0] = true;
            server.next(RENEW, NIL);
            clock.until(() -> client.holds().isEmpty());
            clock.advance(3000);
            assertThat(calls).hasSize(1);
            isExhausted[0] = false;
            clock.until(() -> calls.equals(List.of(1000L, LossReason.GONE)));
            // It stands again.
            eventually(ACQUIRE, 2);
        }
    }

    @Test
    void event_reaches_all_listeners_when_one_throws() throws Exception {
        close(client);
        List<String> acquired = new ArrayList<>();
        HoldfastListener throwing = new HoldfastListener() {
            @Override
            public void acquired(String name, Duration waited) {
                throw new IllegalStateException();
            }
        };
        HoldfastListener other = new HoldfastListener() {
            @Override
            public void acquired(String name, Duration waited) {
                acquired.add(name);
            }
        };
        client = Holdfast.builder(server).controlledBy(clock, direct()).listener(throwing).listener(other).build();
        acquired(client.lock("k"));
        assertThat(acquired).containsExactly("k");
    }

    @Test
    void losses_and_failures_are_reported_when_the_logger_throws() throws Exception {
        close(client);
        List<String> lost = new ArrayList<>();
        client = Holdfast.builder(server).controlledBy(clock, direct()).listener(new HoldfastListener() {
            @Override
            public void lost(String name, LossReason why) {
                lost.add(name);
            }
        }).build();
        PrintStream before = System.err;
        System.setErr(new PrintStream(before) {
            @Override
            public void println(String line) {
                throw new IllegalStateException("the disk is full");
            }
        });
        try {
            server.next(RELEASE, NIL);
            Hold hold = client.lock("k").acquire(WAIT);
            assertThatThrownBy(() -> get(hold.releaseAsync())).isInstanceOf(LockLostException.class);
            assertThat(lost).containsExactly("k");
            // A step that fails is logged, too.
            client.serial.run(() -> {
                throw new IllegalStateException();
            });
            client.lock("k").acquire(WAIT).release();
        } finally {
            System.setErr(before);
        }
    }

    @Test
    void acquire_async_ends_when_no_thread_can_be_had_for_its_callback() throws Exception {
        close(client);
        ExecutorService worker = Executors.newCachedThreadPool();
        client = Holdfast.builder(server).controlledBy(clock, worker).build();
        server.next(ACQUIRE, SILENCE);
        CompletableFuture<Hold> acquired = client.lock("k").acquireAsync(WAIT);
        client.serial.run(worker::shutdown);
        answerToWorker(ACQUIRE, granted(7, 0));
        assertThat(acquired.join().isHeld()).isTrue();
    }

    /** Answers a command that a worker sends, in a step after the one that sends it. */
    private void answerToWorker(String command, String answer) {
        while (server.read(command).isEmpty()) {
            Thread.onSpinWait();
        }
        client.serial.run(() -> server.answer(server.read(command).get(0).connection(), answer));
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void attempts_to_connect_continue_after_no_thread_could_be_had(boolean inWorker) throws Exception {
        close(client);
        int[] failures = {10};
        FakeServer connector = new FakeServer(clock) {
            @Override
            public RedisConnection open(Node node, Runnable onClose) throws IOException {
                if (inWorker && failures[0]-- > 0) {
                    throw new OutOfMemoryError("unable to create native thread");
                }
                return super.open(node, onClose);
            }
        };
        client = Holdfast.builder(connector).controlledBy(clock, direct(() -> !inWorker && failures[0]-- > 0)).build();
        assertThat(get(client.lock("k").acquireAsync(Duration.ofSeconds(30))).isHeld()).isTrue();
    }

    @Test
    void renewals_are_not_delayed_when_a_callback_blocks() throws Exception {
        close(client);
        ExecutorService callbacks = Executors.newCachedThreadPool();
        client = Holdfast.builder(server).controlledBy(clock, direct()).callbacks(callbacks).build();
        Hold lost = client.lock(LockSpec.builder("k").lease(Duration.ofMillis(1600)).build()).acquire(WAIT);
        CountDownLatch called = new CountDownLatch(1);
        CountDownLatch never = new CountDownLatch(1);
        lost.onLost(why -> {
            called.countDown();
            await(never);
        });
        server.next(RENEW, NIL);
        clock.advance(400);
        await(called);
        Hold hold = client.lock(LockSpec.builder("k").lease(Duration.ofMillis(1600)).build()).acquire(WAIT);
        eventually(RENEW, 4);
        assertThat(hold.isHeld()).isTrue();
        hold.release();
        never.countDown();
        callbacks.shutdown();
    }

    @Test
    void steps_are_not_delayed_when_a_continuation_of_an_async_release_blocks() throws Exception {
        close(client);
        ExecutorService callbacks = Executors.newCachedThreadPool();
        client = Holdfast.builder(server).controlledBy(clock, direct()).callbacks(callbacks).build();
        Hold other = client.lock("other").acquire(WAIT);
        Hold hold = client.lock("k").acquire(WAIT);
        server.next(RELEASE, SILENCE);
        CompletableFuture<Void> renewed = hold.releaseAsync().thenRun(other::renew);
        server.answer(server.read(RELEASE).get(0).connection(), ":1\r\n");
        renewed.join();
        assertThat(server.read(RENEW)).hasSize(1);
        callbacks.shutdown();
    }

    private static void await(CountDownLatch latch) {
        try {
            latch.await();
        } catch (InterruptedException why) {
            throw new AssertionError(why);
        }
    }

    @Test
    void hold_is_still_renewed_when_forgotten() throws Exception {
        acquired(lease(1600));
        System.gc();
        eventually(RENEW, 3);
        assertThat(server.read(RELEASE)).isEmpty();
    }

    /** Collects what is logged until it is closed. */
    private static final class Log implements AutoCloseable {
        private final PrintStream before = System.err;
        private final ByteArrayOutputStream text = new ByteArrayOutputStream();

        Log() {
            System.setErr(new PrintStream(text, true, UTF_8));
        }

        @Override
        public String toString() {
            return text.toString(UTF_8);
        }

        @Override
        public void close() {
            System.setErr(before);
        }
    }

    private static void collectUntil(BooleanSupplier condition) {
        while (!condition.getAsBoolean()) {
            System.gc();
            Thread.onSpinWait();
        }
    }

    @Test
    void holdings_of_ended_threads_are_removed_when_their_leases_have_ended() throws Exception {
        long[] ended = new long[200];
        for (int i = 0; i < ended.length; i++) {
            FencedLock lock = client.fencedLock("k" + i);
            Call call = Call.start(lock::lock);
            call.thread().join();
            call.done().join();
            ended[i] = call.thread().getId();
        }
        FencedLock lock = client.fencedLock("k");
        for (int i = 0; i < 1000; i++) {
            Call call = Call.start(() -> lock.lock(10, TimeUnit.MILLISECONDS));
            call.thread().join();
            call.done().join();
            clock.advance(10);
        }
        assertThat(client.holdings.size()).isLessThan(500);
        for (int i = 0; i < ended.length; i++) {
            assertThat(client.holdings.containsKey(new FencedLock.Place("k" + i, ended[i], null))).isTrue();
        }
    }

    @Test
    void hold_is_logged_when_forgotten() throws Exception {
        try (Log log = new Log()) {
            client.lock("forgotten").tryAcquire();
            acquired(client.lock("forgotten too"));
            collectUntil(() -> log.toString().contains("'forgotten' was forgotten") && log.toString().contains("'forgotten too' was forgotten"));
        }
        assertThat(client.holds()).hasSize(2);
    }

    @Test
    void hold_is_collected_and_not_logged_when_released_or_lost() throws Exception {
        try (Log log = new Log()) {
            List<WeakReference<Acquisition>> ended = new ArrayList<>();
            for (String name : List.of("released", "lost")) {
                Hold hold = acquired(client.lock(name));
                hold.onLost(why -> System.out.println(hold));
                ended.add(new WeakReference<>(hold.acquisition));
                server.next(RELEASE, name.equals("lost") ? NIL : ":1\r\n");
                CompletableFuture<Void> released = hold.releaseAsync();
                clock.until(released::isDone);
                assertThat(released.isCompletedExceptionally()).isEqualTo(name.equals("lost"));
            }
            // The timers of their requests refer to the acquisitions.
            clock.advance(60_000);
            collectUntil(() -> ended.stream().allMatch(it -> it.get() == null));
            assertThat(log.toString()).doesNotContain("forgotten");
        }
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void elected_is_called_before_lost_or_not_at_all(boolean lostEarly) throws Exception {
        close(client);
        Deque<Runnable> callbacks = new ConcurrentLinkedDeque<>();
        client = Holdfast.builder(server).controlledBy(clock, direct()).callbacks(callbacks::addFirst).build();
        List<String> calls = new ArrayList<>();
        server.next(ACQUIRE, granted(7, 0), SILENCE);
        try (Election election = client.elect("e", "me", term -> calls.add("elected"), why -> calls.add("lost"))) {
            clock.until(() -> !callbacks.isEmpty());
            callbacks.remove().run();
            server.next(RENEW, NIL);
            if (!lostEarly) {
                callbacks.remove().run();
            }
            clock.until(() -> !client.holds().isEmpty());
            clock.until(() -> client.holds().isEmpty());
            while (!callbacks.isEmpty()) {
                // The newest first: an executor may run callbacks in any order.
                callbacks.remove().run();
            }
            assertThat(calls).isEqualTo(lostEarly ? List.of("lost") : List.of("elected", "lost"));
        }
    }

    @Test
    void leader_stands_again_when_it_releases_its_hold() throws Exception {
        List<Hold> terms = new CopyOnWriteArrayList<>();
        server.next(ACQUIRE, granted(7, 0), granted(8, 0), SILENCE);
        try (Election election = client.elect("e", "me", terms::add, why -> { })) {
            clock.until(() -> terms.size() == 1);
            terms.get(0).release();
            clock.until(() -> terms.size() == 2);
            assertThat(election.isLeader()).isTrue();
        }
    }

    @Test
    void value_of_a_candidate_is_escaped_in_its_owner() throws Exception {
        acquired(client.lock(LockSpec.builder("k").label("50%#1").build()));
        assertThat(server.read(ACQUIRE).get(0).owner()).matches("50%25%231#[0-9a-f]{32}");
        server.always("LOCK.INFO", "*4\r\n$7\r\nholders\r\n*1\r\n*4\r\n$5\r\nowner\r\n$16\r\n%2523%25%231#abc\r\n$5\r\ntoken\r\n:9\r\n$5\r\nlimit\r\n:1\r\n");
        assertThat(client.leader("e")).isEqualTo(Optional.of(new Election.Leader("%23%#1", 9)));
    }

    @Test
    void leader_is_read_from_the_owner() {
        server.always("LOCK.INFO", "*4\r\n$7\r\nholders\r\n*1\r\n*4\r\n$5\r\nowner\r\n$11\r\nhost:1#abcd\r\n$5\r\ntoken\r\n:9\r\n$5\r\nlimit\r\n:1\r\n");
        assertThat(client.leader("e")).isEqualTo(Optional.of(new Election.Leader("host:1", 9)));
    }
}
