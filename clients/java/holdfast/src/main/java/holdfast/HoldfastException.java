package holdfast;

import org.jspecify.annotations.Nullable;

/** The superclass of the client's exceptions. An instance of this class itself means that the server refused a command, or that the client was closed during a call. */
public class HoldfastException extends RuntimeException {
    private static final long serialVersionUID = 1L;

    public HoldfastException(String message, @Nullable Throwable cause) {
        super(message, cause);
    }
}
