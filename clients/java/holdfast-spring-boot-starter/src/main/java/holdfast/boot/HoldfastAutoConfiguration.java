package holdfast.boot;

import holdfast.Holdfast;
import holdfast.HoldfastListener;
import holdfast.spi.RedisConnector;
import io.micrometer.core.instrument.MeterRegistry;
import org.springframework.beans.factory.ObjectProvider;
import org.springframework.boot.autoconfigure.AutoConfiguration;
import org.springframework.boot.autoconfigure.condition.ConditionalOnBean;
import org.springframework.boot.autoconfigure.condition.ConditionalOnClass;
import org.springframework.boot.autoconfigure.condition.ConditionalOnMissingBean;
import org.springframework.boot.context.properties.EnableConfigurationProperties;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;
import org.springframework.data.redis.connection.RedisConnectionFactory;

/** Makes a client of the server that {@code spring.data.redis.*} names. */
@AutoConfiguration(afterName = {
    "org.springframework.boot.autoconfigure.data.redis.RedisAutoConfiguration",
    "org.springframework.boot.data.redis.autoconfigure.DataRedisAutoConfiguration",
    "org.springframework.boot.actuate.autoconfigure.metrics.CompositeMeterRegistryAutoConfiguration",
    "org.springframework.boot.micrometer.metrics.autoconfigure.CompositeMeterRegistryAutoConfiguration"})
@ConditionalOnClass(RedisConnectionFactory.class)
@EnableConfigurationProperties(HoldfastProperties.class)
public class HoldfastAutoConfiguration {
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
        Holdfast.Builder builder = Holdfast.builder(connector).lease(properties.lease()).timeout(properties.timeout()).maxConnections(properties.maxConnections())
            .closeAtExit(false);
        listeners.orderedStream().forEach(builder::listener);
        return builder.build();
    }

    @Bean
    @ConditionalOnBean(Holdfast.class)
    HoldfastLifecycle holdfastLifecycle(Holdfast client) {
        return new HoldfastLifecycle(client);
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
}
