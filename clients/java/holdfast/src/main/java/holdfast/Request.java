package holdfast;

import java.util.List;
import java.util.function.BiConsumer;
import java.util.function.Supplier;
import org.jspecify.annotations.Nullable;

/** Commands that go over one connection in one pipeline; the reply to the first one is the outcome. Everything runs in steps. */
final class Request {
    static final int RENEW = 0;
    static final int RELEASE = 1;
    static final int OTHER = 2;

    final int priority;
    /** Makes the commands when they are about to be written; none, if they are not wanted any more. */
    final Supplier<List<byte[][]>> commands;
    private final BiConsumer<Request, @Nullable Object> then;
    /** It goes to a node that is only importing the slot. */
    boolean asking;
    /** The connection that it was written to, and when. */
    Pool.@Nullable Connection connection;
    long sent;
    /** How many of its replies have not been read. */
    int unread;
    private Serial.@Nullable Timer limit;
    /** It found no connection in its time. */
    boolean expired;
    /** The outcome is known, or not wanted any more. */
    boolean ended;

    /**
     * A request.
     *
     * @param then receives the outcome: the reply, or a {@link Throwable} if none came
     */
    Request(int priority, Supplier<List<byte[][]>> commands, BiConsumer<Request, @Nullable Object> then) {
        this.priority = priority;
        this.commands = commands;
        this.then = then;
    }

    /** What is to be done unless all replies have been read by then. */
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
