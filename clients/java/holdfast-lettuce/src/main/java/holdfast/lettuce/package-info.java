/** Holdfast over the connections of Lettuce. */
@NullMarked
package holdfast.lettuce;

import org.jspecify.annotations.NullMarked;
