/** Distributed locks in Redis and Valkey. Begin with {@link holdfast.Holdfast}. */
@NullMarked
package holdfast;

import org.jspecify.annotations.NullMarked;
