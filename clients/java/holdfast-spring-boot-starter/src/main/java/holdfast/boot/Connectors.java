package holdfast.boot;

import holdfast.jedis.JedisConnector;
import holdfast.lettuce.LettuceConnector;
import holdfast.spi.RedisConnector;
import io.lettuce.core.RedisClient;
import io.lettuce.core.cluster.RedisClusterClient;
import java.util.Set;
import java.util.stream.Collectors;
import java.util.stream.StreamSupport;
import org.jspecify.annotations.Nullable;
import org.springframework.data.redis.connection.RedisConnectionFactory;
import org.springframework.data.redis.connection.RedisNode;
import org.springframework.data.redis.connection.RedisPassword;
import org.springframework.data.redis.connection.RedisSentinelConfiguration;
import org.springframework.data.redis.connection.RedisStandaloneConfiguration;
import org.springframework.data.redis.connection.jedis.JedisClientConfiguration;
import org.springframework.data.redis.connection.jedis.JedisConnectionFactory;
import org.springframework.data.redis.connection.lettuce.LettuceConnectionFactory;
import org.springframework.util.ClassUtils;
import redis.clients.jedis.DefaultJedisClientConfig;
import redis.clients.jedis.HostAndPort;

/** Makes a connector that opens connections as Spring's connection factory does, with either driver. */
final class Connectors {
    private Connectors() {}

    static RedisConnector of(RedisConnectionFactory factory) {
        if (ClassUtils.isPresent("io.lettuce.core.RedisClient", null) && factory instanceof LettuceConnectionFactory lettuce) {
            return Lettuce.of(lettuce);
        }
        if (ClassUtils.isPresent("redis.clients.jedis.Connection", null) && factory instanceof JedisConnectionFactory jedis) {
            return Jedis.of(jedis);
        }
        throw new IllegalStateException("holdfast needs a connection factory of Lettuce or Jedis, got " + factory.getClass().getName() + ": declare a bean of type RedisConnector");
    }

    private static final class Lettuce {
        static RedisConnector of(LettuceConnectionFactory factory) {
            Object client = factory.getRequiredNativeClient();
            return client instanceof RedisClusterClient cluster ? LettuceConnector.of(cluster) : LettuceConnector.of((RedisClient) client);
        }
    }

    private static final class Jedis {
        static RedisConnector of(JedisConnectionFactory factory) {
            RedisSentinelConfiguration sentinel = factory.getSentinelConfiguration();
            if (sentinel != null && sentinel.getMaster() != null) {
                DefaultJedisClientConfig.Builder ask = base(factory);
                credentials(ask, sentinel.getSentinelUsername(), sentinel.getSentinelPassword());
                DefaultJedisClientConfig.Builder config = base(factory).database(sentinel.getDatabase());
                credentials(config, sentinel.getUsername(), sentinel.getPassword());
                return JedisConnector.sentinel(String.valueOf(sentinel.getMaster().getName()), hosts(sentinel.getSentinels()), config.build(), ask.build());
            }
            DefaultJedisClientConfig.Builder config = base(factory);
            if (factory.getClusterConfiguration() != null) {
                credentials(config, factory.getClusterConfiguration().getUsername(), factory.getClusterConfiguration().getPassword());
                return JedisConnector.cluster(hosts(factory.getClusterConfiguration().getClusterNodes()), config.build());
            }
            RedisStandaloneConfiguration server = factory.getStandaloneConfiguration();
            credentials(config.database(server.getDatabase()), server.getUsername(), server.getPassword());
            return JedisConnector.of(new HostAndPort(server.getHostName(), server.getPort()), config.build());
        }

        private static DefaultJedisClientConfig.Builder base(JedisConnectionFactory factory) {
            JedisClientConfiguration client = factory.getClientConfiguration();
            DefaultJedisClientConfig.Builder config = DefaultJedisClientConfig.builder().ssl(client.isUseSsl()).connectionTimeoutMillis((int) client.getConnectTimeout().toMillis())
                .socketTimeoutMillis((int) client.getReadTimeout().toMillis());
            client.getClientName().ifPresent(config::clientName);
            client.getSslSocketFactory().ifPresent(config::sslSocketFactory);
            client.getSslParameters().ifPresent(config::sslParameters);
            client.getHostnameVerifier().ifPresent(config::hostnameVerifier);
            return config;
        }

        private static void credentials(DefaultJedisClientConfig.Builder config, @Nullable String user, RedisPassword password) {
            config.user(user);
            password.toOptional().map(String::new).ifPresent(config::password);
        }

        private static Set<HostAndPort> hosts(Iterable<RedisNode> nodes) {
            return StreamSupport.stream(nodes.spliterator(), false).map(node -> new HostAndPort(String.valueOf(node.getHost()), node.getPort() == null ? 6379 : node.getPort()))
                .collect(Collectors.toSet());
        }
    }
}
