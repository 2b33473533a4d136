package holdfast;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.Optional;
import net.jqwik.api.Arbitraries;
import net.jqwik.api.Arbitrary;
import net.jqwik.api.ForAll;
import net.jqwik.api.From;
import net.jqwik.api.Property;
import net.jqwik.api.Provide;
import net.jqwik.api.constraints.AlphaChars;
import net.jqwik.api.constraints.IntRange;
import net.jqwik.api.constraints.LongRange;
import net.jqwik.api.constraints.NotEmpty;
import net.jqwik.api.constraints.Size;

/** Properties that hold for all answers of a server, and for all arguments. */
class PropertyTest {
    @Provide
    Arbitrary<String> answers() {
        return Arbitraries.of(FakeServer.CUT, FakeServer.NIL, FakeServer.granted(5, 0), "-LOADING x\r\n", "-SUPERSEDED x\r\n", "-CLUSTERDOWN x\r\n", "-READONLY x\r\n", "-DEADLOCK x\r\n", "-ERR x\r\n");
    }

    @Property(tries = 200)
    void acquisition_ends_in_time_and_is_released_or_withdrawn(@ForAll @Size(max = 5) List<@From("answers") String> acquires, @ForAll @Size(max = 2) List<@From("answers") String> releases)
            throws Exception {
        ManualClock clock = new ManualClock();
        FakeServer server = new FakeServer(clock);
        server.next("LOCK.ACQUIRE", acquires.toArray(new String[0])).next("LOCK.RELEASE", releases.toArray(new String[0]));
        try (Holdfast client = Holdfast.builder(server).timeout(Duration.ofSeconds(2)).controlledBy(clock, ScriptedFixture.direct()).build()) {
            boolean cut = false;
            Optional<Hold> held = Optional.empty();
            try {
                held = Optional.of(clock.get(client.lock(LockSpec.builder("k").lease(Duration.ofMillis(800)).build()).acquireAsync(Duration.ofSeconds(2))));
            } catch (HoldfastException ended) {
                cut = acquires.subList(0, Math.min(acquires.size(), server.read("LOCK.ACQUIRE").size())).contains(FakeServer.CUT);
            }
            assertThat(clock.now()).isLessThanOrEqualTo(2_250_000_000L);
            assertThat(server.read("LOCK.ACQUIRE").stream().map(FakeServer.Command::owner).distinct().count()).isLessThanOrEqualTo(1);
            assertThat(server.read("LOCK.ACQUIRE")).allMatch(it -> it.number("WAIT") > 0 && it.number("LEASE") == 800 && it.has("HOLDS"));
            if (held.isPresent()) {
                try {
                    clock.get(held.get().releaseAsync());
                } catch (HoldfastException refusal) {
                    assertThat(server.read("LOCK.RELEASE")).isNotEmpty();
                }
                assertThat(held.get().isHeld()).isFalse();
                assertThat(server.read("LOCK.RELEASE").get(0).has("TOKEN")).isTrue();
            } else if (cut) {
                clock.until(() -> server.read("LOCK.RELEASE").stream().anyMatch(it -> it.has("ALL")));
            }
            clock.advance(10_000);
        }
    }

    @Property
    void slot_is_that_of_the_text_between_the_first_braces(@ForAll String before, @ForAll @NotEmpty @AlphaChars String tag, @ForAll String after) {
        String prefix = before.replace("{", "").replace("}", "");
        int slot = Reply.slot((prefix + "{" + tag + "}" + after).getBytes(StandardCharsets.UTF_8));
        assertThat(slot).isBetween(0, 16383).isEqualTo(Reply.slot(tag.getBytes(StandardCharsets.UTF_8)));
    }

    @Property
    void lock_spec_accepts_what_the_server_accepts(@ForAll @IntRange(min = -2, max = 5) int limit, @ForAll @LongRange(min = -5, max = 5) long lease) {
        if (limit >= 1 && lease >= 1) {
            assertThat(LockSpec.builder("k").limit(limit).lease(Duration.ofMillis(lease)).build().limit()).isEqualTo(limit);
        } else {
            assertThatThrownBy(() -> LockSpec.builder("k").limit(limit).lease(Duration.ofMillis(lease)).build()).isInstanceOf(IllegalArgumentException.class);
        }
    }

    @Property(tries = 200)
    void owners_never_repeat_and_contain_no_hash_sign() {
        String owner = Holdfast.random();
        assertThat(owner).hasSize(32).doesNotContain("#").isNotEqualTo(Holdfast.random());
    }
}
