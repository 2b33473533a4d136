package holdfast.server;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;
import static org.awaitility.Awaitility.await;

import holdfast.DeadlockException;
import holdfast.FencedLock;
import holdfast.FencedReadWriteLock;
import holdfast.Holdfast;
import holdfast.LockLostException;
import holdfast.LockSpec;
import holdfast.spi.RedisConnector;
import holdfast.testing.RedisServer;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.locks.Lock;
import org.assertj.core.api.ThrowableAssert.ThrowingCallable;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestInfo;
import org.junit.jupiter.api.Timeout;

/** The contract of {@link Lock}, and what Redisson documents for {@code RLock}. */
@Timeout(600)
class FencedLockTest {
    private static RedisServer server;
    private static Clients.Opened one;
    private static Clients.Opened two;
    private String name;
    private FencedLock lock;
    private FencedLock elsewhere;

    @BeforeAll
    static void start() throws Exception {
        server = RedisServer.withModule();
        one = Clients.LETTUCE.warm(server.port);
        two = Clients.JEDIS.warm(server.port);
    }

    @AfterAll
    static void stop() throws Exception {
        if (server != null) {
            one.close();
            two.close();
            server.close();
        }
    }

    @BeforeEach
    void name(TestInfo test) {
        name = test.getTestMethod().orElseThrow().getName();
        lock = one.client().fencedLock(name);
        elsewhere = two.client().fencedLock(name);
    }

    private static <T> T inThread(Callable<T> task) throws Exception {
        CompletableFuture<T> result = new CompletableFuture<>();
        Runnable run = () -> {
            try {
                result.complete(task.call());
            } catch (Throwable why) {
                result.completeExceptionally(why);
            }
        };
        if (Runtime.version().feature() < 21) {
            new Thread(run).start();
        } else {
            VirtualThreadsTest.startVirtual(run);
        }
        return result.get(100, TimeUnit.SECONDS);
    }

    private static boolean isTrueInThread(Callable<Boolean> task) throws Exception {
        return inThread(task);
    }

    @Test
    void lock_excludes_other_threads_and_other_clients() throws Exception {
        lock.lock();
        assertThat(isTrueInThread(lock::tryLock)).isFalse();
        assertThat(elsewhere.tryLock()).isFalse();
        assertThat(elsewhere.tryLock(50, TimeUnit.MILLISECONDS)).isFalse();
        assertThat(elsewhere.isLocked()).isTrue();
        assertThat(elsewhere.isHeldByCurrentThread()).isFalse();
        lock.unlock();
        assertThat(elsewhere.tryLock()).isTrue();
        elsewhere.unlock();
        assertThat(lock.isLocked()).isFalse();
    }

    @Test
    void lock_is_re_entrant_across_its_objects() throws Exception {
        lock.lock();
        long fence = lock.getFence();
        FencedLock same = one.client().fencedLock(name);
        same.lock();
        assertThat(same.tryLock()).isTrue();
        assertThat(same.tryLock(1, TimeUnit.SECONDS)).isTrue();
        assertThat(lock.getHoldCount()).isEqualTo(4);
        assertThat(lock.getLockCount()).isEqualTo(4);
        assertThat(lock.getFence()).isEqualTo(fence);
        for (int i = 0; i < 3; i++) {
            lock.unlock();
            assertThat(elsewhere.tryLock()).isFalse();
        }
        same.unlock();
        assertThat(lock.getHoldCount()).isZero();
        assertThatThrownBy(lock::unlock).isInstanceOf(IllegalMonitorStateException.class);
        assertThat(server.exists(name)).isFalse();
    }

    @Test
    void unlock_is_refused_when_the_thread_does_not_hold_the_lock() throws Exception {
        assertThatThrownBy(lock::unlock).isInstanceOf(IllegalMonitorStateException.class);
        lock.lock();
        int holds = inThread(() -> {
            assertThatThrownBy(lock::unlock).isInstanceOf(IllegalMonitorStateException.class);
            assertThatThrownBy(elsewhere::unlock).isInstanceOf(IllegalMonitorStateException.class);
            assertThatThrownBy(lock::getFence).isInstanceOf(IllegalMonitorStateException.class);
            return lock.getHoldCount();
        });
        assertThat(holds).isZero();
        assertThat(lock.isHeldByCurrentThread()).isTrue();
        lock.unlock();
    }

    @Test
    void wait_ends_when_the_thread_is_interrupted_during_or_before_it() throws Exception {
        lock.lock();
        for (int kind = 0; kind < 3; kind++) {
            int which = kind;
            CompletableFuture<Boolean> interrupted = new CompletableFuture<>();
            Thread thread = new Thread(() -> {
                try {
                    switch (which) {
                        case 0 -> elsewhere.lockInterruptibly();
                        case 1 -> elsewhere.tryLock(30, TimeUnit.SECONDS);
                        default -> elsewhere.lockInterruptibly(5, TimeUnit.SECONDS);
                    }
                    interrupted.complete(false);
                } catch (InterruptedException why) {
                    interrupted.complete(!Thread.currentThread().isInterrupted());
                }
            });
            thread.start();
            await().until(() -> one.client().waiters(name).size() == 1);
            thread.interrupt();
            assertThat(interrupted.get()).isTrue();
            await().until(() -> one.client().waiters(name).isEmpty());
        }
        lock.unlock();
        boolean kept = inThread(() -> {
            Thread.currentThread().interrupt();
            assertThatThrownBy(lock::lockInterruptibly).isInstanceOf(InterruptedException.class);
            Thread.currentThread().interrupt();
            assertThatThrownBy(() -> lock.tryLock(1, TimeUnit.SECONDS)).isInstanceOf(InterruptedException.class);
            assertThat(Thread.currentThread().isInterrupted()).isFalse();
            Thread.currentThread().interrupt();
            boolean tried = lock.tryLock();
            lock.unlock();
            return tried && Thread.currentThread().isInterrupted();
        });
        assertThat(kept).isTrue();
    }

    @Test
    void lock_keeps_waiting_when_interrupted_and_keeps_the_status() throws Exception {
        lock.lock();
        CompletableFuture<Boolean> status = new CompletableFuture<>();
        Thread thread = new Thread(() -> {
            elsewhere.lock();
            elsewhere.unlock();
            status.complete(Thread.currentThread().isInterrupted());
        });
        thread.start();
        await().until(() -> one.client().waiters(name).size() == 1);
        thread.interrupt();
        assertThat(one.client().waiters(name)).hasSize(1);
        assertThat(status).isNotDone();
        lock.unlock();
        assertThat(status.get(60, TimeUnit.SECONDS)).isTrue();
    }

    @Test
    void timed_try_waits_and_returns_false_when_its_time_is_over() throws Exception {
        lock.lock();
        long began = System.nanoTime();
        assertThat(elsewhere.tryLock(300, TimeUnit.MILLISECONDS)).isFalse();
        assertThat(System.nanoTime() - began).isGreaterThanOrEqualTo(290_000_000L);
        assertThat(elsewhere.tryLock(0, TimeUnit.SECONDS)).isFalse();
        assertThat(elsewhere.tryLock(-5, TimeUnit.SECONDS)).isFalse();
        CompletableFuture<Boolean> later = new CompletableFuture<>();
        new Thread(() -> {
            try {
                boolean granted = elsewhere.tryLock(60, TimeUnit.SECONDS);
                elsewhere.unlock();
                later.complete(granted);
            } catch (Throwable why) {
                later.completeExceptionally(why);
            }
        }).start();
        await().until(() -> one.client().waiters(name).size() == 1);
        lock.unlock();
        assertThat(later.get(60, TimeUnit.SECONDS)).isTrue();
    }

    @Test
    void timed_try_throws_at_once_when_the_thread_is_interrupted() throws Exception {
        boolean entered = inThread(() -> {
            lock.lock();
            for (long wait : new long[] {0, -1, 1, Long.MAX_VALUE}) {
                for (FencedLock each : new FencedLock[] {lock, elsewhere}) {
                    Thread.currentThread().interrupt();
                    assertThatThrownBy(() -> each.tryLock(wait, TimeUnit.DAYS)).isInstanceOf(InterruptedException.class);
                    Thread.currentThread().interrupt();
                    assertThatThrownBy(() -> each.tryLock(wait, 60, TimeUnit.SECONDS)).isInstanceOf(InterruptedException.class);
                    assertThat(Thread.currentThread().isInterrupted()).isFalse();
                }
            }
            int count = lock.getHoldCount();
            lock.unlock();
            return count == 1;
        });
        assertThat(entered).isTrue();
        assertThat(server.exists(name)).isFalse();
    }

    @Test
    void lock_keeps_the_interrupt_status_when_the_thread_is_interrupted() throws Exception {
        boolean kept = inThread(() -> {
            Thread.currentThread().interrupt();
            lock.lock();
            lock.lock(60, TimeUnit.SECONDS);
            boolean still = Thread.currentThread().isInterrupted() && lock.tryLock() && lock.getHoldCount() == 3;
            for (int i = 0; i < 3; i++) {
                lock.unlock();
            }
            return still && Thread.currentThread().isInterrupted();
        });
        assertThat(kept).isTrue();
        assertThat(server.exists(name)).isFalse();
    }

    @Test
    void timed_tries_that_close_a_cycle_return_false_or_succeed_when_the_other_gives_up() throws Exception {
        FencedLock first = one.client().fencedLock(name + "-1");
        FencedLock second = one.client().fencedLock(name + "-2");
        for (boolean longFirst : new boolean[] {true, false}) {
            CompletableFuture<Void> bothHeld = new CompletableFuture<>();
            CompletableFuture<Void> firstWaits = new CompletableFuture<>();
            CompletableFuture<Boolean> longTry = new CompletableFuture<>();
            CompletableFuture<Boolean> shortTry = new CompletableFuture<>();
            crossing(first, second, 60_000, bothHeld, longFirst ? null : firstWaits, longTry);
            await().until(first::isLocked);
            crossing(second, first, 300, bothHeld, longFirst ? firstWaits : null, shortTry);
            await().until(second::isLocked);
            bothHeld.complete(null);
            await().until(() -> longFirst ? !one.client().waiters(second.getName()).isEmpty() : shortTry.isDone() || !one.client().waiters(first.getName()).isEmpty());
            firstWaits.complete(null);
            assertThat(shortTry.get(60, TimeUnit.SECONDS)).isFalse();
            assertThat(longTry.get(60, TimeUnit.SECONDS)).isTrue();
        }
    }

    /** A thread locks one lock and tries the other. */
    private static void crossing(FencedLock mine, FencedLock other, long ms, CompletableFuture<Void> begin, CompletableFuture<Void> turn, CompletableFuture<Boolean> result) {
        new Thread(() -> {
            try {
                boolean locked;
                mine.lock();
                try {
                    begin.get();
                    if (turn != null) {
                        turn.get();
                    }
                    locked = other.tryLock(ms, TimeUnit.MILLISECONDS);
                    if (locked) {
                        other.unlock();
                    }
                } finally {
                    mine.unlock();
                }
                result.complete(locked);
            } catch (Throwable why) {
                result.completeExceptionally(why);
            }
        }).start();
    }

    @Test
    void try_with_the_longest_time_waits() throws Exception {
        lock.lock();
        CompletableFuture<Boolean> waiting = new CompletableFuture<>();
        new Thread(() -> {
            try {
                boolean granted = elsewhere.tryLock(Long.MAX_VALUE, TimeUnit.DAYS);
                elsewhere.unlock();
                waiting.complete(granted);
            } catch (Throwable why) {
                waiting.completeExceptionally(why);
            }
        }).start();
        await().until(() -> waiting.isDone() || one.client().waiters(name).size() == 1);
        lock.unlock();
        assertThat(waiting.get(60, TimeUnit.SECONDS)).isTrue();
    }

    @Test
    void timed_try_with_a_lease_leaves_nothing_at_the_server_when_interrupted() throws Exception {
        lock.lock();
        CompletableFuture<Throwable> ended = new CompletableFuture<>();
        Thread thread = new Thread(() -> {
            try {
                elsewhere.tryLock(60, 60, TimeUnit.SECONDS);
                ended.complete(null);
            } catch (Throwable why) {
                ended.complete(why);
            }
        });
        thread.start();
        await().until(() -> one.client().waiters(name).size() == 1);
        thread.interrupt();
        assertThat(ended.get(60, TimeUnit.SECONDS)).isInstanceOf(InterruptedException.class);
        await().until(() -> one.client().waiters(name).isEmpty());
        lock.unlock();
        assertThat(elsewhere.isLocked()).isFalse();
        assertThat(elsewhere.remainTimeToLive()).isEqualTo(-2);
    }

    @Test
    void try_of_a_free_lock_succeeds_however_short_its_time() throws Exception {
        assertThat(lock.tryLock(1, TimeUnit.NANOSECONDS)).isTrue();
        lock.unlock();
    }

    @Test
    void unlock_is_refused_after_the_client_was_closed() throws Exception {
        FencedLock closed;
        try (Clients.Opened third = Clients.JEDIS.warm(server.port)) {
            closed = third.client().fencedLock(name);
            closed.lock();
        }
        assertThat(lock.isLocked()).isFalse();
        assertThatThrownBy(closed::unlock).isInstanceOf(IllegalMonitorStateException.class);
    }

    @Test
    void lease_is_refused_when_the_server_would_not_take_it() {
        lock.lock();
        assertThatThrownBy(() -> lock.renew(Long.MAX_VALUE, TimeUnit.SECONDS)).isInstanceOf(IllegalArgumentException.class);
        lock.unlock();
        assertThatThrownBy(() -> lock.lock(Long.MAX_VALUE, TimeUnit.DAYS)).isInstanceOf(IllegalArgumentException.class).hasMessageContaining("3,650 days");
        assertThatThrownBy(() -> lock.tryLock(1, null)).isInstanceOf(NullPointerException.class);
        assertThat(lock.isLocked()).isFalse();
    }

    @Test
    void null_arguments_are_refused_by_their_names() {
        Holdfast client = one.client();
        Map<ThrowingCallable, String> calls = new HashMap<>();
        calls.put(() -> client.fencedLock((String) null), "name");
        calls.put(() -> client.lockAll(name, null), "name");
        calls.put(() -> client.lock((LockSpec) null), "spec");
        calls.put(() -> client.info(null), "name");
        calls.put(() -> client.force(null), "name");
        calls.put(() -> client.observe(name, null), "onChange");
        calls.put(() -> client.elect(name, "value", null, why -> { }), "onElected");
        calls.put(() -> lock.lock(-1, null), "unit");
        calls.put(() -> lock.tryLock(1, 1, null), "unit");
        calls.put(() -> Holdfast.builder((RedisConnector) null), "connector");
        calls.forEach((call, argument) -> assertThatThrownBy(call).isInstanceOf(NullPointerException.class).hasMessageContaining(argument));
        assertThat(lock.isLocked()).isFalse();
    }

    @Test
    void conditions_are_not_supported() {
        assertThatThrownBy(lock::newCondition).isInstanceOf(UnsupportedOperationException.class);
    }

    // ---- The documentation of RLock ----

    @Test
    void lock_is_released_when_its_lease_ends() throws Exception {
        lock.lock(2000, TimeUnit.MILLISECONDS);
        assertThat(lock.remainTimeToLive()).isLessThanOrEqualTo(2000);
        assertThat(elsewhere.tryLock(60, TimeUnit.SECONDS)).isTrue();
        assertThat(lock.isHeldByCurrentThread()).isFalse();
        assertThat(lock.getHoldCount()).isZero();
        assertThatThrownBy(lock::unlock).isInstanceOf(IllegalMonitorStateException.class).hasCauseInstanceOf(LockLostException.class);
        assertThatThrownBy(lock::unlock).isInstanceOf(IllegalMonitorStateException.class).hasNoCause();
        elsewhere.unlock();
        // The thread that lost the lock can acquire it again.
        lock.lock();
        assertThat(lock.getHoldCount()).isEqualTo(1);
        lock.unlock();
    }

    @Test
    void lock_waits_when_the_thread_has_lost_the_lock() throws Exception {
        lock.lock(1500, TimeUnit.MILLISECONDS);
        // For the server, the lease does not end.
        server.call("PERSIST", name);
        long me = Thread.currentThread().getId();
        await().until(() -> !lock.isHeldByThread(me));
        CompletableFuture<Boolean> freed = new CompletableFuture<>();
        new Thread(() -> {
            await().until(() -> one.client().waiters(name).size() == 1);
            freed.complete(elsewhere.forceUnlock());
        }).start();
        assertThat(lock.tryLock(100, TimeUnit.SECONDS)).isTrue();
        assertThat(freed.get()).isTrue();
        assertThat(lock.getHoldCount()).isEqualTo(1);
        lock.unlock();
    }

    @Test
    void try_lock_takes_a_wait_and_a_lease() throws Exception {
        assertThat(lock.tryLock(60_000, 40_000, TimeUnit.MILLISECONDS)).isTrue();
        assertThat(lock.remainTimeToLive()).isBetween(10_000L, 40_000L);
        assertThat(elsewhere.tryLock(20, 300, TimeUnit.MILLISECONDS)).isFalse();
        lock.unlock();
        assertThat(elsewhere.tryLock(60_000, -1, TimeUnit.MILLISECONDS)).isTrue();
        assertThat(elsewhere.remainTimeToLive()).isBetween(5000L, 10_000L);
        elsewhere.unlock();
    }

    @Test
    void lock_without_a_lease_is_renewed() throws Exception {
        FencedLock renewed = one.client().fencedLock(LockSpec.builder(name).lease(Duration.ofSeconds(8)).build());
        renewed.lock();
        server.awaitRenewal(name);
        assertThat(renewed.isHeldByCurrentThread()).isTrue();
        assertThat(renewed.remainTimeToLive()).isPositive();
        renewed.unlock();
    }

    @Test
    void re_entry_lengthens_but_never_shortens_the_lease() throws Exception {
        lock.lock(30, TimeUnit.SECONDS);
        lock.lock(1, TimeUnit.SECONDS);
        assertThat(lock.remainTimeToLive()).isGreaterThan(20_000);
        lock.lock(60, TimeUnit.SECONDS);
        assertThat(lock.remainTimeToLive()).isGreaterThan(50_000);
        lock.lock();
        assertThat(lock.remainTimeToLive()).isGreaterThan(20_000);
        for (int i = 0; i < 4; i++) {
            lock.unlock();
        }
        FencedLock shortLived = one.client().fencedLock(name + "-2");
        shortLived.lock(8, TimeUnit.SECONDS);
        shortLived.lock();
        server.awaitRenewal(name + "-2");
        assertThat(shortLived.isHeldByCurrentThread()).isTrue();
        shortLived.unlock();
        shortLived.unlock();
    }

    @Test
    void re_entry_does_not_renew_a_lock_without_renewal() throws Exception {
        FencedLock fixed = one.client().fencedLock(LockSpec.builder(name).lease(Duration.ofMillis(1500)).renew(false).build());
        fixed.lock();
        fixed.lock();
        await().until(() -> !server.exists(name));
        assertThatThrownBy(fixed::unlock).isInstanceOf(IllegalMonitorStateException.class);
    }

    @Test
    void renewal_restarts_the_locks_own_lease_and_reports_a_loss() throws Exception {
        FencedLock longer = one.client().fencedLock(LockSpec.builder(name).lease(Duration.ofSeconds(60)).build());
        assertThatThrownBy(() -> longer.renew(1, TimeUnit.SECONDS)).isInstanceOf(IllegalMonitorStateException.class);
        longer.lock();
        longer.renew(0, TimeUnit.SECONDS);
        assertThat(longer.remainTimeToLive()).isGreaterThan(20_000);
        elsewhere.forceUnlock();
        assertThatThrownBy(() -> longer.renew(1, TimeUnit.SECONDS)).isInstanceOf(IllegalMonitorStateException.class).hasCauseInstanceOf(LockLostException.class);
    }

    @Test
    void force_unlock_releases_the_lock_of_any_thread() throws Exception {
        assertThat(lock.forceUnlock()).isFalse();
        lock.lock();
        assertThat(isTrueInThread(elsewhere::forceUnlock)).isTrue();
        assertThat(lock.isLocked()).isFalse();
        assertThat(lock.isHeldByCurrentThread()).isFalse();
        assertThatThrownBy(lock::unlock).isInstanceOf(IllegalMonitorStateException.class);
        lock.lock();
        assertThat(lock.forceUnlock()).isTrue();
        assertThat(lock.isHeldByCurrentThread()).isFalse();
        assertThat(lock.getHoldCount()).isZero();
        assertThatThrownBy(lock::unlock).isInstanceOf(IllegalMonitorStateException.class);
        assertThat(elsewhere.tryLock()).isTrue();
        elsewhere.unlock();
    }

    @Test
    void is_held_by_thread_means_that_thread_of_this_client() throws Exception {
        lock.lock();
        long me = Thread.currentThread().getId();
        assertThat(lock.isHeldByThread(me)).isTrue();
        assertThat(lock.isHeldByThread(me + 1)).isFalse();
        assertThat(elsewhere.isHeldByThread(me)).isFalse();
        assertThat(isTrueInThread(() -> lock.isHeldByThread(me))).isTrue();
        assertThat(isTrueInThread(lock::isHeldByCurrentThread)).isFalse();
        assertThat(lock.isLockedByCurrentThread()).isTrue();
        lock.unlock();
        assertThat(lock.isHeldByThread(me)).isFalse();
    }

    @Test
    void remain_time_to_live_is_that_of_the_server() throws Exception {
        assertThat(lock.remainTimeToLive()).isEqualTo(-2);
        lock.lock(5, TimeUnit.SECONDS);
        assertThat(elsewhere.remainTimeToLive()).isBetween(1L, 5000L);
        server.call("PERSIST", name);
        assertThat(elsewhere.remainTimeToLive()).isEqualTo(-1);
        lock.unlock();
        assertThat(lock.remainTimeToLive()).isEqualTo(-2);
    }

    @Test
    void fences_grow() throws Exception {
        long first = lock.lockAndGetFence();
        assertThat(elsewhere.tryLockAndGetFence()).isZero();
        lock.unlock();
        long second = elsewhere.tryLockAndGetFence(60, TimeUnit.SECONDS);
        elsewhere.unlock();
        assertThat(second).isGreaterThan(first);
        assertThat(lock.getName()).isEqualTo(name);
        for (int i = 0; i < 50; i++) {
            // A lease that is over at once returns a fence, too.
            assertThat(lock.lockAndGetFence(1, TimeUnit.MILLISECONDS)).isGreaterThan(second);
        }
    }

    @Test
    void lock_count_includes_other_threads() throws Exception {
        lock.lock();
        lock.lock();
        assertThat(lock.getLockCount()).isEqualTo(2);
        assertThat(elsewhere.getLockCount()).isEqualTo(1);
        assertThat(inThread(lock::getLockCount)).isEqualTo(1);
        lock.unlock();
        lock.unlock();
        assertThat(elsewhere.getLockCount()).isZero();
    }

    // ---- Readers and a writer ----

    @Test
    void readers_share_and_a_writer_excludes() throws Exception {
        FencedReadWriteLock mine = one.client().readWriteLock(name);
        FencedReadWriteLock other = two.client().readWriteLock(name);
        mine.readLock().lock();
        mine.readLock().lock();
        assertThat(other.readLock().tryLock()).isTrue();
        other.readLock().unlock();
        assertThat(other.writeLock().tryLock()).isFalse();
        assertThat(mine.readLock().getHoldCount()).isEqualTo(2);
        assertThat(mine.writeLock().tryLock()).isFalse();
        assertThatThrownBy(mine.writeLock()::lock).isInstanceOf(DeadlockException.class);
        assertThat(mine.writeLock().tryLock(100, TimeUnit.MILLISECONDS)).isFalse();
        mine.readLock().unlock();
        mine.readLock().unlock();
        mine.writeLock().lock();
        assertThat(other.readLock().tryLock()).isFalse();
        assertThat(mine.readLock().isLocked()).isFalse();
        // The writer may take the read lock, and keep it.
        mine.readLock().lock();
        assertThat(mine.readLock().isLocked()).isTrue();
        mine.writeLock().unlock();
        assertThatThrownBy(mine.writeLock()::unlock).isInstanceOf(IllegalMonitorStateException.class);
        assertThat(mine.readLock().isHeldByCurrentThread()).isTrue();
        assertThat(other.writeLock().tryLock()).isFalse();
        assertThat(mine.writeLock().tryLock()).isTrue();
        mine.writeLock().unlock();
        mine.readLock().unlock();
        assertThat(other.writeLock().tryLock()).isTrue();
        other.writeLock().unlock();
        assertThat(server.exists(name)).isFalse();
    }

    @Test
    void threads_of_two_clients_never_overlap() throws Exception {
        int[] counter = {0};
        AtomicInteger inside = new AtomicInteger();
        Thread[] threads = new Thread[16];
        CompletableFuture<Throwable> failed = new CompletableFuture<>();
        for (int i = 0; i < threads.length; i++) {
            Holdfast client = i % 2 == 0 ? one.client() : two.client();
            threads[i] = new Thread(() -> {
                FencedLock mine = client.fencedLock(name);
                for (int j = 0; j < 50; j++) {
                    mine.lock();
                    try {
                        if (inside.incrementAndGet() != 1) {
                            failed.complete(new AssertionError("two threads hold the lock"));
                        }
                        counter[0]++;
                        inside.decrementAndGet();
                    } finally {
                        mine.unlock();
                    }
                }
            });
            threads[i].setUncaughtExceptionHandler((thread, why) -> failed.complete(why));
            threads[i].start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
        assertThat(failed.getNow(null)).isNull();
        assertThat(counter[0]).isEqualTo(800);
    }
}
