package holdfast;

/** Waiting would close a cycle of waits, so the request was refused. */
public final class DeadlockException extends HoldfastException {
    private static final long serialVersionUID = 1L;

    public DeadlockException(String message) {
        super(message, null);
    }
}
