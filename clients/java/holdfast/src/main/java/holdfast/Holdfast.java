package holdfast;

import holdfast.spi.ConnectorProvider;
import holdfast.spi.Node;
import holdfast.spi.RedisConnector;
import java.security.SecureRandom;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Optional;
import java.util.ServiceLoader;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executor;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.ThreadFactory;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Consumer;
import java.util.function.Supplier;
import org.jspecify.annotations.Nullable;

/**
 * A client for distributed locks in Redis or Valkey. An application makes one from its Redis client.
 *
 * <p>It opens connections of its own, as the Redis client does. It is safe for use by many threads, platform or virtual.
 * {@link #close} releases its locks, as does a normal exit of the program unless {@link Builder#closeAtExit} says otherwise.
 */
public final class Holdfast implements AutoCloseable {
    private static final SecureRandom RANDOM = new SecureRandom();
    private static final String FORCE = "LOCK.FORCE";
    private static final int FEWEST_SWEPT = 64;
    private static final long CLOSING_MS = 2000;

    final Serial serial;
    final RedisConnector connector;
    final int maxConnections;
    final Duration lease;
    /** Of calls that have no time of their own, in ns. */
    final long timeout;
    final ExecutorService worker;
    final Set<Acquisition> acquisitions = ConcurrentHashMap.newKeySet();
    final String id = random();
    final Map<FencedLock.Place, FencedLock.Holding> holdings = new ConcurrentHashMap<>();
    /** The number of holdings above which those of ended threads are removed, if they are lost. */
    private volatile int sweepAbove = FEWEST_SWEPT;
    private final Executor callbacks;
    private final List<HoldfastListener> listeners;
    private final Map<Node, Pool> pools = new HashMap<>();
    private final Map<Integer, Node> moved = new HashMap<>();
    final Turns turns;
    /** Calls that have not ended. */
    private final Set<CompletableFuture<?>> calls = ConcurrentHashMap.newKeySet();
    /** {@link #close} has begun. */
    private final AtomicBoolean closed = new AtomicBoolean();
    private final @Nullable Thread hook;
    /** The connections are closed. */
    private volatile boolean shut;

    private Holdfast(Builder builder) {
        serial = new Serial(builder.clock == null ? new SystemClock() : builder.clock);
        turns = new Turns(serial);
        worker = builder.worker == null ? Executors.newCachedThreadPool(threads("holdfast-worker")) : builder.worker;
        connector = builder.connector;
        maxConnections = builder.maxConnections;
        lease = builder.lease;
        timeout = builder.timeout.toNanos();
        callbacks = builder.callbacks == null ? worker : builder.callbacks;
        listeners = new CopyOnWriteArrayList<>(builder.listeners);
        hook = builder.closesAtExit ? new Thread(this::close, "holdfast-exit") : null;
        if (hook != null) {
            Runtime.getRuntime().addShutdownHook(hook);
        }
    }

    /**
     * Makes a client with default settings.
     *
     * @param redisClient a client of Lettuce or Jedis; {@code holdfast-lettuce} or {@code holdfast-jedis} must be on the class path or module path
     */
    public static Holdfast create(Object redisClient) {
        return builder(redisClient).build();
    }

    /** Returns a builder of a client that opens connections as this client of Lettuce or Jedis does. */
    public static Builder builder(Object redisClient) {
        for (ConnectorProvider provider : ServiceLoader.load(ConnectorProvider.class, Holdfast.class.getClassLoader())) {
            Optional<RedisConnector> connector = provider.connector(redisClient);
            if (connector.isPresent()) {
                return new Builder(connector.get());
            }
        }
        throw new IllegalArgumentException("no module supports a Redis client of " + redisClient.getClass() + ": add holdfast-lettuce or holdfast-jedis");
    }

    /** Returns a builder of a client that uses this connector. */
    public static Builder builder(RedisConnector connector) {
        return new Builder(connector);
    }

    /** Returns the mutex of this name, which the client renews while it is held. */
    public NamedLock lock(String name) {
        return lock(LockSpec.of(name));
    }

    /** Returns the lock that this describes. */
    public NamedLock lock(LockSpec spec) {
        return new NamedLock(this, spec);
    }

    /** Returns several mutexes that are acquired together or not at all; in a cluster, their names must be in one slot. */
    public NamedLock lockAll(String... names) {
        return lock(LockSpec.of(names));
    }

    /** Acquires several mutexes together, and waits for at most this time. */
    public Hold acquireAll(List<String> names, Duration wait) throws InterruptedException {
        return lockAll(names.toArray(new String[0])).acquire(wait);
    }

    /** Returns a semaphore: each hold takes one permit. All clients must name the same number of permits. */
    public NamedLock semaphore(String name, int permits) {
        return lock(LockSpec.builder(name).limit(permits).build());
    }

    /** Returns a re-entrant lock that belongs to the thread that acquires it, as those of {@code java.util.concurrent.locks} do. */
    public FencedLock fencedLock(String name) {
        return fencedLock(LockSpec.of(name));
    }

    /** Returns a re-entrant lock with these terms: one name, a mutex or shared. */
    public FencedLock fencedLock(LockSpec spec) {
        return fencedLock(spec, null);
    }

    /** The same in a scope, whose locks exclude those of other scopes also in one thread: an object, compared by {@code equals}; null: none. */
    public FencedLock fencedLock(LockSpec spec, @Nullable Object scope) {
        if (spec.names().size() != 1 || spec.limit() > 1) {
            throw new IllegalArgumentException("a FencedLock must have one name, and be a mutex or shared, got " + spec);
        }
        return new FencedLock(this, spec, scope);
    }

    /** Returns a reader-writer lock, whose two locks are re-entrant and belong to threads. */
    public FencedReadWriteLock readWriteLock(String name) {
        return new FencedReadWriteLock(fencedLock(LockSpec.builder(name).shared().build()), fencedLock(name));
    }

    /**
     * Takes part in the election of a leader until the returned object is closed.
     *
     * @param name the name of the election, a key of the server
     * @param value identifies this candidate to readers of {@link #leader}, such as its address; at most 400 bytes
     * @param onElected is called with the term's hold when this candidate leads; its fence is the term's number
     * @param onLost is called when this candidate has lost the lead; without {@code onElected}, if the term had ended before that could be called
     */
    public Election elect(String name, String value, Consumer<Hold> onElected, Consumer<LossReason> onLost) {
        return elect(LockSpec.builder(name).lease(Duration.ofSeconds(5)).label(value).build(), onElected, onLost);
    }

    /** The same with other terms, such as another lease, {@code ephemeral} or {@code replicas}: a renewed mutex, whose label is the value. */
    public Election elect(LockSpec spec, Consumer<Hold> onElected, Consumer<LossReason> onLost) {
        if (!spec.isMutex() || !spec.renew()) {
            throw new IllegalArgumentException("an election must be a renewed mutex of one name, got " + spec);
        }
        return new Election(lock(spec), onElected, onLost);
    }

    /** Returns the current leader, as the server says. */
    public Optional<Election.Leader> leader(String name) {
        return info(name).filter(info -> !info.holders().isEmpty()).map(info -> Election.Leader.of(info.holders().get(0)));
    }

    /** Reads the leader every second until the returned object is closed, and calls {@code onChange} with the first one and after every change. */
    public AutoCloseable observe(String name, Consumer<Optional<Election.Leader>> onChange) {
        return new Election.Observer(this, name, onChange);
    }

    /** Returns the state of a lock at the server; empty if the lock is neither held nor waited for. */
    public Optional<LockInfo> info(String name) {
        return Optional.ofNullable(query("LOCK.INFO", name)).map(LockInfo::of);
    }

    /** Returns the waiters of a lock in the order of the queue; at most 1,000. */
    public List<LockInfo.Waiter> waiters(String name) {
        return Reply.maps(query("LOCK.WAITERS", name)).stream().map(LockInfo.Waiter::of).toList();
    }

    /**
     * Releases the lock for all its holders. Returns whether it was held.
     *
     * @throws UnavailableException if the server did not reply: whether the lock was released is unknown
     */
    public boolean force(String name) {
        boolean forced = query(FORCE, name) instanceof Long released && released > 0;
        // This client's own holds notice the loss before the call returns.
        acquisitions.stream().filter(it -> it.spec.names().contains(name)).map(this::check).forEach(checked -> checked.handle((still, why) -> null).join());
        return forced;
    }

    /** Returns the locks that this client certainly holds now. */
    public List<HeldLock> holds() {
        return acquisitions.stream().filter(Acquisition::isHeld).map(it -> new HeldLock(it.spec.names(), it.owner, it.token, Duration.ofNanos(Math.max(0, it.certain - serial.now())))).toList();
    }

    /**
     * A lock that this client holds.
     *
     * @param remaining for how long it is certainly held without another renewal
     */
    public record HeldLock(List<String> names, String owner, long fence, Duration remaining) {}

    /** Cancels waits, releases holds, and closes the connections. Returns within four seconds. */
    @Override
    public void close() {
        if (!closed.compareAndSet(false, true)) {
            return;
        }
        CompletableFuture<Void> drained = new CompletableFuture<>();
        serial.run(() -> {
            List.copyOf(acquisitions).forEach(it -> it.cancel(new HoldfastException("the client was closed", null)));
            drain(drained);
        });
        drained.completeOnTimeout(null, CLOSING_MS, TimeUnit.MILLISECONDS).join();
        CompletableFuture<Void> ended = new CompletableFuture<>();
        serial.run(() -> {
            shut = true;
            pools.values().forEach(Pool::close);
            acquisitions.forEach(Acquisition::disown);
            calls.forEach(call -> call.completeExceptionally(new UnavailableException("the client was closed before the server replied", null)));
            serial.clock.close();
            ended.complete(null);
        });
        ended.completeOnTimeout(null, CLOSING_MS, TimeUnit.MILLISECONDS).join();
        worker.shutdown();
        connector.close();
        try {
            if (hook != null) {
                Runtime.getRuntime().removeShutdownHook(hook);
            }
        } catch (IllegalStateException exiting) {
            Log.write(log -> log.debug("closed by the exit of the program"));
        }
    }

    private void drain(CompletableFuture<Void> drained) {
        if (acquisitions.isEmpty() || shut) {
            drained.complete(null);
        } else {
            serial.after(2 * Rules.MS, () -> drain(drained));
        }
    }

    boolean isClosed() {
        return closed.get();
    }

    boolean isShut() {
        return shut;
    }

    /** Notes what the current thread holds. When the number of entries has doubled, removes those of ended threads that have lost their holds. */
    void keep(FencedLock.Place place, FencedLock.Holding holding) {
        holdings.put(place, holding);
        if (holdings.size() > sweepAbove) {
            holdings.values().removeIf(it -> !it.thread().isAlive() && !it.hold().acquisition.isCertain());
            sweepAbove = Math.max(FEWEST_SWEPT, 2 * holdings.size());
        }
    }

    /** Returns whether an owner is one of a lock that this client certainly holds now, by the monotonic clock. */
    boolean isOwner(String owner) {
        return acquisitions.stream().anyMatch(it -> it.owner.equals(owner) && it.isCertain());
    }

    // ---- Acquisitions and requests ----

    Acquisition start(LockSpec spec, long wait, @Nullable String actor) {
        String label = spec.label();
        String owner = actor != null ? actor + "##" + random() : label != null && !label.isEmpty() ? LockSpec.escape(label) + "#" + random() : random();
        Acquisition acquisition = new Acquisition(this, spec, owner, wait);
        serial.run(acquisition::begin);
        return acquisition;
    }

    Pool poolOf(int slot) {
        Node node = connector.isCluster() ? moved.get(slot) : Node.PRIMARY;
        return pool(node == null ? connector.locate(slot) : node);
    }

    Pool pool(Node node) {
        return pools.computeIfAbsent(node, it -> new Pool(this, it));
    }

    void moved(int slot, Node node) {
        moved.put(slot, node);
    }

    /** A connection to the node broke or could not be opened: another node may serve its slots now. */
    void connectionLost(Node node) {
        moved.values().removeIf(node::equals);
        connector.refresh();
    }

    /** Sends a command in a step, and repeats it within the client's timeout. */
    CompletableFuture<@Nullable Object> ask(String name, Object... command) {
        CompletableFuture<@Nullable Object> future = new CompletableFuture<>();
        Route route = new Route(this, name, lease.toNanos(), false);
        // A repetition could release the hold of the next owner.
        route.repeatsLost = !command[0].equals(FORCE);
        route.repeat(Request.OTHER, serial.now() + timeout, () -> List.<byte[][]>of(Reply.command(command)), reply -> true, answer -> {
            if (answer.verdict() == Verdict.YES || answer.verdict() == Verdict.NIL) {
                future.complete(answer.reply());
            } else {
                future.completeExceptionally(answer.verdict().passes() ? late(command[0], answer.error()) : answer.error());
            }
        });
        return future;
    }

    private static UnavailableException late(Object command, @Nullable Throwable why) {
        return new UnavailableException(command + ": the server did not reply in time", why);
    }

    private @Nullable Object query(String command, String name) {
        Objects.requireNonNull(name, "name");
        if (isClosed()) {
            throw new IllegalStateException("the client is closed");
        }
        return await(call(future -> ask(name, command, name).whenComplete((reply, why) -> pass(reply, why, future)), () -> late(command, null)));
    }

    CompletableFuture<Boolean> check(Acquisition acquisition) {
        return call(acquisition::check, () -> late("LOCK.INFO", null));
    }

    /** Runs a step that completes a future. After the client's timeout, the future fails. */
    <T> CompletableFuture<T> call(Consumer<CompletableFuture<T>> step, Supplier<Throwable> late) {
        return call(timeout, step, late);
    }

    /** The same with another timeout, in ns. */
    <T> CompletableFuture<T> call(long limit, Consumer<CompletableFuture<T>> step, Supplier<Throwable> late) {
        CompletableFuture<T> future = new CompletableFuture<>();
        calls.add(future);
        future.whenComplete((outcome, why) -> calls.remove(future));
        serial.run(() -> {
            try {
                step.accept(future);
            } catch (RuntimeException | Error why) {
                future.completeExceptionally(why);
            }
            if (!future.isDone()) {
                Serial.Timer timer = serial.after(limit, () -> future.completeExceptionally(late.get()));
                future.whenComplete((outcome, why) -> serial.run(timer::cancel));
            }
        });
        return future;
    }

    /** Completes a future with an outcome. Returns false if it was completed before. */
    static <T> boolean pass(@Nullable T outcome, @Nullable Throwable why, CompletableFuture<T> to) {
        return why == null ? to.complete(outcome) : to.completeExceptionally(why);
    }

    /**
     * Runs a callback of the application on a thread for callbacks. If the application's executor fails, since it is full for example, or would run the
     * callback in this step, a thread of the client runs it. If no thread can be had, the callback is tried again every second until the client is closed.
     */
    void callback(Runnable action) {
        if (!tryCallback(action)) {
            inASecond(action);
        }
    }

    /** The same once: returns false if no thread can be had. */
    private boolean tryCallback(Runnable action) {
        Runnable guarded = () -> {
            try {
                action.run();
            } catch (RuntimeException why) {
                Log.write(log -> log.error("a callback of the application failed", why));
            }
        };
        Runnable unlessStep = () -> {
            if (serial.isStep()) {
                throw new RejectedExecutionException("the executor runs callbacks in the calling thread");
            }
            guarded.run();
        };
        for (Executor executor : List.of(callbacks, worker)) {
            try {
                executor.execute(executor == worker ? guarded : unlessStep);
                return true;
            } catch (RuntimeException | Error why) {
                Log.write(log -> log.debug("no thread for a callback", why));
            }
        }
        return false;
    }

    /** Completes a future of the application on a thread for callbacks, or here if no thread can be had. */
    void deliver(Runnable completion) {
        if (!tryCallback(completion)) {
            completion.run();
        }
    }

    /** Runs an action as {@link #callback} does, in a second. */
    void inASecond(Runnable action) {
        serial.run(() -> serial.after(Rules.SECOND, () -> callback(action)));
    }

    /** Calls the listeners. */
    void publish(Consumer<HoldfastListener> event) {
        // One callback for each: the others are called even if one throws.
        listeners.forEach(listener -> callback(() -> event.accept(listener)));
    }

    // ---- Waiting for futures ----

    /** Waits for a future, whether or not the thread is interrupted. */
    static <T> @Nullable T await(CompletableFuture<@Nullable T> future) {
        try {
            return future.join();
        } catch (CompletionException why) {
            throw failure(why.getCause());
        }
    }

    /** Waits for the outcome of an acquisition, which is withdrawn if the thread is interrupted. Returns null if a try found the lock held. */
    @Nullable Hold granted(Acquisition acquisition) throws InterruptedException {
        try {
            return holdOf(result(acquisition.result));
        } catch (InterruptedException why) {
            serial.run(() -> acquisition.cancel(new NotAcquiredException("interrupted", why)));
            throw why;
        }
    }

    @Nullable Hold grantedUninterruptibly(Acquisition acquisition) {
        return holdOf(await(acquisition.result));
    }

    static @Nullable Hold holdOf(@Nullable Acquisition granted) {
        return granted == null ? null : new Hold(granted);
    }

    static <T> @Nullable T result(CompletableFuture<@Nullable T> future) throws InterruptedException {
        try {
            return future.get();
        } catch (ExecutionException why) {
            throw failure(why.getCause());
        }
    }

    private static RuntimeException failure(Throwable cause) {
        if (cause instanceof RuntimeException known) {
            // The trace of the caller says more than that of the step.
            known.fillInStackTrace();
            return known;
        }
        return new HoldfastException(String.valueOf(cause.getMessage()), cause);
    }

    static ThreadFactory threads(String name) {
        return task -> {
            Thread thread = new Thread(task, name);
            thread.setDaemon(true);
            return thread;
        };
    }

    /** 128 bits from the operating system's generator (B1). */
    static String random() {
        byte[] bytes = new byte[16];
        RANDOM.nextBytes(bytes);
        return HexFormat.of().formatHex(bytes);
    }

    /** Builds a client. */
    public static final class Builder {
        private final RedisConnector connector;
        private final List<HoldfastListener> listeners = new ArrayList<>();
        private int maxConnections = 32;
        private Duration lease = Duration.ofSeconds(10);
        private Duration timeout = Duration.ofSeconds(5);
        private boolean closesAtExit = true;
        private @Nullable Executor callbacks;
        private @Nullable Clock clock;
        private @Nullable ExecutorService worker;

        private Builder(RedisConnector connector) {
            this.connector = Objects.requireNonNull(connector, "connector");
        }

        /** Sets the greatest number of connections to a node: at least 3, by default 32. */
        public Builder maxConnections(int maxConnections) {
            if (maxConnections < 3) {
                throw new IllegalArgumentException("maxConnections must be at least 3, got " + maxConnections);
            }
            this.maxConnections = maxConnections;
            return this;
        }

        /** Sets the lease of locks that name none, by default 10 s. A killed process blocks others for at most that long. */
        public Builder lease(Duration lease) {
            this.lease = LockSpec.checkTime("lease", lease);
            return this;
        }

        /** Sets the timeout of calls that have no time of their own, by default 5 s: tries, releases, renewals and queries. */
        public Builder timeout(Duration timeout) {
            this.timeout = LockSpec.checkTime("timeout", timeout);
            return this;
        }

        /**
         * Sets the executor of the application's callbacks. By default they run on daemon threads of the client, as do those that this executor rejects or
         * would run in the calling thread.
         */
        public Builder callbacks(Executor callbacks) {
            this.callbacks = callbacks;
            return this;
        }

        /** Sets whether an exit of the program closes the client, by default true. Set it to false if the program closes the client after the last use of its locks. */
        public Builder closeAtExit(boolean closesAtExit) {
            this.closesAtExit = closesAtExit;
            return this;
        }

        /** For tests: sets the clock, and the executor that opens connections. */
        Builder controlledBy(Clock clock, ExecutorService worker) {
            this.clock = clock;
            this.worker = worker;
            return this;
        }

        /** Adds a listener, for metrics and logs. */
        public Builder listener(HoldfastListener listener) {
            listeners.add(Objects.requireNonNull(listener, "listener"));
            return this;
        }

        public Holdfast build() {
            return new Holdfast(this);
        }
    }
}
