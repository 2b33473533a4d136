/** A lock provider for ShedLock. */
module holdfast.shedlock {
    requires transitive holdfast;
    requires transitive net.javacrumbs.shedlock.core;

    exports holdfast.shedlock;
}
