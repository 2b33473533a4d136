package holdfast.boot;

import holdfast.Holdfast;
import org.springframework.boot.actuate.health.AbstractHealthIndicator;
import org.springframework.boot.actuate.health.Health;

/** Reports whether the server replies and has the module, for Spring Boot 3. */
public class Boot3HealthIndicator extends AbstractHealthIndicator {
    private final Holdfast client;

    public Boot3HealthIndicator(Holdfast client) {
        super("The server does not reply, or has not loaded the module holdfast");
        this.client = client;
    }

    @Override
    protected void doHealthCheck(Health.Builder builder) {
        client.info("holdfast:health");
        builder.up().withDetail("holds", client.holds().size());
    }
}
