package holdfast.server;

import holdfast.Holdfast;
import holdfast.jedis.JedisConnector;
import holdfast.lettuce.LettuceConnector;
import io.lettuce.core.ClientOptions;
import io.lettuce.core.RedisClient;
import io.lettuce.core.RedisURI;
import io.lettuce.core.TimeoutOptions;
import io.lettuce.core.protocol.ProtocolVersion;
import java.time.Duration;
import redis.clients.jedis.DefaultJedisClientConfig;
import redis.clients.jedis.HostAndPort;
import redis.clients.jedis.RedisProtocol;

/** The Redis libraries, as applications configure them. */
enum Clients {
    LETTUCE_RESP2,
    LETTUCE,
    JEDIS_RESP2,
    JEDIS;

    /** A client, and the resources of its library. */
    record Opened(Holdfast client, AutoCloseable library) implements AutoCloseable {
        @Override
        public void close() throws Exception {
            client.close();
            library.close();
        }
    }

    Opened open(int port) {
        return open(port, Duration.ofSeconds(30));
    }

    /** Opens a client and acquires a lock once: the first connection loads the library, which takes seconds on a busy machine. */
    Opened warm(int port) throws InterruptedException {
        Opened opened = open(port);
        opened.client().lock("warm").acquire(Duration.ofSeconds(50)).release();
        return opened;
    }

    Opened open(int port, Duration timeout) {
        switch (this) {
            case LETTUCE, LETTUCE_RESP2: {
                RedisClient redis = RedisClient.create(RedisURI.builder().withHost("127.0.0.1").withPort(port).withTimeout(Duration.ofMillis(1500)).build());
                // As Spring Boot sets them. The client must not let the timeout of the URI end a wait.
                redis.setOptions(ClientOptions.builder().timeoutOptions(TimeoutOptions.enabled())
                    .protocolVersion(this == LETTUCE ? ProtocolVersion.RESP3 : ProtocolVersion.RESP2).build());
                return new Opened(Holdfast.builder(LettuceConnector.of(redis)).timeout(timeout).build(), () -> redis.shutdown(Duration.ZERO, Duration.ofSeconds(2)));
            }
            default: {
                DefaultJedisClientConfig config = DefaultJedisClientConfig.builder().socketTimeoutMillis(1500).protocol(this == JEDIS ? RedisProtocol.RESP3 : RedisProtocol.RESP2).build();
                return new Opened(Holdfast.builder(JedisConnector.of(new HostAndPort("127.0.0.1", port), config)).timeout(timeout).build(), () -> { });
            }
        }
    }
}
