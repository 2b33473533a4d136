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
 * Opens connections as an application's Jedis client does, with its TLS, credentials and database. They have no read timeout, and repeat no command.
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

    /** Opens connections as this pool does, but outside of it. {@code RedisClient.getPool()} and {@code JedisPooled.getPool()} return one. */
    public static JedisConnector of(Pool<Connection> pool) {
        return new JedisConnector(node -> pool.getFactory().makeObject().getObject(), false);
    }

    /** Opens connections to one server. */
    public static JedisConnector of(HostAndPort server, JedisClientConfig config) {
        return new JedisConnector(node -> new Connection(server, config), false);
    }

    /** Opens connections to the primary that a Sentinel names, which is looked up for each connection. */
    public static JedisConnector sentinel(String name, Set<HostAndPort> sentinels, JedisClientConfig config, JedisClientConfig sentinelConfig) {
        return new JedisConnector(node -> {
            HostAndPort primary = first(sentinels, sentinel -> primary(name, sentinel, sentinelConfig));
            return new Connection(primary, config);
        }, false);
    }

    /** Opens connections to the nodes of a cluster. The client learns the nodes from redirects. */
    public static JedisConnector cluster(Set<HostAndPort> seeds, JedisClientConfig config) {
        return new JedisConnector(node -> node.equals(Node.PRIMARY) ? first(seeds, seed -> new Connection(seed, config))
            : new Connection(new HostAndPort(node.host(), node.port()), config), true);
    }

    /** Returns the outcome of the first server that can be reached. */
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
            return new JedisConnection(connection, onClose);
        } catch (RuntimeException | Error why) {
            connection.close();
            throw why;
        }
    }

    @Override
    public boolean isCluster() {
        return cluster;
    }

    /** Lets {@code Holdfast.create} find this module for clients of one server, which have a pool. */
    public static final class Provider implements ConnectorProvider {
        @Override
        public Optional<RedisConnector> connector(Object redisClient) {
            try {
                return redisClient instanceof UnifiedJedis client ? Optional.ofNullable(pool(client)).map(JedisConnector::of) : Optional.empty();
            } catch (NoClassDefFoundError absent) {
                return Optional.empty();
            }
        }

        /** {@code RedisClient}, since Jedis 7, and {@code JedisPooled} have this method, but no common type that declares it. */
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
