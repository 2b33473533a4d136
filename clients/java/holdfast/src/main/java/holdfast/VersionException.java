package holdfast;

/** The server's module is too old for this client, or this client is too old for the module. */
public final class VersionException extends HoldfastException {
    private static final long serialVersionUID = 1L;

    public VersionException(String message) {
        super(message, null);
    }
}
