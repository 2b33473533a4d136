package holdfast.boot;

import holdfast.Holdfast;
import org.springframework.boot.health.contributor.AbstractHealthIndicator;
import org.springframework.boot.health.contributor.Health;

/** Whether the server answers and has the module, for Spring Boot 4. */
public class Boot4HealthIndicator extends AbstractHealthIndicator {
    private final Holdfast client;

    public Boot4HealthIndicator(Holdfast client) {
        super("The server does not answer, or has no module holdfast");
        this.client = client;
    }

    @Override
    protected void doHealthCheck(Health.Builder builder) {
        client.info("holdfast:health");
        builder.up().withDetail("holds", client.holds().size());
    }
}
