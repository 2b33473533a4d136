/** Auto-configuration of Holdfast for Spring Boot 3.5 and 4. */
@NullMarked
package holdfast.boot;

import org.jspecify.annotations.NullMarked;
