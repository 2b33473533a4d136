package holdfast.spi;

import java.util.Optional;

/** Makes a connector from an application's Redis client; found by {@link java.util.ServiceLoader}. */
public interface ConnectorProvider {
    /** Returns a connector for this client, or empty if the client belongs to another library. */
    Optional<RedisConnector> connector(Object redisClient);
}
