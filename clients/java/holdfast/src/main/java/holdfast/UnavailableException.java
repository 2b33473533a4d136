package holdfast;

import org.jspecify.annotations.Nullable;

/** The server did not answer in time. What was asked may have happened nevertheless. */
public final class UnavailableException extends HoldfastException {
    private static final long serialVersionUID = 1L;

    public UnavailableException(String message, @Nullable Throwable cause) {
        super(message, cause);
    }
}
