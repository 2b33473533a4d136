/** A lock registry for Spring Integration. */
@NullMarked
package holdfast.integration;

import org.jspecify.annotations.NullMarked;
