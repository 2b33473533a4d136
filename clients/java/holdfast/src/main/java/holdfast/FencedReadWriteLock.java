package holdfast;

import java.util.concurrent.locks.ReadWriteLock;

/**
 * Two locks of one name: any number of readers, or one writer. A thread that holds the write lock may take the read lock. A thread that holds the read lock
 * may not take the write lock: it would wait for itself. A writer that keeps a read lock when it unlocks the write lock excludes other readers until it
 * unlocks that, too, and {@code writeLock().isLocked()} is true until then. Meanwhile it may take the write lock again. {@link FencedLock#forceUnlock} of
 * either releases both.
 */
public record FencedReadWriteLock(FencedLock readLock, FencedLock writeLock) implements ReadWriteLock {}
