package holdfast.jedis;

import holdfast.spi.ConnectorProvider;
import holdfast.spi.Node;
import holdfast.spi.RedisConnection;
import holdfast.spi.RedisConnector;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.function.Function;
import org.jspecify.annotations.Nullable;
import redis.clients.jedis.Connection;
import redis.clients.jedis.HostAndPort;
import redis.clients.jedis.JedisClientConfig;
import redis.clients.jedis.UnifiedJedis;
import redis.clients.jedis.exceptions.JedisConnectionException;
import redis.clients.jedis.util.Pool;

/**
 * Opens connections as an application's Jedis client opens its own: TLS, credentials and database come along. They have no read timeout,
 * and no command is repeated.
 */
public final class JedisConnector implements RedisConnector {
    /** Opens a connection to a node. */
    @FunctionalInterface
    private interface Opener {
        Connection open(Node node) throws Exception;
    }

    private final Opener opener;
    private final boolean cluster;

    private JedisConnector(Opener opener, boolean cluster) {
        this.opener = opener;
        this.cluster = cluster;
    }

    /** Connections made as the pool makes its own; {@code RedisClient.getPool()} and {@code JedisPooled.getPool()} return one. */
    public static JedisConnector of(Pool<Connection> pool) {
        return new JedisConnector(node -> pool.getFactory().makeObject().getObject(), false);
    }

    /** Connections to one server. */
    public static JedisConnector of(HostAndPort server, JedisClientConfig config) {
        return new JedisConnector(node -> new Connection(server, config), false);
    }

    /** Connections to the primary that Sentinel names; each new connection looks it up. */
    public static JedisConnector sentinel(String name, Set<HostAndPort> sentinels, JedisClientConfig config, JedisClientConfig sentinelConfig) {
        return new JedisConnector(node -> {
            HostAndPort primary = first(sentinels, sentinel -> primary(name, sentinel, sentinelConfig));
            return new Connection(primary, config);
        }, false);
    }

    /** Connections to the nodes of a cluster, which redirects make known. */
    public static JedisConnector cluster(Set<HostAndPort> seeds, JedisClientConfig config) {
        return new JedisConnector(node -> node.equals(Node.PRIMARY) ? first(seeds, seed -> new Connection(seed, config))
            : new Connection(new HostAndPort(node.host(), node.port()), config), true);
    }

    /** The outcome of the first server that answers. */
    private static <T> T first(Set<HostAndPort> servers, Function<HostAndPort, T> ask) {
        JedisConnectionException last = new JedisConnectionException("no server is known");
        for (HostAndPort server : servers) {
            try {
                return ask.apply(server);
            } catch (JedisConnectionException why) {
                last = why;
            }
        }
        throw last;
    }

    private static HostAndPort primary(String name, HostAndPort sentinel, JedisClientConfig config) {
        try (Connection connection = new Connection(sentinel, config)) {
            connection.sendCommand(() -> "SENTINEL".getBytes(StandardCharsets.US_ASCII), "get-master-addr-by-name", name);
            List<String> address = connection.getMultiBulkReply();
            if (address == null || address.size() != 2) {
                throw new JedisConnectionException("the sentinel at " + sentinel + " knows no primary called " + name);
            }
            return new HostAndPort(address.get(0), Integer.parseInt(address.get(1)));
        }
    }

    @Override
    public RedisConnection open(Node node, Runnable onClose) throws Exception {
        Connection connection = opener.open(node);
        try {
            connection.connect();
            connection.setTimeoutInfinite();
        } catch (RuntimeException why) {
            connection.close();
            throw why;
        }
        return new JedisConnection(connection, onClose);
    }

    @Override
    public boolean isCluster() {
        return cluster;
    }

    /** Finds this module for {@code Holdfast.create}: for clients of one server, which have a pool. */
    public static final class Provider implements ConnectorProvider {
        @Override
        public Optional<RedisConnector> connector(Object redisClient) {
            try {
                return redisClient instanceof UnifiedJedis client ? Optional.ofNullable(pool(client)).map(JedisConnector::of) : Optional.empty();
            } catch (NoClassDefFoundError absent) {
                return Optional.empty();
            }
        }

        /** {@code RedisClient} has it since Jedis 7, {@code JedisPooled} before. */
        @SuppressWarnings("unchecked")
        private static @Nullable Pool<Connection> pool(UnifiedJedis client) {
            try {
                return (Pool<Connection>) client.getClass().getMethod("getPool").invoke(client);
            } catch (ReflectiveOperationException none) {
                return null;
            }
        }
    }
}
