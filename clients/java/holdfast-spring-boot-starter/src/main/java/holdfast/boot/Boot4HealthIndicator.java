package holdfast.boot;

import holdfast.Holdfast;
import org.springframework.boot.health.contributor.AbstractHealthIndicator;
import org.springframework.boot.health.contributor.Health;

/** Reports whether the server replies and has the module, for Spring Boot 4. */
public class Boot4HealthIndicator extends AbstractHealthIndicator {
    private final Holdfast client;

    public Boot4HealthIndicator(Holdfast client) {
        super("The server does not reply, or has not loaded the module holdfast");
        this.client = client;
    }

    @Override
    protected void doHealthCheck(Health.Builder builder) {
        client.info("holdfast:health");
        builder.up().withDetail("holds", client.holds().size());
    }
}
