package holdfast.boot;

import holdfast.Holdfast;
import holdfast.HoldfastListener;
import holdfast.integration.HoldfastLockRegistry;
import holdfast.integration.PlainHoldfastLockRegistry;
import holdfast.shedlock.HoldfastLockProvider;
import holdfast.spi.RedisConnector;
import io.micrometer.core.instrument.MeterRegistry;
import net.javacrumbs.shedlock.core.LockProvider;
import org.springframework.beans.factory.ObjectProvider;
import org.springframework.boot.actuate.endpoint.annotation.Endpoint;
import org.springframework.boot.autoconfigure.AutoConfiguration;
import org.springframework.boot.autoconfigure.condition.ConditionalOnBean;
import org.springframework.boot.autoconfigure.condition.ConditionalOnClass;
import org.springframework.boot.autoconfigure.condition.ConditionalOnMissingBean;
import org.springframework.boot.autoconfigure.condition.ConditionalOnMissingClass;
import org.springframework.boot.context.properties.EnableConfigurationProperties;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;
import org.springframework.data.redis.connection.RedisConnectionFactory;
import org.springframework.integration.support.locks.LockRegistry;

/** A client of the server that {@code spring.data.redis.*} names, and what of the application's libraries can use it. */
@AutoConfiguration(afterName = {
    "org.springframework.boot.autoconfigure.data.redis.RedisAutoConfiguration",
    "org.springframework.boot.data.redis.autoconfigure.DataRedisAutoConfiguration",
    "org.springframework.boot.actuate.autoconfigure.metrics.CompositeMeterRegistryAutoConfiguration",
    "org.springframework.boot.micrometer.metrics.autoconfigure.CompositeMeterRegistryAutoConfiguration"})
@ConditionalOnClass(RedisConnectionFactory.class)
@EnableConfigurationProperties(HoldfastProperties.class)
public class HoldfastAutoConfiguration {
    private static final String DISTRIBUTED_LOCK = "org.springframework.integration.support.locks.DistributedLock";

    @Bean
    @ConditionalOnMissingBean
    @ConditionalOnBean(RedisConnectionFactory.class)
    RedisConnector holdfastConnector(RedisConnectionFactory factory) {
        return Connectors.of(factory);
    }

    @Bean
    @ConditionalOnMissingBean
    @ConditionalOnBean(RedisConnector.class)
    Holdfast holdfast(RedisConnector connector, HoldfastProperties properties, ObjectProvider<HoldfastListener> listeners) {
        Holdfast.Builder builder = Holdfast.builder(connector).lease(properties.lease()).timeout(properties.timeout()).maxConnections(properties.maxConnections());
        listeners.orderedStream().forEach(builder::listener);
        return builder.build();
    }

    @Configuration(proxyBeanMethods = false)
    @ConditionalOnClass(MeterRegistry.class)
    static class Metrics {
        @Bean
        @ConditionalOnBean(MeterRegistry.class)
        HoldfastMetrics holdfastMetrics(MeterRegistry registry) {
            return new HoldfastMetrics(registry);
        }
    }

    @Configuration(proxyBeanMethods = false)
    @ConditionalOnClass(LockProvider.class)
    static class ShedLock {
        @Bean
        @ConditionalOnBean(Holdfast.class)
        @ConditionalOnMissingBean
        LockProvider holdfastLockProvider(Holdfast client, HoldfastProperties properties) {
            return new HoldfastLockProvider(client, properties.shedlockPrefix());
        }
    }

    @Configuration(proxyBeanMethods = false)
    @ConditionalOnClass(name = DISTRIBUTED_LOCK)
    static class Integration7 {
        @Bean
        @ConditionalOnBean(Holdfast.class)
        @ConditionalOnMissingBean(LockRegistry.class)
        HoldfastLockRegistry holdfastLockRegistry(Holdfast client, HoldfastProperties properties) {
            return new HoldfastLockRegistry(client, properties.registryPrefix());
        }
    }

    @Configuration(proxyBeanMethods = false)
    @ConditionalOnClass(LockRegistry.class)
    @ConditionalOnMissingClass(DISTRIBUTED_LOCK)
    static class Integration6 {
        @Bean
        @ConditionalOnBean(Holdfast.class)
        @ConditionalOnMissingBean(LockRegistry.class)
        PlainHoldfastLockRegistry holdfastLockRegistry(Holdfast client, HoldfastProperties properties) {
            return new PlainHoldfastLockRegistry(client, properties.registryPrefix());
        }
    }

    @Configuration(proxyBeanMethods = false)
    @ConditionalOnClass(Endpoint.class)
    static class Actuator {
        @Bean
        @ConditionalOnBean(Holdfast.class)
        HoldfastEndpoint holdfastEndpoint(Holdfast client) {
            return new HoldfastEndpoint(client);
        }
    }

    @Configuration(proxyBeanMethods = false)
    @ConditionalOnClass(name = "org.springframework.boot.health.contributor.HealthIndicator")
    static class Health4 {
        @Bean
        @ConditionalOnBean(Holdfast.class)
        Boot4HealthIndicator holdfastHealthIndicator(Holdfast client) {
            return new Boot4HealthIndicator(client);
        }
    }

    @Configuration(proxyBeanMethods = false)
    @ConditionalOnClass(name = "org.springframework.boot.actuate.health.HealthIndicator")
    static class Health3 {
        @Bean
        @ConditionalOnBean(Holdfast.class)
        Boot3HealthIndicator holdfastHealthIndicator(Holdfast client) {
            return new Boot3HealthIndicator(client);
        }
    }
}
