package holdfast;

/** The lock was lost before it was released: another client may hold it. */
public final class LockLostException extends HoldfastException {
    private static final long serialVersionUID = 1L;
    private final LossReason reason;

    public LockLostException(String message, LossReason reason) {
        super(message, null);
        this.reason = reason;
    }

    /** Why it was lost. */
    public LossReason reason() {
        return reason;
    }
}
