package holdfast.boot;

import holdfast.HoldfastListener;
import holdfast.LossReason;
import io.micrometer.core.instrument.MeterRegistry;
import java.time.Duration;
import java.util.Locale;

/**
 * Metrics of a client: the timer {@code holdfast.acquire} (until an acquisition ended, by {@code outcome}), the timer {@code holdfast.hold} (from the grant to
 * the release), and the counter {@code holdfast.lost} (by {@code reason}). Names of locks are no tags: there may be any number of them.
 */
public final class HoldfastMetrics implements HoldfastListener {
    private final MeterRegistry registry;

    public HoldfastMetrics(MeterRegistry registry) {
        this.registry = registry;
    }

    @Override
    public void acquired(String name, Duration waited) {
        registry.timer("holdfast.acquire", "outcome", "acquired").record(waited);
    }

    @Override
    public void notAcquired(String name, Duration waited) {
        registry.timer("holdfast.acquire", "outcome", "not_acquired").record(waited);
    }

    @Override
    public void lost(String name, LossReason reason) {
        registry.counter("holdfast.lost", "reason", reason.name().toLowerCase(Locale.ROOT)).increment();
    }

    @Override
    public void released(String name, Duration held) {
        registry.timer("holdfast.hold").record(held);
    }
}
