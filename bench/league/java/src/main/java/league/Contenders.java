package league;

import com.hazelcast.client.HazelcastClient;
import com.hazelcast.client.config.ClientConfig;
import com.hazelcast.core.HazelcastInstance;
import com.hazelcast.cp.lock.FencedLock;
import holdfast.Hold;
import holdfast.Holdfast;
import holdfast.LockSpec;
import io.lettuce.core.RedisClient;
import java.util.List;
import java.util.Map;
import java.util.function.BiFunction;
import league.Main.Client;
import league.Main.Contender;
import league.Main.Held;
import league.Main.Mode;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.framework.recipes.locks.InterProcessReadWriteLock;
import org.apache.curator.retry.ExponentialBackoffRetry;
import org.redisson.Redisson;
import org.redisson.api.RFencedLock;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;
import org.redisson.config.MasterSlaveServersConfig;

/** What each contender's documentation shows, and no more. */
final class Contenders {
    static final Map<String, Contender> ALL = Map.of(
            "holdfast-java", Contenders::holdfast,
            "redisson", redisson(RedissonClient::getLock),
            "redisson-fair", redisson(RedissonClient::getFairLock),
            "redisson-fenced", redisson(RedissonClient::getFencedLock),
            "zookeeper", Contenders::zookeeper,
            "hazelcast", Contenders::hazelcast);

    private Contenders() {}

    private static Client holdfast(String league, List<String> endpoints) {
        Holdfast client = Holdfast.create(RedisClient.create("redis://" + endpoints.get(0)));
        int replicas = league.equals("R") ? 1 : 0;
        return (key, mode) -> {
            LockSpec.Builder spec = LockSpec.builder(key);
            if (replicas > 0) {
                spec.replicas(replicas);
            }
            Hold hold = client.lock(mode == Mode.READ ? spec.shared().build() : spec.build()).acquire();
            return new Held(hold.fence(), hold::release);
        };
    }

    private static Contender redisson(BiFunction<RedissonClient, String, RLock> mutex) {
        return (league, endpoints) -> {
            Config config = new Config();
            if (league.equals("R")) {
                // Its default, checkLockSyncedSlaves, makes it wait for the replicas.
                MasterSlaveServersConfig servers = config.useMasterSlaveServers().setMasterAddress("redis://" + endpoints.get(0));
                endpoints.stream().skip(1).forEach(endpoint -> servers.addSlaveAddress("redis://" + endpoint));
            } else {
                config.useSingleServer().setAddress("redis://" + endpoints.get(0));
            }
            RedissonClient client = Redisson.create(config);
            return (key, mode) -> {
                RLock lock = switch (mode) {
                    case MUTEX -> mutex.apply(client, key);
                    case READ -> client.getReadWriteLock(key).readLock();
                    case WRITE -> client.getReadWriteLock(key).writeLock();
                };
                if (lock instanceof RFencedLock fenced) {
                    return new Held(fenced.lockAndGetToken(), fenced::unlock);
                }
                lock.lock();
                return new Held(0, lock::unlock);
            };
        };
    }

    /** A token would need a second call, for the transaction that created the lock's node: Curator's mutex does not have it. */
    private static Client zookeeper(String league, List<String> endpoints) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.builder().connectString(String.join(",", endpoints))
                .sessionTimeoutMs(10_000).connectionTimeoutMs(10_000).retryPolicy(new ExponentialBackoffRetry(1000, 3)).build();
        client.start();
        client.blockUntilConnected();
        return (key, mode) -> {
            String path = "/" + key.replace(':', '-');
            InterProcessMutex mutex = switch (mode) {
                case MUTEX -> new InterProcessMutex(client, path);
                case READ -> new InterProcessReadWriteLock(client, path).readLock();
                case WRITE -> new InterProcessReadWriteLock(client, path).writeLock();
            };
            mutex.acquire();
            return new Held(0, mutex::release);
        };
    }

    private static Client hazelcast(String league, List<String> endpoints) {
        ClientConfig config = new ClientConfig();
        config.getNetworkConfig().setAddresses(endpoints);
        config.setProperty("hazelcast.logging.type", "none");
        HazelcastInstance client = HazelcastClient.newHazelcastClient(config);
        return (key, mode) -> {
            FencedLock lock = client.getCPSubsystem().getLock(key.replace(':', '-'));
            return new Held(lock.lockAndGetFence(), lock::unlock);
        };
    }
}
