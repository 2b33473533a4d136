package holdfast;

import java.util.List;
import org.jspecify.annotations.Nullable;

/** Commands that go over one connection in one go. All methods run in a step. */
abstract class Request {
    static final int RENEW = 0;
    static final int RELEASE = 1;
    static final int OTHER = 2;

    final int priority;
    /** The connection that it was written to. */
    Pool.@Nullable Connection connection;
    /** All replies have been read, or it failed, or nobody wants the replies any more. */
    boolean done;
    /** It goes to a node that is only importing the slot. */
    boolean asking;

    Request(int priority) {
        this.priority = priority;
    }

    /** The commands, made when they are about to be written; empty if they are not wanted any more. */
    abstract List<byte[][]> write(long now);

    /** The reply to a command. */
    abstract void answered(int index, @Nullable Object reply);

    /** No reply will come. Whether it was written says {@link #connection}. */
    abstract void failed(Throwable why);

    /** It was not written, because it was not wanted any more. */
    void dropped() {}
}
