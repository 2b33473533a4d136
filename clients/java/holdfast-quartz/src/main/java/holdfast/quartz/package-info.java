/** Quartz jobs that run once in a fleet. */
@NullMarked
package holdfast.quartz;

import org.jspecify.annotations.NullMarked;
