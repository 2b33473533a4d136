/** Distributed locks in Redis and Valkey. {@link holdfast.Holdfast} is where to begin. */
@NullMarked
package holdfast;

import org.jspecify.annotations.NullMarked;
