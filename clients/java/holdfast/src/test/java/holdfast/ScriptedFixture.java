package holdfast;

import java.time.Duration;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.SynchronousQueue;
import java.util.concurrent.ThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Timeout;

/** A client, a server that follows a script, and a clock that the test advances. */
@Timeout(value = 120, threadMode = Timeout.ThreadMode.SEPARATE_THREAD)
abstract class ScriptedFixture {
    static final Duration WAIT = Duration.ofSeconds(5);
    static final String ACQUIRE = "LOCK.ACQUIRE";
    static final String RENEW = "LOCK.RENEW";
    static final String RELEASE = "LOCK.RELEASE";

    final ManualClock clock = new ManualClock();
    final FakeServer server = new FakeServer(clock);
    Holdfast client = build(server, 32);

    /** Runs tasks immediately, in the calling thread. */
    static ExecutorService direct() {
        return direct(() -> false);
    }

    /** The same, but fails while no thread can be had. */
    static ExecutorService direct(BooleanSupplier isExhausted) {
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

    Holdfast build(FakeServer server, int connections) {
        return Holdfast.builder(server).timeout(Duration.ofSeconds(3)).maxConnections(connections).controlledBy(clock, direct()).build();
    }

    @AfterEach
    void close() throws InterruptedException {
        close(client);
    }

    void close(Holdfast client) throws InterruptedException {
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

    <T> T get(CompletableFuture<T> future) throws InterruptedException {
        return clock.get(future);
    }

    Hold acquired(NamedLock lock) throws InterruptedException {
        return get(lock.acquireAsync(WAIT));
    }

    void release(Hold hold) throws InterruptedException {
        get(hold.releaseAsync());
    }

    /** A call that blocks a thread. */
    record Call(Thread thread, CompletableFuture<Void> done) {
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
    void finish(Call call) throws InterruptedException {
        while (!call.done.isDone()) {
            if (call.thread.getState() == Thread.State.WAITING) {
                clock.advance(10);
            }
            Thread.onSpinWait();
        }
        Holdfast.result(call.done);
    }

    NamedLock lease(int ms) {
        return client.lock(LockSpec.builder("k").lease(Duration.ofMillis(ms)).build());
    }

    NamedLock plain(int ms) {
        return client.lock(LockSpec.builder("k").lease(Duration.ofMillis(ms)).renew(false).build());
    }

    List<FakeServer.Command> eventually(String name, int count) {
        clock.until(() -> server.read(name).size() >= count);
        return server.read(name);
    }

    FakeServer.Command withdrawal() {
        clock.until(() -> server.read(RELEASE).stream().anyMatch(it -> it.has("ALL")));
        return server.read(RELEASE).stream().filter(it -> it.has("ALL")).findFirst().orElseThrow();
    }
}
