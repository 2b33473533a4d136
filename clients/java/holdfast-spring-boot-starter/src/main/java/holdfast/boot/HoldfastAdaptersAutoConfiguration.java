package holdfast.boot;

import holdfast.Holdfast;
import holdfast.integration.HoldfastLockRegistry;
import holdfast.integration.PlainHoldfastLockRegistry;
import holdfast.shedlock.HoldfastLockProvider;
import net.javacrumbs.shedlock.core.LockProvider;
import org.springframework.boot.actuate.endpoint.annotation.Endpoint;
import org.springframework.boot.autoconfigure.AutoConfiguration;
import org.springframework.boot.autoconfigure.condition.ConditionalOnBean;
import org.springframework.boot.autoconfigure.condition.ConditionalOnClass;
import org.springframework.boot.autoconfigure.condition.ConditionalOnMissingBean;
import org.springframework.boot.autoconfigure.condition.ConditionalOnMissingClass;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;
import org.springframework.integration.support.locks.LockRegistry;

/** Beans for those of the application's libraries that can use the client: ShedLock, Spring Integration, Actuator. */
@AutoConfiguration(after = HoldfastAutoConfiguration.class)
@ConditionalOnBean(Holdfast.class)
public class HoldfastAdaptersAutoConfiguration {
    private static final String DISTRIBUTED_LOCK = "org.springframework.integration.support.locks.DistributedLock";

    @Configuration(proxyBeanMethods = false)
    @ConditionalOnClass(LockProvider.class)
    static class ShedLock {
        @Bean
        @ConditionalOnMissingBean
        LockProvider holdfastLockProvider(Holdfast client, HoldfastProperties properties) {
            return new HoldfastLockProvider(client, properties.shedlockPrefix());
        }
    }

    @Configuration(proxyBeanMethods = false)
    @ConditionalOnClass(name = DISTRIBUTED_LOCK)
    static class Integration7 {
        @Bean
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
        @ConditionalOnMissingBean(LockRegistry.class)
        PlainHoldfastLockRegistry holdfastLockRegistry(Holdfast client, HoldfastProperties properties) {
            return new PlainHoldfastLockRegistry(client, properties.registryPrefix());
        }
    }

    @Configuration(proxyBeanMethods = false)
    @ConditionalOnClass(Endpoint.class)
    static class Actuator {
        @Bean
        HoldfastEndpoint holdfastEndpoint(Holdfast client) {
            return new HoldfastEndpoint(client);
        }
    }

    @Configuration(proxyBeanMethods = false)
    @ConditionalOnClass(name = "org.springframework.boot.health.contributor.HealthIndicator")
    static class Health4 {
        @Bean
        Boot4HealthIndicator holdfastHealthIndicator(Holdfast client) {
            return new Boot4HealthIndicator(client);
        }
    }

    @Configuration(proxyBeanMethods = false)
    @ConditionalOnClass(name = "org.springframework.boot.actuate.health.HealthIndicator")
    static class Health3 {
        @Bean
        Boot3HealthIndicator holdfastHealthIndicator(Holdfast client) {
            return new Boot3HealthIndicator(client);
        }
    }
}
