/** A lock registry for Spring Integration. */
module holdfast.integration {
    requires transitive holdfast;
    requires transitive spring.integration.core;
    requires spring.context;

    exports holdfast.integration;
}
