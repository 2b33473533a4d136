/** The interfaces that a module for a Redis library implements, so that the client can use the library's connections. */
@NullMarked
package holdfast.spi;

import org.jspecify.annotations.NullMarked;
