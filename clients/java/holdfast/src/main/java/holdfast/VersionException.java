package holdfast;

/** The module of the server is too old for this client, or this client too old for it. */
public final class VersionException extends HoldfastException {
    private static final long serialVersionUID = 1L;

    public VersionException(String message) {
        super(message, null);
    }
}
