package holdfast;

/** The server does not know the LOCK commands: it has not loaded the module. */
public final class ModuleNotLoadedException extends HoldfastException {
    private static final long serialVersionUID = 1L;

    public ModuleNotLoadedException(String message) {
        super(message, null);
    }
}
