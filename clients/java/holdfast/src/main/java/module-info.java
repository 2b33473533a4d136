/** Distributed locks in Redis and Valkey. */
module holdfast {
    requires transitive org.jspecify;
    requires org.slf4j;

    exports holdfast;
    exports holdfast.spi;

    uses holdfast.spi.ConnectorProvider;
}
