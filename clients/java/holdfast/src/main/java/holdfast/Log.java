package holdfast;

import java.util.function.Consumer;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** The client's log. A logger that throws ends no step: the client must go on, and report losses. */
final class Log {
    private static final Logger LOGGER = LoggerFactory.getLogger(Holdfast.class);

    private Log() {}

    static void write(Consumer<Logger> line) {
        try {
            line.accept(LOGGER);
        } catch (RuntimeException | Error broken) {
            // There is no other place to report it.
            return;
        }
    }
}
