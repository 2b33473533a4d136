package holdfast.server;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;
import static org.awaitility.Awaitility.await;

import holdfast.Hold;
import holdfast.Holdfast;
import holdfast.LockLostException;
import holdfast.LockSpec;
import holdfast.jedis.JedisConnector;
import holdfast.lettuce.LettuceConnector;
import holdfast.testing.RedisServer;
import io.lettuce.core.ClientOptions;
import io.lettuce.core.RedisClient;
import io.lettuce.core.RedisURI;
import io.lettuce.core.SslOptions;
import io.lettuce.core.SslVerifyMode;
import io.lettuce.core.cluster.RedisClusterClient;
import io.lettuce.core.resource.EpollProvider;
import java.io.File;
import java.io.InputStream;
import java.nio.file.Files;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import javax.net.ssl.SSLContext;
import javax.net.ssl.SSLSocketFactory;
import javax.net.ssl.TrustManagerFactory;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Assumptions;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import redis.clients.jedis.DefaultJedisClientConfig;
import redis.clients.jedis.HostAndPort;
import redis.clients.jedis.JedisClientConfig;

/**
 * Clients over both libraries contend for locks: at a unix socket, over TLS, with an ACL user and a database, behind Sentinel, and in a cluster.
 */
@Timeout(600)
class TopologyTest {
    private static final Duration WAIT = Duration.ofSeconds(60);
    private static final JedisClientConfig PLAIN = DefaultJedisClientConfig.builder().build();

    private final Map<String, Holdfast> clients = new LinkedHashMap<>();
    private final List<AutoCloseable> opened = new ArrayList<>();

    private <T extends AutoCloseable> T closing(T resource) {
        opened.add(0, resource);
        return resource;
    }

    private void lettuce(RedisClient redis) {
        opened.add(0, redis::shutdown);
        clients.put("lettuce", closing(Holdfast.builder(LettuceConnector.of(redis)).build()));
    }

    private void jedis(JedisConnector connector) {
        clients.put("jedis", closing(Holdfast.builder(connector).build()));
    }

    @AfterEach
    void close() throws Exception {
        for (AutoCloseable resource : opened) {
            resource.close();
        }
    }

    /** Each client acquires a lock, and the others wait for it. */
    private void contend() throws Exception {
        for (Map.Entry<String, Holdfast> client : clients.entrySet()) {
            Hold hold = client.getValue().lock("k").acquire(WAIT);
            for (Holdfast other : clients.values()) {
                assertThat(other.lock("k").tryAcquire()).as("while %s holds it", client.getKey()).isEmpty();
                CompletableFuture<Hold> waiting = other.lock("k").acquireAsync(WAIT);
                await().until(() -> other.waiters("k").size() == 1);
                waiting.cancel(true);
                await().until(() -> other.waiters("k").isEmpty());
            }
            hold.renew();
            assertThat(hold.check()).isTrue();
            hold.release();
            assertThat(client.getValue().info("k")).isEmpty();
        }
    }

    @Test
    void unix_socket() throws Exception {
        Assumptions.assumeTrue(EpollProvider.isAvailable(), "Lettuce needs a native library of Netty for unix sockets");
        RedisServer server = closing(RedisServer.withModule("--unixsocket", "socket"));
        lettuce(RedisClient.create(RedisURI.Builder.socket(server.folder.resolve("socket").toString()).build()));
        jedis(JedisConnector.of(new HostAndPort("127.0.0.1", server.port), PLAIN));
        contend();
    }

    @Test
    void acl_user_and_database() throws Exception {
        RedisServer server = closing(RedisServer.withModule());
        server.call("ACL", "SETUSER", "app", "on", ">secret", "~*", "-@all", "+@connection", "+lock.acquire", "+lock.renew", "+lock.release", "+lock.info", "+lock.waiters", "+lock.version");
        lettuce(RedisClient.create(RedisURI.builder().withHost("127.0.0.1").withPort(server.port).withAuthentication("app", "secret".toCharArray()).withDatabase(3).build()));
        jedis(JedisConnector.of(new HostAndPort("127.0.0.1", server.port), DefaultJedisClientConfig.builder().user("app").password("secret").database(3).build()));
        contend();
        try (Hold held = clients.get("jedis").lock("in-3").acquire(WAIT)) {
            assertThat(server.exists("in-3")).isFalse();
            assertThat(clients.get("lettuce").info("in-3").orElseThrow().holders().get(0).owner()).isEqualTo(held.owner());
        }
    }

    @Test
    void tls() throws Exception {
        RedisServer server = closing(RedisServer.withModule());
        File certificate = server.folder.resolve("crt").toFile();
        Process openssl = new ProcessBuilder("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout", server.folder.resolve("key").toString(), "-out", certificate.toString()).redirectErrorStream(true).redirectOutput(ProcessBuilder.Redirect.DISCARD).start();
        assertThat(openssl.waitFor()).isZero();
        int port = RedisServer.freePort();
        for (String[] setting : new String[][] {{"tls-cert-file", certificate.toString()}, {"tls-key-file", server.folder.resolve("key").toString()}, {"tls-ca-cert-file", certificate.toString()},
            {"tls-auth-clients", "no"}, {"tls-port", String.valueOf(port)}}) {
            Assumptions.assumeTrue(server.ask("CONFIG", "SET", setting[0], setting[1]).equals("OK"), "the server was built without TLS");
        }
        RedisClient redis = RedisClient.create(RedisURI.builder().withHost("localhost").withPort(port).withSsl(true).withVerifyPeer(SslVerifyMode.FULL).build());
        redis.setOptions(ClientOptions.builder().sslOptions(SslOptions.builder().jdkSslProvider().trustManager(certificate).build()).build());
        lettuce(redis);
        jedis(JedisConnector.of(new HostAndPort("localhost", port), DefaultJedisClientConfig.builder().ssl(true).sslSocketFactory(trusting(certificate)).build()));
        contend();
    }

    private static SSLSocketFactory trusting(File certificate) throws Exception {
        KeyStore store = KeyStore.getInstance(KeyStore.getDefaultType());
        store.load(null);
        try (InputStream in = Files.newInputStream(certificate.toPath())) {
            store.setCertificateEntry("server", CertificateFactory.getInstance("X.509").generateCertificate(in));
        }
        TrustManagerFactory trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        trust.init(store);
        SSLContext context = SSLContext.getInstance("TLS");
        context.init(null, trust.getTrustManagers(), null);
        return context.getSocketFactory();
    }

    @Test
    void sentinel_failover_keeps_a_replicated_lock() throws Exception {
        RedisServer primary = closing(RedisServer.withModule());
        RedisServer replica = closing(RedisServer.withModule("--replicaof", "127.0.0.1 " + primary.port, "--repl-diskless-sync-delay", "0"));
        await().until(() -> primary.ask("INFO", "replication").contains("state=online"));
        RedisServer sentinel = closing(RedisServer.sentinel(primary));
        await().until(() -> ((List<?>) sentinel.call("SENTINEL", "REPLICAS", "main")).size() == 1);
        lettuce(RedisClient.create(RedisURI.builder().withSentinel("127.0.0.1", sentinel.port).withSentinelMasterId("main").build()));
        jedis(JedisConnector.sentinel("main", Set.of(new HostAndPort("127.0.0.1", sentinel.port)), PLAIN, PLAIN));
        contend();
        Map<String, Hold> holds = new LinkedHashMap<>();
        List<CompletableFuture<Hold>> waiting = new ArrayList<>();
        for (Map.Entry<String, Holdfast> client : clients.entrySet()) {
            String name = client.getKey();
            holds.put(name, client.getValue().lock(LockSpec.builder(name).replicas(1).lease(Duration.ofSeconds(60)).build()).acquire(WAIT));
            waiting.add(client.getValue().lock(name).acquireAsync(Duration.ofSeconds(120)));
            await().until(() -> client.getValue().waiters(name).size() == 1);
        }
        await().until(() -> sentinel.ask("SENTINEL", "FAILOVER", "main").equals("OK"));
        // A server that is promoted closes the connections of its clients.
        await().ignoreExceptions().until(() -> replica.ask("INFO", "replication").contains("role:master"));
        for (Hold hold : holds.values()) {
            await().ignoreExceptions().until(hold::check);
            hold.release();
        }
        for (CompletableFuture<Hold> next : waiting) {
            next.get().release();
        }
    }

    @Test
    void cluster_slot_moves_while_a_lock_is_held_and_waited_for() throws Exception {
        List<RedisServer> nodes = List.of(node(), node());
        nodes.get(0).call("CLUSTER", "ADDSLOTSRANGE", "0", "8191");
        nodes.get(1).call("CLUSTER", "ADDSLOTSRANGE", "8192", "16383");
        nodes.get(0).call("CLUSTER", "MEET", "127.0.0.1", String.valueOf(nodes.get(1).port));
        await().until(() -> nodes.stream().allMatch(TopologyTest::isReady));
        RedisClusterClient redis = RedisClusterClient.create(RedisURI.create("127.0.0.1", nodes.get(0).port));
        opened.add(0, redis::shutdown);
        clients.put("lettuce", closing(Holdfast.builder(LettuceConnector.of(redis)).build()));
        jedis(JedisConnector.cluster(Set.of(new HostAndPort("127.0.0.1", nodes.get(0).port)), PLAIN));
        contend();
        for (Map.Entry<String, Holdfast> client : clients.entrySet()) {
            String name = "{tag}" + client.getKey();
            Hold hold = client.getValue().lock(name).acquire(WAIT);
            Hold several = client.getValue().lockAll(name + "1", name + "2").acquire(WAIT);
            CompletableFuture<Hold> next = client.getValue().lock(name).acquireAsync(Duration.ofSeconds(120));
            await().until(() -> client.getValue().waiters(name).size() == 1);
            move(nodes, name);
            hold.renew();
            several.renew();
            assertThat(hold.check()).isTrue();
            hold.release();
            several.release();
            next.get().release();
        }
        Hold lost = clients.get("jedis").lock("{tag}forced").acquire(WAIT);
        clients.get("lettuce").force("{tag}forced");
        assertThatThrownBy(lost::release).isInstanceOf(LockLostException.class);
    }

    private RedisServer node() throws Exception {
        return closing(RedisServer.withModule("--cluster-enabled", "yes", "--cluster-node-timeout", "5000"));
    }

    private static boolean isReady(RedisServer node) {
        try {
            String info = node.ask("CLUSTER", "INFO");
            return info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:2");
        } catch (java.io.IOException notYet) {
            return false;
        }
    }

    /** Gives the slot of a key to the other node. */
    private static void move(List<RedisServer> nodes, String key) throws Exception {
        String slot = nodes.get(0).ask("CLUSTER", "KEYSLOT", key);
        boolean first = ((List<?>) nodes.get(0).call("CLUSTER", "GETKEYSINSLOT", slot, "1")).size() == 1;
        RedisServer from = nodes.get(first ? 0 : 1);
        RedisServer to = nodes.get(first ? 1 : 0);
        String target = to.ask("CLUSTER", "MYID");
        assertThat(to.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", from.ask("CLUSTER", "MYID"))).isEqualTo("OK");
        assertThat(from.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target)).isEqualTo("OK");
        for (Object found : (List<?>) from.call("CLUSTER", "GETKEYSINSLOT", slot, "100")) {
            assertThat(from.ask("MIGRATE", "127.0.0.1", String.valueOf(to.port), new String((byte[]) found), "0", "5000")).isEqualTo("OK");
        }
        for (RedisServer node : List.of(to, from)) {
            assertThat(node.ask("CLUSTER", "SETSLOT", slot, "NODE", target)).isEqualTo("OK");
        }
    }
}
