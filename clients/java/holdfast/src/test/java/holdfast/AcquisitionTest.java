package holdfast;

import static holdfast.FakeServer.CUT;
import static holdfast.FakeServer.NIL;
import static holdfast.FakeServer.SILENCE;
import static holdfast.FakeServer.granted;
import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentLinkedDeque;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/** The cells of the table of states and inputs in {@code docs/client-protocol.md}: one acquisition. */
class AcquisitionTest extends ScriptedFixture {
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
        call.thread().interrupt();
        Holdfast.result(call.done());
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
}
