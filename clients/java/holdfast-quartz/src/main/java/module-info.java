/** Quartz jobs that run once in a fleet. */
module holdfast.quartz {
    requires transitive holdfast;
    requires transitive org.quartz;
    requires org.slf4j;

    exports holdfast.quartz;
}
