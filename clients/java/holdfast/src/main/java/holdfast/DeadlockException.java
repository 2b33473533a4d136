package holdfast;

/** The request was refused because its wait would never end: owners would wait for each other, or a thread for itself. */
public final class DeadlockException extends HoldfastException {
    private static final long serialVersionUID = 1L;

    public DeadlockException(String message) {
        super(message, null);
    }
}
