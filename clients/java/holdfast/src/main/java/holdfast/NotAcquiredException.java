package holdfast;

import org.jspecify.annotations.Nullable;

/** The lock was not granted in time. The cause is the last error of the server or the network, or null. */
public final class NotAcquiredException extends HoldfastException {
    private static final long serialVersionUID = 1L;

    public NotAcquiredException(String message, @Nullable Throwable cause) {
        super(message, cause);
    }
}
