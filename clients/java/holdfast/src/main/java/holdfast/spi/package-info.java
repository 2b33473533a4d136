/** What a Redis library has to provide so that the client can use its connections. */
@NullMarked
package holdfast.spi;

import org.jspecify.annotations.NullMarked;
