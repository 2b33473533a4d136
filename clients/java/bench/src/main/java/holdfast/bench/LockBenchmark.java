package holdfast.bench;

import holdfast.Holdfast;
import io.lettuce.core.RedisClient;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.Lock;
import org.openjdk.jmh.annotations.Benchmark;
import org.openjdk.jmh.annotations.BenchmarkMode;
import org.openjdk.jmh.annotations.Fork;
import org.openjdk.jmh.annotations.Measurement;
import org.openjdk.jmh.annotations.Mode;
import org.openjdk.jmh.annotations.OutputTimeUnit;
import org.openjdk.jmh.annotations.Param;
import org.openjdk.jmh.annotations.Scope;
import org.openjdk.jmh.annotations.Setup;
import org.openjdk.jmh.annotations.State;
import org.openjdk.jmh.annotations.TearDown;
import org.openjdk.jmh.annotations.Threads;
import org.openjdk.jmh.annotations.Warmup;
import org.redisson.Redisson;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/** Locks and unlocks: a lock of each thread's own, and one that 16 threads share. The system property {@code redis} has the server's URL. */
@BenchmarkMode(Mode.AverageTime)
@OutputTimeUnit(TimeUnit.MICROSECONDS)
@Warmup(iterations = 3, time = 2)
@Measurement(iterations = 5, time = 3)
@Fork(1)
public class LockBenchmark {
    /** The locks of one of the clients. */
    @State(Scope.Benchmark)
    public static class Locks {
        @Param({"holdfast", "redisson", "redisson-fair"})
        public String client;

        Lock shared;
        private RedisClient lettuce;
        private Holdfast holdfast;
        private RedissonClient redisson;

        @Setup
        public void open() {
            String url = System.getProperty("redis", "redis://127.0.0.1:6379");
            if (client.equals("holdfast")) {
                lettuce = RedisClient.create(url);
                holdfast = Holdfast.create(lettuce);
            } else {
                Config config = new Config();
                config.useSingleServer().setAddress(url);
                redisson = Redisson.create(config);
            }
            shared = lock("bench:" + UUID.randomUUID());
        }

        Lock lock(String name) {
            return holdfast != null ? holdfast.fencedLock(name) : client.equals("redisson") ? redisson.getLock(name) : redisson.getFairLock(name);
        }

        @TearDown
        public void close() {
            if (holdfast != null) {
                holdfast.close();
                lettuce.shutdown();
            } else {
                redisson.shutdown();
            }
        }
    }

    /** A lock that no other thread uses. */
    @State(Scope.Thread)
    public static class Own {
        Lock lock;

        @Setup
        public void open(Locks locks) {
            lock = locks.lock("bench:" + UUID.randomUUID());
        }
    }

    @Benchmark
    @Threads(1)
    public void uncontended(Own own) {
        own.lock.lock();
        own.lock.unlock();
    }

    @Benchmark
    @Threads(16)
    public void handOff(Locks locks) {
        locks.shared.lock();
        locks.shared.unlock();
    }
}
