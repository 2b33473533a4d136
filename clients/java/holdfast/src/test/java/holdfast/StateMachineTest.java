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
import java.util.concurrent.SynchronousQueue;
import java.util.concurrent.ThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.function.BooleanSupplier;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

/** The cells of the table of states and inputs in {@code docs/client-protocol.md}, with a server that follows a script and a clock that the test advances. */
@Timeout(value = 120, threadMode = Timeout.ThreadMode.SEPARATE_THREAD)
class StateMachineTest {
    private static final Duration WAIT = Duration.ofSeconds(5);
    private static final String ACQUIRE = "LOCK.ACQUIRE";
    private static final String RENEW = "LOCK.RENEW";
    private static final String RELEASE = "LOCK.RELEASE";

    private final ManualClock clock = new ManualClock();
    private final FakeServer server = new FakeServer(clock);
    private Holdfast client = build(server, 32);

    /** Runs tasks immediately, in the calling thread. */
    static ExecutorService direct() {
        return direct(() -> false);
    }

    /** The same, but fails while no thread can be had. */
    private static ExecutorService direct(BooleanSupplier isExhausted) {
        return new ThreadPoolExecutor(0, 1, 0, TimeUnit.SECONDS, new SynchronousQueue<>()) {
            @Override
            public void execute(Runnable task) {
                if (isExhausted.getAsBoolean()) {
                    throw new OutOfMemoryError("unable to create native thread");
                }
                task.run();
            }
        };
    }

    private Holdfast build(FakeServer server, int connections) {
        return Holdfast.builder(server).timeout(Duration.ofSeconds(3)).maxConnections(connections).controlledBy(clock, direct()).build();
    }

    @AfterEach
    void close() throws InterruptedException {
        close(client);
    }

    private void close(Holdfast client) throws InterruptedException {
        Thread closing = new Thread(client::close);
        closing.start();
        while (closing.isAlive()) {
            // No time passes while the thread works: otherwise a paused thread could find that the lease is over.
            if (closing.getState() == Thread.State.WAITING) {
                clock.advance(200);
            }
            closing.join(1);
        }
    }

    private <T> T get(CompletableFuture<T> future) throws InterruptedException {
        return clock.get(future);
    }

    private Hold acquired(NamedLock lock) throws InterruptedException {
        return get(lock.acquireAsync(WAIT));
    }

    private void release(Hold hold) throws InterruptedException {
        get(hold.releaseAsync());
    }

    /** A call that blocks a thread. */
    private record Call(Thread thread, CompletableFuture<Void> done) {
        static Call start(Runnable call) {
            CompletableFuture<Void> done = new CompletableFuture<>();
            Thread thread = new Thread(() -> {
                try {
                    call.run();
                    done.complete(null);
                } catch (Throwable why) {
                    done.completeExceptionally(why);
                }
            });
            thread.start();
            return new Call(thread, done);
        }
    }

    /** Advances the clock while a call waits, until the call has ended. */
    private void finish(Call call) throws InterruptedException {
        while (!call.done.isDone()) {
            if (call.thread.getState() == Thread.State.WAITING) {
                clock.advance(10);
            }
            Thread.onSpinWait();
        }
        Holdfast.result(call.done);
    }

    private NamedLock lease(int ms) {
        return client.lock(LockSpec.builder("k").lease(Duration.ofMillis(ms)).build());
    }

    private NamedLock plain(int ms) {
        return client.lock(LockSpec.builder("k").lease(Duration.ofMillis(ms)).renew(false).build());
    }

    private List<FakeServer.Command> eventually(String name, int count) {
        clock.until(() -> server.read(name).size() >= count);
        return server.read(name);
    }

    private FakeServer.Command withdrawal() {
        clock.until(() -> server.read(RELEASE).stream().anyMatch(it -> it.has("ALL")));
        return server.read(RELEASE).stream().filter(it -> it.has("ALL")).findFirst().orElseThrow();
    }

    // ---- Waiting ----

    @Test
    void lock_is_held_on_a_token() throws Exception {
        Hold hold = acquired(client.lock("k"));
        assertThat(hold.fence()).isEqualTo(1000);
        assertThat(hold.isHeld()).isTrue();
        assertThat(hold.remaining()).isEqualTo(Duration.ofMillis(9900));
        FakeServer.Command acquire = server.read(ACQUIRE).get(0);
        assertThat(acquire.words()).containsSequence("HOLDS", "1").containsSequence("LEASE", "10000").contains("WITHWAITED").doesNotContain("WAITED");
        assertThat(acquire.number("WAIT")).isEqualTo(5000);
        assertThat(acquire.owner()).matches("[0-9a-f]{32}");
    }

    @Test
    void further_elements_of_the_reply_are_ignored() throws Exception {
        server.next(ACQUIRE, "*3\r\n:1000\r\n:0\r\n$1\r\nx\r\n");
        assertThat(acquired(client.lock("k")).isHeld()).isTrue();
    }

    @Test
    void lock_version_is_sent_once_before_the_first_acquisition() throws Exception {
        release(acquired(client.lock("k")));
        release(acquired(client.lock("k")));
        assertThat(server.commands.get(0).name()).isEqualTo("LOCK.VERSION");
        assertThat(server.read("LOCK.VERSION")).hasSize(1);
    }

    @Test
    void nil_to_a_try_is_not_acquired() {
        server.next(ACQUIRE, NIL);
        assertThat(client.lock("k").tryAcquire()).isEmpty();
        assertThat(server.read(ACQUIRE).get(0).words()).doesNotContain("WAIT", "WAITED");
        assertThat(server.read(RELEASE)).isEmpty();
    }

    @Test
    void nil_to_a_wait_is_not_acquired() {
        server.next(ACQUIRE, NIL);
        assertThatThrownBy(() -> acquired(client.lock("k"))).isInstanceOf(NotAcquiredException.class);
    }

    @ParameterizedTest
    @ValueSource(strings = {"LOADING x", "BUSY x", "TRYAGAIN x", "MASTERDOWN x", "MISCONF x", "NOREPLICAS x", "CLUSTERDOWN x", "OOM x", "UNCONFIRMED x", "READONLY x", "UNBLOCKED x",
        "ERR too many waiters", "ERR another request is being confirmed", "ERR max number of clients reached"})
    void acquire_is_repeated_after_a_pause_on_a_passing_error(String error) throws Exception {
        server.next(ACQUIRE, "-" + error + "\r\n", "-" + error + "\r\n", granted(7, 0));
        Hold hold = acquired(client.lock("k"));
        assertThat(hold.fence()).isEqualTo(7);
        List<FakeServer.Command> asked = server.read(ACQUIRE);
        assertThat(asked).hasSize(3);
        assertThat(asked.stream().map(FakeServer.Command::owner).distinct()).hasSize(1);
        assertThat(asked.get(2).at() - asked.get(0).at()).isGreaterThanOrEqualTo(28);
        assertThat(asked.get(2).has("WAITED")).isTrue();
    }

    @ParameterizedTest
    @ValueSource(strings = {"DEADLOCK a cycle", "WRONGTYPE x", "NOPERM x", "NOAUTH x", "ERR bad", "NEWCODE x"})
    void fatal_error_is_reported_at_once(String error) {
        server.next(ACQUIRE, "-" + error + "\r\n");
        assertThatThrownBy(() -> acquired(client.lock("k"))).isInstanceOf(error.startsWith("DEADLOCK") ? DeadlockException.class : HoldfastException.class).hasMessageContaining(error);
        assertThat(server.read(ACQUIRE)).hasSize(1);
        assertThat(server.read(RELEASE)).isEmpty();
    }

    @ParameterizedTest
    @ValueSource(strings = {"+NONSENSE\r\n", ":7\r\n", "*1\r\n:7\r\n", "*2\r\n+OK\r\n:0\r\n"})
    void acquire_is_repeated_over_another_connection_when_reply_is_neither_token_nor_nil(String reply) throws Exception {
        server.next(ACQUIRE, reply, granted(7, 0));
        assertThat(acquired(client.lock("k")).fence()).isEqualTo(7);
        List<FakeServer.Command> asked = server.read(ACQUIRE);
        assertThat(asked).hasSize(2);
        assertThat(asked.get(1).connection()).isNotEqualTo(asked.get(0).connection());
        assertThat(asked.get(1).has("WAITED")).isTrue();
    }

    @Test
    void acquire_is_repeated_with_waited_over_another_connection_after_an_end_of_file() throws Exception {
        server.next(ACQUIRE, CUT, granted(7, 0));
        assertThat(acquired(client.lock("k")).fence()).isEqualTo(7);
        List<FakeServer.Command> asked = server.read(ACQUIRE);
        assertThat(asked.get(1).connection()).isNotEqualTo(asked.get(0).connection());
        assertThat(asked.get(1).owner()).isEqualTo(asked.get(0).owner());
        assertThat(asked.get(1).number("WAIT")).isLessThanOrEqualTo(asked.get(0).number("WAIT"));
    }

    @Test
    void wait_is_requested_again_after_two_seconds_of_silence_and_keeps_its_place() throws Exception {
        server.always(ACQUIRE, SILENCE);
        CompletableFuture<Hold> pending = client.lock("k").acquireAsync(WAIT);
        List<FakeServer.Command> asked = eventually(ACQUIRE, 2);
        assertThat(asked.get(1).connection()).isNotEqualTo(asked.get(0).connection());
        assertThat(asked.get(1).at()).isEqualTo(2000);
        assertThat(asked.get(1).number("WAITED")).isEqualTo(2000);
        assertThat(asked.get(1).number("WAIT")).isEqualTo(3000);
        server.answer(asked.get(0).connection(), "-SUPERSEDED by another request\r\n");
        server.answer(asked.get(1).connection(), granted(9, 5));
        assertThat(get(pending).fence()).isEqualTo(9);
        assertThat(server.isOpen(asked.get(0).connection())).isTrue();
        // Nothing broke: the release needs no withdrawal.
        release(get(pending));
        assertThat(server.read(RELEASE)).hasSize(1);
    }

    @Test
    void connection_is_closed_after_a_second_when_its_request_is_not_superseded() throws Exception {
        server.always(ACQUIRE, SILENCE);
        CompletableFuture<Hold> pending = client.lock("k").acquireAsync(WAIT);
        List<FakeServer.Command> asked = eventually(ACQUIRE, 2);
        clock.until(() -> !server.isOpen(asked.get(0).connection()));
        assertThat(clock.now() / 1_000_000 - asked.get(1).at()).isEqualTo(1000);
        server.answer(asked.get(1).connection(), granted(9, 5));
        Hold hold = get(pending);
        release(hold);
        // A stale request may be in the queue: the pipeline of the release withdraws it.
        List<FakeServer.Command> released = server.read(RELEASE);
        assertThat(released.get(0).words()).containsSequence("TOKEN", "9");
        assertThat(eventually(RELEASE, 2).get(1).has("ALL")).isTrue();
    }

    @Test
    void acquire_is_repeated_when_the_only_request_is_superseded() throws Exception {
        server.next(ACQUIRE, "-SUPERSEDED x\r\n", granted(3, 0));
        assertThat(acquired(client.lock("k")).fence()).isEqualTo(3);
    }

    @Test
    void cancel_returns_at_once_and_withdraws_over_another_connection() throws Exception {
        server.always(ACQUIRE, SILENCE);
        CompletableFuture<Hold> pending = client.lock("k").acquireAsync(WAIT);
        FakeServer.Command asked = eventually(ACQUIRE, 1).get(0);
        pending.cancel(true);
        assertThat(pending).isCancelled();
        FakeServer.Command withdrawn = withdrawal();
        assertThat(withdrawn.owner()).isEqualTo(asked.owner());
        assertThat(withdrawn.connection()).isNotEqualTo(asked.connection());
        server.answer(asked.connection(), NIL);
        // Its connection is used again.
        server.always(ACQUIRE, granted(5, 0));
        acquired(client.lock("k"));
        assertThat(server.isOpen(asked.connection())).isTrue();
        assertThat(server.read(RELEASE)).hasSize(1);
    }

    @Test
    void acquire_async_is_withdrawn_when_the_application_times_out() {
        server.always(ACQUIRE, SILENCE);
        CompletableFuture<Hold> pending = client.lock("k").acquireAsync(WAIT);
        FakeServer.Command asked = eventually(ACQUIRE, 1).get(0);
        pending.completeExceptionally(new TimeoutException());
        assertThat(withdrawal().owner()).isEqualTo(asked.owner());
    }

    @Test
    void acquire_async_is_withdrawn_when_the_application_completes_its_future() {
        server.always(ACQUIRE, SILENCE);
        CompletableFuture<Hold> pending = client.lock("k").acquireAsync(WAIT);
        FakeServer.Command asked = eventually(ACQUIRE, 1).get(0);
        pending.complete(null);
        FakeServer.Command withdrawn = withdrawal();
        assertThat(withdrawn.owner()).isEqualTo(asked.owner());
        assertThat(withdrawn.at()).isEqualTo(asked.at());
    }

    @Test
    void grant_is_released_when_the_application_has_completed_its_future() throws Exception {
        close(client);
        Deque<Runnable> callbacks = new ConcurrentLinkedDeque<>();
        client = Holdfast.builder(server).controlledBy(clock, direct()).callbacks(callbacks::add).build();
        CompletableFuture<Hold> pending = client.lock("k").acquireAsync(WAIT);
        clock.until(() -> !callbacks.isEmpty());
        pending.complete(null);
        assertThat(server.read(RELEASE)).isEmpty();
        callbacks.remove().run();
        clock.until(() -> !server.read(RELEASE).isEmpty());
        assertThat(client.holds()).isEmpty();
    }

    @Test
    void interrupted_acquire_throws_and_withdraws() throws Exception {
        server.always(ACQUIRE, SILENCE);
        CompletableFuture<Throwable> thrown = new CompletableFuture<>();
        Thread thread = new Thread(() -> {
            try {
                client.lock("k").acquire(WAIT);
            } catch (Throwable why) {
                thrown.complete(why);
            }
        });
        thread.start();
        while (server.read(ACQUIRE).isEmpty()) {
            Thread.onSpinWait();
        }
        thread.interrupt();
        assertThat(thrown.get()).isInstanceOf(InterruptedException.class);
        withdrawal();
    }

    @Test
    void release_all_is_repeated_when_it_has_overtaken_the_grant() throws Exception {
        server.always(ACQUIRE, SILENCE);
        server.always(RELEASE, NIL);
        CompletableFuture<Hold> pending = client.lock("k").acquireAsync(WAIT);
        FakeServer.Command asked = eventually(ACQUIRE, 1).get(0);
        pending.cancel(true);
        eventually(RELEASE, 1);
        server.answer(asked.connection(), granted(5, 0));
        assertThat(eventually(RELEASE, 2)).allMatch(it -> it.has("ALL"));
    }

    @Test
    void acquire_ends_250_ms_after_its_time_and_is_withdrawn() {
        server.always(ACQUIRE, SILENCE);
        assertThatThrownBy(() -> get(client.lock("k").acquireAsync(Duration.ofMillis(300)))).isInstanceOf(NotAcquiredException.class);
        assertThat(withdrawal().at()).isEqualTo(550);
    }

    @Test
    void no_acquire_is_sent_when_the_time_is_over() throws Exception {
        server.always(ACQUIRE, "-LOADING x\r\n");
        assertThatThrownBy(() -> get(client.lock("k").acquireAsync(Duration.ofSeconds(2)))).isInstanceOf(NotAcquiredException.class).hasRootCauseMessage("LOADING x");
        int asked = server.read(ACQUIRE).size();
        // A pause has jitter: it is at least half as long as without.
        assertThat(asked).isBetween(5, 14);
        clock.advance(60_000);
        assertThat(server.read(ACQUIRE)).hasSize(asked);
    }

    @Test
    void try_throws_within_the_timeout_when_the_server_is_unreachable() throws Exception {
        server.door = FakeServer.Door.REFUSES;
        assertThatThrownBy(() -> get(client.lock("k").tryAcquireAsync())).isInstanceOf(UnavailableException.class);
        assertThat(clock.now()).isLessThanOrEqualTo(3_250_000_000L);
        assertThatThrownBy(() -> get(client.lock("k").acquireAsync(Duration.ofMillis(200)))).isInstanceOf(NotAcquiredException.class);
    }

    @Test
    void acquisition_is_withdrawn_twice_when_it_ends_after_a_broken_connection() {
        server.next(ACQUIRE, CUT, NIL);
        assertThatThrownBy(() -> acquired(client.lock("k"))).isInstanceOf(NotAcquiredException.class);
        List<FakeServer.Command> released = eventually(RELEASE, 2);
        assertThat(released).allMatch(it -> it.has("ALL"));
        assertThat(released.get(1).at() - released.get(0).at()).isGreaterThanOrEqualTo(1000);
    }

    @Test
    void grant_is_renewed_before_it_counts_when_it_is_read_late() throws Exception {
        server.next(ACQUIRE, SILENCE);
        CompletableFuture<Hold> pending = lease(2400).acquireAsync(WAIT);
        FakeServer.Command asked = eventually(ACQUIRE, 1).get(0);
        clock.advance(1500);
        server.answer(asked.connection(), granted(1000, 0));
        assertThat(get(pending).remaining()).isEqualTo(Duration.ofMillis(2376));
        assertThat(server.read(RENEW).get(0).words()).containsSequence("TOKEN", "1000").containsSequence("LEASE", "2400");
    }

    @Test
    void waited_lengthens_the_certainty() throws Exception {
        server.next(ACQUIRE, SILENCE);
        CompletableFuture<Hold> pending = lease(10_000).acquireAsync(WAIT);
        FakeServer.Command asked = eventually(ACQUIRE, 1).get(0);
        clock.advance(1500);
        server.answer(asked.connection(), granted(1000, 1490));
        assertThat(get(pending).remaining()).isEqualTo(Duration.ofMillis(9890));
    }

    @Test
    void acquire_async_sends_no_wait_when_its_time_is_zero() throws Exception {
        server.next(ACQUIRE, NIL);
        assertThatThrownBy(() -> get(client.lock("k").acquireAsync(Duration.ZERO))).isInstanceOf(NotAcquiredException.class);
        assertThat(server.read(ACQUIRE).get(0).words()).doesNotContain("WAIT", "WAITED");
    }

    @Test
    void ephemeral_lock_is_requested_again_when_its_connection_breaks_before_the_grant_counts() throws Exception {
        server.next(ACQUIRE, SILENCE).next(RENEW, SILENCE);
        CompletableFuture<Hold> pending = client.lock(LockSpec.builder("e").ephemeral(true).lease(Duration.ofMillis(2400)).build()).acquireAsync(WAIT);
        FakeServer.Command asked = eventually(ACQUIRE, 1).get(0);
        clock.advance(1500);
        server.answer(asked.connection(), granted(1000, 0));
        server.cut(eventually(RENEW, 1).get(0).connection());
        assertThat(get(pending).isHeld()).isTrue();
        assertThat(server.read(ACQUIRE)).hasSize(2);
    }

    @Test
    void ephemeral_grant_is_withdrawn_and_leaves_its_place_when_cancelled_before_it_counts() throws Exception {
        close(client);
        client = build(server, 3);
        server.next(ACQUIRE, SILENCE).next(RENEW, SILENCE);
        CompletableFuture<Hold> pending = client.lock(LockSpec.builder("e").ephemeral(true).lease(Duration.ofMillis(2400)).build()).acquireAsync(WAIT);
        FakeServer.Command asked = eventually(ACQUIRE, 1).get(0);
        clock.advance(1500);
        server.answer(asked.connection(), granted(1000, 0));
        eventually(RENEW, 1);
        pending.cancel(true);
        assertThat(withdrawal().owner()).isEqualTo(asked.owner());
        assertThat(server.isOpen(asked.connection())).isFalse();
        acquired(client.lock("other"));
        assertThat(server.read(ACQUIRE)).hasSize(2).last().matches(it -> it.has("WAIT"));
    }

    @Test
    void acquire_says_that_there_was_no_connection_when_its_time_is_over() {
        server.always("LOCK.VERSION", SILENCE);
        assertThatThrownBy(() -> get(client.lock("k").acquireAsync(Duration.ofMillis(300)))).isInstanceOf(NotAcquiredException.class)
            .hasMessageEndingWith("was not acquired in time: no connection to the server").hasCauseInstanceOf(UnavailableException.class);
    }

    // ---- Held and renewing ----

    @Test
    void held_lock_is_renewed_at_every_quarter_of_the_lease() throws Exception {
        Hold hold = acquired(lease(1600));
        List<FakeServer.Command> renewed = eventually(RENEW, 3);
        assertThat(renewed.get(0).words()).containsSequence("TOKEN", "1000").containsSequence("LEASE", "1600");
        assertThat(renewed).extracting(FakeServer.Command::at).containsExactly(400L, 800L, 1200L);
        assertThat(hold.isHeld()).isTrue();
        release(hold);
    }

    @ParameterizedTest
    @ValueSource(strings = {NIL, "-WRONGTYPE x\r\n"})
    void loss_is_reported_once_when_a_renewal_finds_no_hold(String answer) throws Exception {
        List<LossReason> reported = new ArrayList<>();
        Hold hold = acquired(lease(1600));
        hold.onLost(reported::add);
        server.always(RENEW, answer);
        clock.until(() -> reported.size() == 1);
        assertThat(reported.get(0)).isEqualTo(answer.equals(NIL) ? LossReason.GONE : LossReason.CHANGED);
        assertThat(hold.isHeld()).isFalse();
        assertThat(hold.remaining()).isZero();
        assertThatThrownBy(() -> release(hold)).isInstanceOf(LockLostException.class);
        assertThat(eventually(RELEASE, 1)).hasSize(1);
        clock.advance(10_000);
        assertThat(reported).hasSize(1);
        hold.onLost(reported::add);
        clock.until(() -> reported.size() == 2);
    }

    @ParameterizedTest
    @ValueSource(strings = {"-UNCONFIRMED x\r\n", "-LOADING x\r\n", "-ERR strange\r\n", CUT, SILENCE})
    void failed_renewal_is_repeated_while_the_hold_is_certain(String answer) throws Exception {
        Hold hold = acquired(lease(2400));
        server.next(RENEW, answer, answer);
        assertThat(eventually(RENEW, 3)).allMatch(it -> it.words().containsAll(List.of("TOKEN", "1000")));
        clock.until(() -> hold.remaining().compareTo(Duration.ofMillis(1500)) > 0);
        release(hold);
    }

    @Test
    void hold_is_lost_when_it_is_no_longer_certain() throws Exception {
        List<LossReason> reported = new ArrayList<>();
        Hold hold = acquired(lease(600));
        hold.onLost(reported::add);
        server.always(RENEW, "-MISCONF x\r\n");
        clock.until(() -> reported.equals(List.of(LossReason.EXPIRED)));
        assertThat(hold.check()).isFalse();
        assertThatThrownBy(hold::renew).isInstanceOf(LockLostException.class);
    }

    @ParameterizedTest
    @ValueSource(ints = {900, 1300, 1700})
    void renewals_are_sent_as_soon_as_there_is_a_connection(int ms) throws Exception {
        for (int i = 0; i < 10; i++) {
            acquired(client.lock(LockSpec.builder("k" + i).lease(Duration.ofMillis(3000)).build()));
            clock.advance(60);
        }
        server.cutAll();
        server.next("LOCK.VERSION", SILENCE);
        clock.until(() -> server.read("LOCK.VERSION").size() == 2);
        clock.advance(ms);
        assertThat(server.read(RENEW)).isEmpty();
        server.answer(server.read("LOCK.VERSION").get(1).connection(), FakeServer.VERSION);
        assertThat(server.read(RENEW)).hasSize(10);
    }

    @Test
    void release_succeeds_when_the_lease_ends_during_it() throws Exception {
        Hold hold = acquired(plain(300));
        List<LossReason> lost = new ArrayList<>();
        hold.onLost(lost::add);
        clock.advance(290);
        server.next(RELEASE, SILENCE);
        CompletableFuture<Void> released = hold.releaseAsync();
        FakeServer.Command command = eventually(RELEASE, 1).get(0);
        clock.advance(10);
        server.answer(command.connection(), ":1\r\n");
        get(released);
        assertThat(hold.lossReason()).isNull();
        assertThat(lost).isEmpty();
    }

    @Test
    void lock_without_renewal_is_not_renewed_and_expires() throws Exception {
        Hold hold = acquired(plain(300));
        clock.until(() -> hold.lossReason() == LossReason.EXPIRED);
        assertThat(server.read(RENEW)).isEmpty();
    }

    @Test
    void renewals_share_a_pipeline_when_due_together() throws Exception {
        for (int i = 0; i < 40; i++) {
            acquired(client.lock(LockSpec.builder("k" + i).lease(Duration.ofSeconds(4)).build()));
        }
        List<FakeServer.Command> renewed = eventually(RENEW, 120);
        long connections = renewed.stream().skip(40).map(FakeServer.Command::connection).distinct().count();
        assertThat(connections).isLessThan(10);
    }

    @Test
    void renew_may_shorten_the_lease() throws Exception {
        Hold hold = acquired(plain(10_000));
        hold.renew(Duration.ofMillis(400));
        assertThat(hold.remaining()).isEqualTo(Duration.ofMillis(396));
        clock.until(() -> hold.lossReason() == LossReason.EXPIRED);
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void renew_keeps_the_former_lease_when_refused(boolean renewed) throws Exception {
        Hold hold = acquired(client.lock(LockSpec.builder("k").lease(Duration.ofMillis(1600)).renew(renewed).build()));
        server.next(RENEW, "-ERR LEASE must be between 1 and 60000 ms\r\n");
        assertThatThrownBy(() -> hold.renew(Duration.ofHours(1))).isInstanceOf(HoldfastException.class).hasMessageContaining("LEASE must be");
        if (renewed) {
            assertThat(eventually(RENEW, 3).subList(1, 3)).allMatch(it -> it.words().containsAll(List.of("LEASE", "1600")));
            release(hold);
        } else {
            clock.until(() -> hold.lossReason() == LossReason.EXPIRED);
            assertThat(server.read(RENEW)).hasSize(1);
        }
    }

    @ParameterizedTest
    @ValueSource(strings = {"PT0S", "PT-1S", "P3651D", "PT2562047788015H12M"})
    void renew_and_release_after_refuse_a_time_that_the_server_does_not_take(Duration lease) throws Exception {
        Hold hold = acquired(client.lock("k"));
        assertThatThrownBy(() -> hold.renew(lease)).isInstanceOf(IllegalArgumentException.class).hasMessageContaining("3,650 days");
        assertThatThrownBy(() -> hold.releaseAfter(lease)).isInstanceOf(IllegalArgumentException.class).hasMessageContaining("3,650 days");
        assertThat(server.read(RENEW)).isEmpty();
        assertThat(hold.isHeld()).isTrue();
        release(hold);
    }

    @ParameterizedTest
    @ValueSource(strings = {"PT0S", "PT-1S", "P3651D", "PT2562047788015H12M"})
    void builder_refuses_a_timeout_that_is_not_positive_or_too_long(Duration timeout) {
        assertThatThrownBy(() -> Holdfast.builder(server).timeout(timeout)).isInstanceOf(IllegalArgumentException.class)
            .hasMessage("timeout must be between 1 ms and 3,650 days, got " + timeout);
    }

    @Test
    void times_are_rounded_up_to_whole_milliseconds() {
        assertThat(Rules.ms(-1)).isEqualTo(1);
        assertThat(Rules.ms(0)).isEqualTo(1);
        assertThat(Rules.ms(Rules.MS)).isEqualTo(1);
        assertThat(Rules.ms(Rules.MS + 1)).isEqualTo(2);
        assertThat(Rules.ms(Long.MAX_VALUE)).isEqualTo(9_223_372_036_855L);
    }

    @Test
    void call_fails_when_its_step_throws() {
        CompletableFuture<Void> call = client.call(future -> {
            throw new ArithmeticException("a fault");
        }, AssertionError::new);
        assertThatThrownBy(call::join).hasRootCauseInstanceOf(ArithmeticException.class);
    }

    @Test
    void shorter_lease_counts_from_its_request_even_if_the_reply_is_lost() throws Exception {
        Hold hold = acquired(plain(10_000));
        server.always(RENEW, SILENCE);
        Call renewed = Call.start(() -> hold.renew(Duration.ofMillis(400)));
        while (server.read(RENEW).isEmpty()) {
            Thread.onSpinWait();
        }
        assertThat(hold.remaining()).isLessThanOrEqualTo(Duration.ofMillis(396));
        assertThatThrownBy(() -> finish(renewed)).isInstanceOf(LockLostException.class);
    }

    @Test
    void hold_is_renewed_at_once_when_only_the_wall_clock_says_that_its_time_is_over() throws Exception {
        Hold hold = acquired(lease(10_000));
        clock.suspended = 60_000;
        assertThat(hold.isHeld()).isFalse();
        assertThat(server.read(RENEW)).hasSize(1);
        assertThat(hold.isHeld()).isTrue();
        release(hold);
    }

    @Test
    void lock_without_renewal_is_not_renewed_when_only_the_wall_clock_says_that_its_time_is_over() throws Exception {
        Hold hold = acquired(plain(10_000));
        clock.suspended = 60_000;
        assertThat(hold.isHeld()).isFalse();
        assertThat(server.read(RENEW)).isEmpty();
        assertThat(hold.lossReason()).isNull();
        clock.until(() -> hold.lossReason() == LossReason.EXPIRED);
    }

    @Test
    void re_entry_that_renews_ends_with_the_callers_time() throws Exception {
        server.always(RENEW, SILENCE);
        Call call = Call.start(() -> {
            FencedLock lock = client.fencedLock("k");
            lock.lock(1, TimeUnit.DAYS);
            try {
                assertThat(lock.tryLock(1, 100_000, TimeUnit.SECONDS)).isFalse();
                assertThat(lock.tryLock(1, TimeUnit.SECONDS)).isFalse();
            } catch (InterruptedException why) {
                throw new AssertionError(why);
            }
        });
        finish(call);
        assertThat(server.read(RENEW)).isNotEmpty();
        assertThat(server.read(ACQUIRE)).hasSize(1);
        assertThat(client.acquisitions).isNotEmpty().noneMatch(it -> it.renews.get());
    }

    @Test
    void re_entry_that_renews_ends_when_the_thread_is_interrupted() throws Exception {
        server.always(RENEW, SILENCE);
        Call call = Call.start(() -> {
            FencedLock lock = client.fencedLock("k");
            lock.lock(2, TimeUnit.SECONDS);
            assertThatThrownBy(lock::lockInterruptibly).isInstanceOf(InterruptedException.class);
            assertThat(client.acquisitions).noneMatch(it -> it.renews.get());
            lock.unlock();
        });
        while (server.read(RENEW).isEmpty()) {
            Thread.onSpinWait();
        }
        call.thread.interrupt();
        Holdfast.result(call.done);
        assertThat(server.read(ACQUIRE)).hasSize(1);
    }

    @Test
    void re_entry_succeeds_when_only_the_wall_clock_says_that_the_lease_is_over() {
        FencedLock lock = client.fencedLock("k");
        lock.lock();
        clock.suspended = 60_000;
        lock.lock();
        clock.suspended = 120_000;
        lock.unlock();
        assertThat(server.read(ACQUIRE)).hasSize(1);
        assertThat(server.read(RELEASE)).isEmpty();
        lock.unlock();
        assertThat(server.read(RELEASE)).hasSize(1);
    }

    // ---- Releasing ----

    @Test
    void release_names_the_token_and_ends_the_renewals() throws Exception {
        Hold hold = acquired(lease(1600));
        eventually(RENEW, 1);
        release(hold);
        int renewals = server.read(RENEW).size();
        assertThat(server.read(RELEASE).get(0).words()).containsSequence("TOKEN", "1000").doesNotContain("ALL");
        clock.advance(10_000);
        assertThat(server.read(RENEW)).hasSize(renewals);
        assertThatThrownBy(() -> release(hold)).isInstanceOf(IllegalStateException.class);
        hold.close();
    }

    @Test
    void nil_to_the_first_release_is_a_loss() throws Exception {
        Hold hold = acquired(client.lock("k"));
        server.next(RELEASE, NIL);
        assertThatThrownBy(() -> release(hold)).isInstanceOf(LockLostException.class);
    }

    @ParameterizedTest
    @ValueSource(strings = {NIL, "-WRONGTYPE x\r\n"})
    void repeated_release_treats_an_overwritten_key_as_nil(String answer) throws Exception {
        Hold hold = acquired(client.lock("k"));
        server.next(RELEASE, CUT, answer);
        release(hold);
        assertThat(hold.lossReason()).isNull();
    }

    @ParameterizedTest
    @ValueSource(strings = {CUT, SILENCE})
    void repeated_release_succeeds_on_nil_if_the_hold_was_certain(String first) throws Exception {
        Hold hold = acquired(client.lock("k"));
        server.next(RELEASE, first, NIL, NIL);
        release(hold);
        List<FakeServer.Command> sent = server.read(RELEASE);
        assertThat(sent).hasSize(3);
        assertThat(sent.subList(0, 2)).allMatch(command -> command.has("TOKEN"));
        assertThat(sent.get(2).has("ALL")).isTrue(); // for a stale ACQUIRE (B18)
    }

    @Test
    void release_does_not_count_as_an_attempt_when_never_written() throws Exception {
        Hold hold = acquired(client.lock("k"));
        server.door = FakeServer.Door.REFUSES;
        server.cutAll();
        server.next(RELEASE, NIL);
        CompletableFuture<Void> released = hold.releaseAsync();
        clock.until(() -> server.attempts.size() > 3);
        server.door = FakeServer.Door.OPEN;
        assertThatThrownBy(() -> get(released)).isInstanceOf(LockLostException.class);
    }

    @ParameterizedTest
    @ValueSource(strings = {"-LOADING x\r\n", "-MISCONF x\r\n"})
    void release_is_repeated_on_a_passing_error(String error) throws Exception {
        Hold hold = acquired(client.lock("k"));
        server.next(RELEASE, error);
        release(hold);
        assertThat(server.read(RELEASE)).hasSize(2);
    }

    @Test
    void fatal_error_to_a_release_is_reported() throws Exception {
        Hold hold = acquired(client.lock("k"));
        server.next(RELEASE, "-NOPERM x\r\n");
        assertThatThrownBy(() -> release(hold)).isInstanceOf(HoldfastException.class).hasMessageContaining("NOPERM");
    }

    @Test
    void release_without_a_reply_ends_in_time_and_continues_in_the_background() throws Exception {
        Hold hold = acquired(client.lock("k"));
        server.always(RELEASE, SILENCE);
        assertThatThrownBy(() -> release(hold)).isInstanceOf(UnavailableException.class);
        server.always(RELEASE, ":1\r\n");
        int before = server.read(RELEASE).size();
        eventually(RELEASE, before + 1);
    }

    @Test
    void late_reply_to_a_renewal_is_ignored_after_a_release() throws Exception {
        Hold hold = acquired(lease(2000));
        server.always(RENEW, SILENCE);
        FakeServer.Command renewal = eventually(RENEW, 1).get(0);
        release(hold);
        server.answer(renewal.connection(), NIL);
        assertThat(hold.lossReason()).isNull();
    }

    @Test
    void release_after_raises_the_token_and_stops_the_renewal() throws Exception {
        Hold hold = acquired(client.lock("k"));
        hold.releaseAfter(Duration.ofSeconds(60));
        assertThat(server.read(RENEW).get(0).words()).containsSequence("TOKEN", "1000", "FENCE", "1001", "LEASE", "60000");
        assertThat(server.read(RELEASE)).isEmpty();
    }

    @Test
    void release_after_reports_a_loss_when_its_repetition_is_nil() throws Exception {
        Hold hold = acquired(plain(3_600_000));
        server.next(RENEW, CUT, NIL);
        Call released = Call.start(() -> hold.releaseAfter(Duration.ofSeconds(60)));
        assertThatThrownBy(() -> finish(released)).isInstanceOf(LockLostException.class);
    }

    @Test
    void release_after_unbinds_an_ephemeral_lock_from_its_connection() throws Exception {
        Hold hold = acquired(client.lock(LockSpec.builder("e").ephemeral(true).build()));
        hold.releaseAfter(Duration.ofSeconds(60));
        assertThat(server.read(RENEW).get(0).words()).containsSequence("LEASE", "60000", "UNBIND");
    }

    @ParameterizedTest
    @CsvSource({"true,true", "true,false", "false,true"})
    void release_after_renews_each_of_several_names_and_any_nil_is_a_loss(boolean first, boolean second) throws Exception {
        server.always("LOCK.MRELEASE", "*2\r\n:1\r\n:1\r\n").next(RENEW, first ? ":1001\r\n" : NIL, second ? ":1001\r\n" : NIL);
        Hold hold = ofNames(2);
        Call released = Call.start(() -> hold.releaseAfter(Duration.ofSeconds(60)));
        if (first && second) {
            finish(released);
        } else {
            assertThatThrownBy(() -> finish(released)).isInstanceOf(LockLostException.class);
        }
        List<FakeServer.Command> kept = server.read(RENEW);
        assertThat(kept).extracting(it -> it.words().subList(1, 9)).containsExactly(
            List.of("a", hold.owner(), "TOKEN", "1000", "FENCE", "1001", "LEASE", "60000"), List.of("b", hold.owner(), "TOKEN", "1000", "FENCE", "1001", "LEASE", "60000"));
        assertThat(kept.get(0).connection()).isEqualTo(kept.get(1).connection());
        assertThat(server.read("LOCK.MRENEW")).isEmpty();
    }

    @Test
    void release_after_repeats_only_the_names_that_were_not_answered() throws Exception {
        server.next(RENEW, ":1001\r\n", CUT);
        Hold hold = ofNames(2);
        server.always(RENEW, ":1001\r\n");
        finish(Call.start(() -> hold.releaseAfter(Duration.ofSeconds(60))));
        assertThat(server.read(RENEW)).extracting(it -> it.words().get(1)).containsExactly("a", "b", "b");
    }

    @Test
    void renewal_because_of_the_wall_clock_is_repeated_after_a_pause() throws Exception {
        Hold hold = acquired(client.lock("k"));
        server.always(RENEW, "-LOADING x\r\n");
        clock.suspended = 60_000;
        for (int i = 0; i < 400; i++) {
            assertThat(hold.isHeld()).isFalse();
            clock.advance(1);
        }
        assertThat(server.read(RENEW)).hasSizeBetween(2, 12);
        server.always(RENEW, ":1000\r\n");
        clock.until(hold::isHeld);
    }

    // ---- Several keys, options ----

    private Hold ofNames(int names) throws InterruptedException {
        String[] all = names == 1 ? new String[] {"k"} : new String[] {"a", "b"};
        return acquired(client.lock(LockSpec.builder(all).lease(Duration.ofSeconds(8)).build()));
    }

    private static void isRepeatedElsewhere(List<FakeServer.Command> commands) {
        List<FakeServer.Command> byToken = commands.stream().filter(it -> it.has("TOKEN")).toList();
        assertThat(byToken).hasSize(2);
        assertThat(byToken.get(1).connection()).isNotEqualTo(byToken.get(0).connection());
    }

    @ParameterizedTest
    @CsvSource({"1,+OK|", "1,:5|", "1,*1|:1000|", "2,:1000|", "2,*1|:1000|", "2,*2|:1000|:5|", "2,*3|:1000|:1000|:1000|"})
    void renewal_is_repeated_over_another_connection_when_reply_is_neither_token_nor_nil_for_each_name(int names, String reply) throws Exception {
        String renew = names == 1 ? RENEW : "LOCK.MRENEW";
        server.next(renew, reply.replace("|", "\r\n")).always("LOCK.MRENEW", "*2\r\n:1000\r\n:1000\r\n").always("LOCK.MRELEASE", "*2\r\n:1\r\n:1\r\n");
        Hold hold = ofNames(names);
        isRepeatedElsewhere(eventually(renew, 2));
        assertThat(hold.isHeld()).isTrue();
    }

    @ParameterizedTest
    @CsvSource({"1,+OK|", "1,*1|:1|", "2,:1|", "2,*1|:1|", "2,*2|:1|+OK|", "2,*3|:1|:1|:1|"})
    void release_is_repeated_over_another_connection_when_reply_is_neither_number_nor_nil_for_each_name(int names, String reply) throws Exception {
        String release = names == 1 ? RELEASE : "LOCK.MRELEASE";
        server.next(release, reply.replace("|", "\r\n")).always("LOCK.MRELEASE", "*2\r\n:1\r\n:1\r\n");
        release(ofNames(names));
        isRepeatedElsewhere(server.read(release));
    }

    @Test
    void several_names_are_one_request_and_any_nil_is_a_loss() throws Exception {
        server.always("LOCK.MRENEW", "*2\r\n:1000\r\n$-1\r\n").always("LOCK.MRELEASE", "*2\r\n:1\r\n:1\r\n");
        Hold hold = acquired(client.lock(LockSpec.builder("a", "b").lease(Duration.ofMillis(1600)).build()));
        assertThat(server.read("LOCK.MACQUIRE").get(0).words()).containsSequence("LOCK.MACQUIRE", "2", "a", "b");
        clock.until(() -> hold.lossReason() == LossReason.GONE);
        // The server may still hold the other name.
        assertThat(eventually("LOCK.MRELEASE", 1).get(0).words()).containsSequence("TOKEN", "1000");
    }

    @Test
    void limit_shared_and_replicas_are_sent() throws Exception {
        acquired(client.semaphore("s", 3));
        acquired(client.lock(LockSpec.builder("r").shared().build()));
        acquired(client.lock(LockSpec.builder("q").replicas(2).lease(Duration.ofMillis(1600)).build()));
        List<FakeServer.Command> asked = server.read(ACQUIRE);
        assertThat(asked.get(0).words()).containsSequence("LIMIT", "3");
        assertThat(asked.get(1).words()).contains("SHARED");
        assertThat(asked.get(2).words()).containsSequence("REPLICAS", "2");
        assertThat(eventually(RENEW, 1).get(0).words()).containsSequence("REPLICAS", "2");
    }

    @Test
    void ephemeral_hold_keeps_its_connection_and_is_lost_with_it() throws Exception {
        Hold hold = acquired(client.lock(LockSpec.builder("e").ephemeral(true).lease(Duration.ofMillis(1600)).build()));
        FakeServer.Command asked = server.read(ACQUIRE).get(0);
        assertThat(asked.has("EPHEMERAL")).isTrue();
        release(acquired(client.lock("other")));
        assertThat(server.read(ACQUIRE).get(1).connection()).isNotEqualTo(asked.connection());
        assertThat(eventually(RENEW, 1).get(0).connection()).isEqualTo(asked.connection());
        server.cut(asked.connection());
        clock.until(() -> hold.lossReason() == LossReason.DISCONNECTED);
    }

    @Test
    void ephemeral_hold_is_renewed_every_two_seconds_when_a_quarter_of_its_lease_is_longer() throws Exception {
        Hold hold = acquired(client.lock(LockSpec.builder("e").ephemeral(true).lease(Duration.ofHours(1)).build()));
        long began = server.read(ACQUIRE).get(0).at();
        List<FakeServer.Command> renewed = eventually(RENEW, 2);
        assertThat(renewed).extracting(it -> it.at() - began).containsExactly(2000L, 4000L);
        release(hold);
    }

    @Test
    void ephemeral_hold_keeps_the_connection_of_its_newest_request() throws Exception {
        server.next(ACQUIRE, SILENCE, SILENCE);
        CompletableFuture<Hold> pending = client.lock(LockSpec.builder("e").ephemeral(true).build()).acquireAsync(WAIT);
        List<FakeServer.Command> asked = eventually(ACQUIRE, 2);
        // The server grants the lock to the second request again, and binds the hold to that request's connection.
        server.answer(asked.get(0).connection(), granted(1000, 0));
        server.answer(asked.get(1).connection(), granted(1000, 0));
        Hold hold = get(pending);
        assertThat(eventually(RENEW, 1).get(0).connection()).isEqualTo(asked.get(1).connection());
        server.cut(asked.get(1).connection());
        clock.until(() -> hold.lossReason() == LossReason.DISCONNECTED);
    }

    @Test
    void close_closes_the_connection_of_an_ephemeral_hold_when_the_server_is_silent() throws Exception {
        server.always(RELEASE, SILENCE);
        acquired(client.lock(LockSpec.builder("e").ephemeral(true).build()));
        client.close();
        assertThat(server.open()).isEmpty();
    }

    // ---- Waits in the client, and the pool ----

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
        while (forcing.thread.getState() != Thread.State.WAITING) {
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
            call.thread.join();
            call.done.join();
            ended[i] = call.thread.getId();
        }
        FencedLock lock = client.fencedLock("k");
        for (int i = 0; i < 1000; i++) {
            Call call = Call.start(() -> lock.lock(10, TimeUnit.MILLISECONDS));
            call.thread.join();
            call.done.join();
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
