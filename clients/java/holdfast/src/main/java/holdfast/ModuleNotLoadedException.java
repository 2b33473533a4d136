package holdfast;

/** The server does not know the commands: the module is not loaded there. */
public final class ModuleNotLoadedException extends HoldfastException {
    private static final long serialVersionUID = 1L;

    public ModuleNotLoadedException(String message) {
        super(message, null);
    }
}
