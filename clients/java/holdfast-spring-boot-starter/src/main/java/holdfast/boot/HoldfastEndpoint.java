package holdfast.boot;

import holdfast.Holdfast;
import java.util.List;
import org.springframework.boot.actuate.endpoint.annotation.Endpoint;
import org.springframework.boot.actuate.endpoint.annotation.ReadOperation;

/** Shows the locks that this process holds. */
@Endpoint(id = "holdfast")
public class HoldfastEndpoint {
    private final Holdfast client;

    public HoldfastEndpoint(Holdfast client) {
        this.client = client;
    }

    /**
     * The content of the endpoint.
     *
     * @param holds the locks that this process certainly holds now
     */
    public record Description(List<Holdfast.HeldLock> holds) {}

    @ReadOperation
    public Description holds() {
        return new Description(client.holds());
    }
}
