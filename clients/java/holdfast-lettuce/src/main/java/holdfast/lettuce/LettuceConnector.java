package holdfast.lettuce;

import holdfast.spi.ConnectorProvider;
import holdfast.spi.Node;
import holdfast.spi.RedisConnection;
import holdfast.spi.RedisConnector;
import io.lettuce.core.RedisClient;
import io.lettuce.core.RedisURI;
import io.lettuce.core.api.StatefulRedisConnection;
import io.lettuce.core.cluster.RedisClusterClient;
import io.lettuce.core.cluster.models.partitions.Partitions;
import io.lettuce.core.cluster.models.partitions.RedisClusterNode;
import io.lettuce.core.codec.ByteArrayCodec;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.Function;
import org.jspecify.annotations.Nullable;

/**
 * Opens connections as an application's Lettuce client does, with its TLS, credentials and database, to its server, Sentinel's primary or cluster. On these
 * connections, Lettuce does not reconnect, repeat commands, or end them by a timeout.
 */
public final class LettuceConnector implements RedisConnector {
    private static final long REFRESH_EVERY = 500_000_000L;

    private final Function<Node, StatefulRedisConnection<byte[], byte[]>> opener;
    private final @Nullable RedisClusterClient cluster;
    private final @Nullable RedisClient nodes;
    private final AtomicLong refreshed = new AtomicLong(System.nanoTime() - REFRESH_EVERY);
    private volatile @Nullable Partitions partitions;

    private LettuceConnector(Function<Node, StatefulRedisConnection<byte[], byte[]>> opener) {
        this.opener = opener;
        cluster = null;
        nodes = null;
    }

    private LettuceConnector(RedisClusterClient cluster) {
        this.cluster = cluster;
        // A cluster client shares one connection for each node, but a wait needs one of its own. This client shares the threads of the cluster client.
        nodes = RedisClient.create(cluster.getResources());
        opener = node -> {
            RedisURI uri = uri(cluster, node);
            nodes.setOptions(cluster.getOptions());
            return nodes.connect(ByteArrayCodec.INSTANCE, uri);
        };
    }

    /** Opens connections to the server, or to the primary of the Sentinels, that the client was made for. */
    public static LettuceConnector of(RedisClient client) {
        return new LettuceConnector(node -> client.connect(ByteArrayCodec.INSTANCE));
    }

    /** Opens connections to this server, for a client that was made without one. */
    public static LettuceConnector of(RedisClient client, RedisURI uri) {
        return new LettuceConnector(node -> client.connect(ByteArrayCodec.INSTANCE, uri));
    }

    /** Opens connections to the nodes of a cluster. */
    public static LettuceConnector of(RedisClusterClient client) {
        return new LettuceConnector(client);
    }

    private RedisURI uri(RedisClusterClient client, Node node) {
        Partitions known = client.getPartitions();
        partitions = known;
        RedisClusterNode found = node.equals(Node.PRIMARY) ? null : known.getPartition(node.host(), node.port());
        if (found != null) {
            return found.getUri();
        }
        RedisURI any = known.stream().filter(it -> it.getRole().isUpstream()).findFirst().orElseThrow().getUri();
        return node.equals(Node.PRIMARY) ? any : RedisURI.builder(any).withHost(node.host()).withPort(node.port()).build();
    }

    @Override
    public RedisConnection open(Node node, Runnable onClose) {
        StatefulRedisConnection<byte[], byte[]> connection = opener.apply(node);
        connection.setTimeout(Duration.ZERO);
        LettuceConnection opened = new LettuceConnection(connection, onClose);
        if (!connection.isOpen()) {
            opened.close();
            throw new IllegalStateException("the connection was closed while it was opened");
        }
        return opened;
    }

    @Override
    public boolean isCluster() {
        return cluster != null;
    }

    @Override
    public Node locate(int slot) {
        Partitions known = partitions;
        RedisClusterNode node = known == null ? null : known.getPartitionBySlot(slot);
        return node == null ? Node.PRIMARY : new Node(node.getUri().getHost(), node.getUri().getPort());
    }

    @Override
    public void refresh() {
        long now = System.nanoTime();
        long last = refreshed.get();
        if (cluster != null && partitions != null && now - last >= REFRESH_EVERY && refreshed.compareAndSet(last, now)) {
            cluster.refreshPartitionsAsync().thenRun(() -> partitions = cluster.getPartitions());
        }
    }

    @Override
    public void close() {
        if (nodes != null) {
            nodes.shutdownAsync(0, 1, TimeUnit.SECONDS);
        }
    }

    /** Lets {@code Holdfast.create} find this module. */
    public static final class Provider implements ConnectorProvider {
        @Override
        public Optional<RedisConnector> connector(Object redisClient) {
            try {
                return redisClient instanceof RedisClient client ? Optional.of(of(client))
                    : redisClient instanceof RedisClusterClient client ? Optional.of(of(client))
                    : Optional.empty();
            } catch (NoClassDefFoundError absent) {
                return Optional.empty();
            }
        }
    }
}
