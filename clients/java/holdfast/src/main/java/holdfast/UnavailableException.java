package holdfast;

import org.jspecify.annotations.Nullable;

/** The server could not be reached, did not reply in time, or can't serve the request for now. The request may have been executed nevertheless. */
public final class UnavailableException extends HoldfastException {
    private static final long serialVersionUID = 1L;

    public UnavailableException(String message, @Nullable Throwable cause) {
        super(message, cause);
    }
}
