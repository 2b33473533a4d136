package league;

import com.hazelcast.config.Config;
import com.hazelcast.config.JoinConfig;
import com.hazelcast.core.Hazelcast;
import com.hazelcast.core.HazelcastInstance;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** Three members of Hazelcast's CP subsystem. Argument: their addresses. It says "ready" when they are one cluster. */
public final class HazelcastMembers {
    private HazelcastMembers() {}

    public static void main(String[] arguments) throws Exception {
        List<String> endpoints = List.of(arguments[0].split(","));
        List<CompletableFuture<HazelcastInstance>> starting = new ArrayList<>();
        for (String endpoint : endpoints) {
            String[] address = endpoint.split(":");
            Config config = new Config().setClusterName("dev");
            config.setProperty("hazelcast.logging.type", "none").setProperty("hazelcast.phone.home.enabled", "false");
            config.getCPSubsystemConfig().setCPMemberCount(endpoints.size());
            config.getNetworkConfig().setPort(Integer.parseInt(address[1])).setPortAutoIncrement(false).setPublicAddress(endpoint);
            config.getNetworkConfig().getInterfaces().setEnabled(true).addInterface(address[0]);
            JoinConfig join = config.getNetworkConfig().getJoin();
            join.getAutoDetectionConfig().setEnabled(false);
            join.getMulticastConfig().setEnabled(false);
            join.getTcpIpConfig().setEnabled(true).setMembers(endpoints);
            starting.add(CompletableFuture.supplyAsync(() -> Hazelcast.newHazelcastInstance(config)));
        }
        for (CompletableFuture<HazelcastInstance> member : starting) {
            if (!member.get().getCPSubsystem().getCPSubsystemManagementService().awaitUntilDiscoveryCompleted(2, TimeUnit.MINUTES)) {
                throw new IllegalStateException("the CP subsystem has not found its members");
            }
        }
        System.out.println("ready");
        System.out.flush();
        Thread.currentThread().join();
    }
}
