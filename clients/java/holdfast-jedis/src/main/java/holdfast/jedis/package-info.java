/** Holdfast over the connections of Jedis. */
@NullMarked
package holdfast.jedis;

import org.jspecify.annotations.NullMarked;
