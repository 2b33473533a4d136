package holdfast.server;

import static org.assertj.core.api.Assertions.assertThat;

import holdfast.Hold;
import holdfast.Holdfast;
import holdfast.testing.RedisServer;
import io.lettuce.core.RedisClient;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.Test;

/** The examples of the documents: the same code runs here. */
class ReadmeTest {
    private final List<Long> fences = new ArrayList<>();

    private void print(long fence) {
        fences.add(fence);
    }

    private void write(long fence) {
        fences.add(fence);
    }

    private void stop() {
        throw new AssertionError("lost");
    }

    @Test
    void readme_examples_run() throws Exception {
        try (RedisServer server = RedisServer.withModule(); RedisClient redis = RedisClient.create("redis://127.0.0.1:" + server.port)) {
            // The first connection of a process loads a thousand classes. On a busy machine that alone took longer than the examples wait.
            redis.connect().close();
            try (Holdfast holdfast = Holdfast.create(redis);
                    Hold hold = holdfast.lock("printer").acquire(Duration.ofSeconds(10))) {
                print(hold.fence());
            }
            try (Holdfast client = Holdfast.create(redis);
                    Hold hold = client.lock("invoice:17").acquire(Duration.ofSeconds(10))) {
                hold.onLost(reason -> stop());
                write(hold.fence());                                                  // the storage must refuse a smaller fence
            }
        }
        assertThat(fences).hasSize(2).allMatch(fence -> fence > 0);
    }

    @Test
    void every_readme_example_is_run() throws Exception {
        String here = Files.readString(Path.of("src/test/java/holdfast/server/ReadmeTest.java"));
        for (String readme : List.of("../../../../README.md", "../../README.md")) {
            String[] examples = Files.readString(Path.of(readme)).split("```java\n");
            assertThat(examples).hasSize(2);
            assertThat(here).contains(examples[1].split("```")[0].indent(12));
        }
    }
}
