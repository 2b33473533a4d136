package holdfast;

import java.util.List;
import java.util.function.BiConsumer;
import java.util.function.Supplier;
import org.jspecify.annotations.Nullable;

/** Commands that go over one connection in one pipeline. The reply to the first one is the outcome. All methods are called in steps. */
final class Request {
    static final int RENEW = 0;
    static final int RELEASE = 1;
    static final int OTHER = 2;

    final int priority;
    /** Returns the commands when they are about to be written; none, if the request is no longer needed. */
    final Supplier<List<byte[][]>> commands;
    private final BiConsumer<Request, @Nullable Object> then;
    /** ASKING goes before each command: the node is importing the slot. */
    boolean asking;
    /** The connection that the commands were written to; null before. */
    Pool.@Nullable Connection connection;
    /** When they were written. */
    long sent;
    /** How many replies have not been read. */
    int unread;
    private Serial.@Nullable Timer limit;
    /** No connection was free in time. */
    boolean expired;
    /** The outcome was passed on, or the request is no longer needed. */
    boolean ended;

    /**
     * Makes a request.
     *
     * @param then receives the outcome: the reply, or a {@link Throwable} if no reply arrived
     */
    Request(int priority, Supplier<List<byte[][]>> commands, BiConsumer<Request, @Nullable Object> then) {
        this.priority = priority;
        this.commands = commands;
        this.then = then;
    }

    /** Sets the timer of the action that follows unless all replies are read in time. */
    void limit(Serial.Timer timer) {
        forgetLimit();
        limit = timer;
    }

    void forgetLimit() {
        if (limit != null) {
            limit.cancel();
        }
    }

    /** Passes on the outcome, once. */
    void end(@Nullable Object outcome) {
        if (connection == null || unread == 0) {
            forgetLimit();
        }
        if (!ended) {
            ended = true;
            then.accept(this, outcome);
        }
    }
}
