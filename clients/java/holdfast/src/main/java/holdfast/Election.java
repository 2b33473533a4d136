package holdfast;

import java.util.Objects;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;

/** A candidate in an election, until it is closed. A leader that exits normally hands over at once; one that is killed is replaced a lease (5 s) later. */
public final class Election implements AutoCloseable {
    private final NamedLock lock;
    private final Consumer<Hold> onElected;
    private final Consumer<LossReason> onLost;
    private volatile boolean closed;
    private volatile @Nullable CompletableFuture<Hold> candidacy;
    private volatile @Nullable Hold term;

    Election(NamedLock lock, Consumer<Hold> onElected, Consumer<LossReason> onLost) {
        this.lock = lock;
        this.onElected = Objects.requireNonNull(onElected, "onElected");
        this.onLost = Objects.requireNonNull(onLost, "onLost");
        stand();
    }

    private void stand() {
        if (closed) {
            return;
        }
        CompletableFuture<Hold> next = lock.acquireAsync();
        candidacy = next;
        if (closed) {
            next.cancel(true);
        }
        next.whenComplete((hold, why) -> {
            if (hold == null) {
                if (!closed && !lock.client.isClosed()) {
                    Log.write(log -> log.error("the candidacy for '{}' failed; it is repeated in a second", lock.spec().title(), why));
                    lock.client.inASecond(this::stand);
                }
                return;
            }
            term = hold;
            if (closed) {
                close();
            } else {
                lock.client.callback(() -> lead(hold));
            }
        });
    }

    private void lead(Hold hold) {
        boolean isOver = hold.lossReason() != null;
        // Only from here on, since executors may run callbacks in any order; and before onElected, which may last as long as the term.
        hold.acquisition.end.thenAccept(loss -> lock.client.callback(() -> {
            term = null;
            if (!closed) {
                try {
                    if (loss != null) {
                        onLost.accept(loss);
                    }
                } finally {
                    stand();
                }
            }
        }));
        if (!isOver && !closed) {
            onElected.accept(hold);
        }
    }

    /** Returns whether this candidate certainly leads now. */
    public boolean isLeader() {
        Hold hold = term;
        return hold != null && hold.isHeld();
    }

    /** Withdraws the candidacy or releases the lead. */
    @Override
    public void close() {
        closed = true;
        CompletableFuture<Hold> pending = candidacy;
        if (pending != null) {
            pending.cancel(true);
        }
        Hold hold = term;
        term = null;
        if (hold != null) {
            try {
                hold.close();
            } catch (LockLostException lost) {
                Log.write(log -> log.debug("the term had ended before it was closed", lost));
            }
        }
    }

    /**
     * The current leader.
     *
     * @param value what the candidate has set; empty if it set nothing
     * @param fence the number of the leader's term
     */
    public record Leader(String value, long fence) {
        static Leader of(LockInfo.Holder holder) {
            int end = holder.owner().lastIndexOf('#');
            return new Leader(end < 0 ? "" : LockSpec.unescape(holder.owner().substring(0, end)), holder.token());
        }
    }

    /** Reads the leader every second. */
    static final class Observer implements AutoCloseable {
        private final Holdfast client;
        private final String name;
        private final Consumer<Optional<Leader>> onChange;
        private @Nullable Optional<Leader> last;
        private volatile boolean closed;

        Observer(Holdfast client, String name, Consumer<Optional<Leader>> onChange) {
            this.client = client;
            this.name = Objects.requireNonNull(name, "name");
            this.onChange = Objects.requireNonNull(onChange, "onChange");
            client.callback(this::look);
        }

        private void look() {
            if (closed || client.isClosed()) {
                return;
            }
            try {
                Optional<Leader> now = client.leader(name);
                if (!now.equals(last)) {
                    last = now;
                    onChange.accept(now);
                }
            } catch (HoldfastException unknown) {
                Log.write(log -> log.debug("the leader of '{}' could not be read", name, unknown));
            } finally {
                client.inASecond(this::look);
            }
        }

        @Override
        public void close() {
            closed = true;
        }
    }
}
