package holdfast.boot;

import java.time.Duration;
import org.springframework.boot.context.properties.ConfigurationProperties;
import org.springframework.boot.context.properties.bind.DefaultValue;

/**
 * Settings of the client. {@code spring.data.redis.*} names the server.
 *
 * @param lease the lease of locks that name none
 * @param timeout the timeout of calls that have no time of their own
 * @param maxConnections the greatest number of connections to a node
 * @param shedlockPrefix the beginning of the names of ShedLock's locks
 * @param registryPrefix the beginning of the names of the lock registry's locks
 */
@ConfigurationProperties("holdfast")
public record HoldfastProperties(@DefaultValue("10s") Duration lease, @DefaultValue("5s") Duration timeout, @DefaultValue("32") int maxConnections,
        @DefaultValue("job-lock:") String shedlockPrefix, @DefaultValue("lock:") String registryPrefix) {}
