/** A lock provider for ShedLock. */
@NullMarked
package holdfast.shedlock;

import org.jspecify.annotations.NullMarked;
