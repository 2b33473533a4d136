package holdfast.server;

import static org.assertj.core.api.Assertions.assertThat;

import holdfast.Hold;
import holdfast.Holdfast;
import holdfast.testing.RedisServer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import jdk.jfr.Recording;
import jdk.jfr.consumer.RecordedEvent;
import jdk.jfr.consumer.RecordingFile;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledForJreRange;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

/** Many virtual threads contend for few locks: none pins its carrier, and each is granted its lock. */
@Timeout(600)
class VirtualThreadsTest {
    private static final int THREADS = 10_000;
    private static final int LOCKS = 100;

    /** Calls {@code Thread.startVirtualThread} by reflection: Java 17 does not have it. */
    static void startVirtual(Runnable task) throws Exception {
        Thread.class.getMethod("startVirtualThread", Runnable.class).invoke(null, task);
    }

    @ParameterizedTest
    @EnumSource(names = {"LETTUCE", "JEDIS"})
    @EnabledForJreRange(minVersion = 21)
    void ten_thousand_virtual_threads_are_served_without_pinning(Clients library) throws Exception {
        Path file = Files.createTempFile("pinned", ".jfr");
        int[] counters = new int[LOCKS];
        AtomicInteger failed = new AtomicInteger();
        CountDownLatch done = new CountDownLatch(THREADS);
        try (RedisServer server = RedisServer.withModule(); Clients.Opened opened = library.warm(server.port); Recording recording = new Recording()) {
            Holdfast client = opened.client();
            recording.enable("jdk.VirtualThreadPinned").withoutThreshold();
            recording.start();
            for (int i = 0; i < THREADS; i++) {
                int lock = i % LOCKS;
                startVirtual(() -> {
                    try (Hold hold = client.lock("v" + lock).acquire(Duration.ofSeconds(240))) {
                        counters[lock]++;
                    } catch (Exception | Error why) {
                        why.printStackTrace();
                        failed.incrementAndGet();
                    }
                    done.countDown();
                });
            }
            assertThat(done.await(250, TimeUnit.SECONDS)).isTrue();
            recording.stop();
            recording.dump(file);
        }
        List<RecordedEvent> pinned = RecordingFile.readAllEvents(file).stream().filter(it -> it.getEventType().getName().equals("jdk.VirtualThreadPinned")).toList();
        Files.delete(file);
        assertThat(failed.get()).isZero();
        assertThat(counters).containsOnly(THREADS / LOCKS);
        assertThat(pinned).isEmpty();
    }
}
