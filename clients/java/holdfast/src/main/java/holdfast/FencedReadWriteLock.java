package holdfast;

import java.util.concurrent.locks.ReadWriteLock;

/**
 * Two locks of one name: any number of readers, or one writer. A thread that holds the write lock may take the read lock; the other way
 * round would never end and is refused.
 */
public record FencedReadWriteLock(FencedLock readLock, FencedLock writeLock) implements ReadWriteLock {}
