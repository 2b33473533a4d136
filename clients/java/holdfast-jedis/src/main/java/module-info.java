/** Holdfast over the connections of Jedis. */
module holdfast.jedis {
    requires transitive holdfast;
    requires transitive redis.clients.jedis;
    requires org.apache.commons.pool2;
    requires org.slf4j;

    exports holdfast.jedis;

    provides holdfast.spi.ConnectorProvider with holdfast.jedis.JedisConnector.Provider;
}
