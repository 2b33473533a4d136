package holdfast;

import org.jspecify.annotations.Nullable;

/** What every error of the client extends. As it is: the server refused a command, or the client is closed. */
public class HoldfastException extends RuntimeException {
    private static final long serialVersionUID = 1L;

    public HoldfastException(String message, @Nullable Throwable cause) {
        super(message, cause);
    }
}
