/** Holdfast over the connections of Lettuce. */
module holdfast.lettuce {
    requires transitive holdfast;
    requires transitive lettuce.core;
    requires io.netty.common;
    requires io.netty.buffer;
    requires org.slf4j;

    exports holdfast.lettuce;

    provides holdfast.spi.ConnectorProvider with holdfast.lettuce.LettuceConnector.Provider;
}
