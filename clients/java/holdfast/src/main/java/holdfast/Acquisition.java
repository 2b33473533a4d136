package holdfast;

import static java.nio.charset.StandardCharsets.UTF_8;

import holdfast.spi.Node;
import holdfast.spi.RedisError;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;
import org.slf4j.event.Level;

/**
 * One call of the application that asks for a lock, and all that follows until the lock is released or lost: the state machine of
 * {@code docs/client-protocol.md}, whose rules (B…) the comments name. Everything runs in steps, but for what is said to be for all threads.
 */
final class Acquisition {
    static final long ENDLESS = Long.MAX_VALUE / 2;
    private static final Logger LOG = LoggerFactory.getLogger(Holdfast.class);
    private static final long MS = 1_000_000L;
    private static final long SECOND = 1_000 * MS;
    /** A wait without an answer for so long is asked for again over another connection (B11). */
    private static final long QUIET = 2 * SECOND;
    private static final long GRACE = 250 * MS;
    /** A shorter lease may be over before its grant can be confirmed: it counts as granted, and is lost when its time is over. */
    private static final long SHORT = 100 * MS;
    /** A wait without a limit is one of an hour, again and again (B2). */
    private static final long HOUR_MS = 3_600_000L;

    enum State { WAITING, HELD, RELEASING, RELEASED, WITHDRAWING, LOST }

    final Holdfast client;
    final LockSpec spec;
    final String owner;
    private final byte[] ownerBytes;
    private final List<byte[]> keys = new ArrayList<>();
    private final int slot;
    private final boolean waits;
    private final long began;
    private final long deadline;
    /** Completed in a step: what depends on it runs no code of the application there. */
    final CompletableFuture<Hold> result = new CompletableFuture<>();

    volatile State state = State.WAITING;
    volatile long token;
    volatile long lease;
    volatile long certain;
    private volatile long wallCertain;
    volatile @Nullable LossReason reason;
    volatile boolean renews;
    private long heldSince;

    private @Nullable Pool placePool;
    private boolean hasPlace;
    long nextPoll;
    private boolean queuedHere;
    /** It waited in this client before it was asked for. */
    boolean delayed;
    private @Nullable Ask current;
    private final List<Ask> underWay = new ArrayList<>();
    private boolean asked;
    private long lastAsked;
    /** A connection broke under a request: a stale ACQUIRE may still be on its way. */
    private boolean broke;
    private boolean replacedAtOnce;
    /** Redirects or SUPERSEDED in a row: the second takes the pause (B25). */
    private int inARow;
    private @Nullable Node askNode;
    private @Nullable Throwable lastError;

    private Pool.@Nullable Connection dedicated;
    private @Nullable Renewal renewal;
    private Serial.@Nullable Timer deadlineTimer;
    private Serial.@Nullable Timer renewTimer;
    private Serial.@Nullable Timer certainTimer;
    private final List<CompletableFuture<Void>> renewed = new ArrayList<>();
    private final List<Consumer<LossReason>> onLost = new ArrayList<>();
    private @Nullable Release release;
    private int withdrawn;

    Acquisition(Holdfast client, LockSpec spec, String owner, long wait, Duration lease) {
        this.client = client;
        this.spec = spec;
        this.owner = owner;
        ownerBytes = owner.getBytes(UTF_8);
        spec.names().forEach(name -> keys.add(name.getBytes(UTF_8)));
        slot = client.connector.isCluster() ? Reply.slot(keys.get(0)) : 0;
        waits = wait > 0;
        renews = spec.renew();
        began = client.serial.now();
        deadline = wait >= ENDLESS ? ENDLESS : began + (waits ? wait : client.timeout);
        this.lease = Math.max(MS, lease.toNanos());
    }

    // ---- Asking ----

    void begin() {
        if (client.isClosed()) {
            end(new IllegalStateException("the client is closed"));
            return;
        }
        client.acquisitions.add(this);
        if (deadline < ENDLESS) {
            deadlineTimer = client.serial.after(deadline - client.serial.now(), this::timeOver);
        }
        if (waits && spec.isMutex()) {
            queuedHere = true;
            client.queueHere(this);
        } else {
            ask();
        }
    }

    /** Of this client's waits for the mutex, this one is the oldest now (B31). */
    void isOldest() {
        if (state == State.WAITING) {
            ask();
        }
    }

    private void ask() {
        if (state != State.WAITING || token != 0 || (asked && client.serial.now() >= deadline)) {
            return;
        }
        Pool pool = route();
        boolean waiting = false;
        if (waits) {
            if (placePool != pool) {
                leavePlace();
                placePool = pool;
                hasPlace = pool.takePlace(this);
            }
            waiting = hasPlace;
        }
        submit(new Ask(pool, waiting ? -1 : 0));
    }

    void gotPlace() {
        hasPlace = true;
        if (current == null || current.done) {
            ask();
        }
    }

    /** It has no place for a wait: it asks with a short one (B30). Returns false if it does not ask now. */
    boolean poll() {
        Pool pool = placePool;
        boolean asks = pool != null && state == State.WAITING && token == 0 && !hasPlace && (current == null || current.done) && client.serial.now() < deadline;
        if (asks) {
            submit(new Ask(pool, 100));
        }
        return asks;
    }

    /** Where the next request goes: to the node that serves the slot, or once to one that an ASK named. */
    private Pool route() {
        return askNode == null ? client.poolOf(slot) : client.pool(askNode);
    }

    private boolean takeAsking() {
        boolean asking = askNode != null;
        askNode = null;
        return asking;
    }

    /** Follows a redirect; false if the error is none. */
    private boolean redirected(RedisError error) {
        Node node = client.redirect(error);
        askNode = node != null && error.code().equals("ASK") ? node : null;
        return node != null;
    }

    private void submit(Ask ask) {
        current = ask;
        ask.pool.submit(ask);
    }

    private void again(long delay) {
        client.serial.after(delay, () -> {
            if (current == null || current.done) {
                ask();
            }
        });
    }

    private void leavePlace() {
        if (placePool != null) {
            placePool.leavePlace(this, hasPlace);
            placePool = null;
            hasPlace = false;
        }
    }

    private final class Ask extends Request {
        final Pool pool;
        /** -1: WAIT with what is left; 0: no WAIT. */
        private final long wait;
        private long sent;
        private long waitMs;
        private Serial.@Nullable Timer quietTimer;

        Ask(Pool pool, long wait) {
            super(OTHER);
            this.pool = pool;
            this.wait = wait;
            asking = takeAsking();
        }

        @Override
        List<byte[][]> write(long now) {
            if (state != State.WAITING || token != 0 || current != this || (asked && now >= deadline)) {
                return List.of();
            }
            List<Object> command = start("ACQUIRE");
            command.addAll(List.of("HOLDS", 1, "LEASE", ms(lease)));
            if (wait != 0) {
                long left = deadline >= ENDLESS ? HOUR_MS : ms(deadline - now);
                waitMs = wait > 0 ? Math.min(wait, left) : Math.min(left, HOUR_MS);
                command.addAll(List.of("WAIT", waitMs));
                if (asked || delayed) {
                    command.addAll(List.of("WAITED", ms(now - began)));
                }
            }
            if (spec.limit() == 0) {
                command.add("SHARED");
            } else if (spec.limit() > 1) {
                command.addAll(List.of("LIMIT", spec.limit()));
            }
            if (spec.ephemeral()) {
                command.add("EPHEMERAL");
            }
            if (spec.replicas() > 0) {
                command.addAll(List.of("REPLICAS", spec.replicas()));
            }
            command.add("WITHWAITED");
            asked = true;
            sent = now;
            lastAsked = now;
            underWay.add(this);
            long quiet = (wait != 0 ? QUIET + (wait > 0 ? wait * MS : 0) : silence(lease)) + replicasTimeout(pool);
            quietTimer = client.serial.after(quiet, this::silent);
            return List.<byte[][]>of(Reply.command(command));
        }

        private void silent() {
            if (done) {
                return;
            }
            if (wait != 0 && state == State.WAITING && current == this && client.serial.now() < deadline) {
                lastError = new UnavailableException("no answer for 2 s", null);
                submit(new Ask(pool, wait));
            }
            if (wait != 0) {
                closeIn(SECOND + replicasTimeout(pool));
            } else {
                pool.abandon(this, "no answer to LOCK.ACQUIRE");
            }
        }

        /** Closes the connection unless the reply has come by then. */
        void closeIn(long delay) {
            client.serial.after(delay, () -> pool.abandon(this, "no answer to LOCK.ACQUIRE"));
        }

        @Override
        void dropped() {
            if (wait > 0) {
                pool.rotate(Acquisition.this, true);
            }
        }

        @Override
        void answered(int index, @Nullable Object reply) {
            underWay.remove(this);
            quietTimer.cancel();
            dropped();
            if (reply instanceof RedisError error) {
                refused(error);
            } else if (reply instanceof List<?> list && !list.isEmpty() && list.get(0) instanceof Long granted) {
                inARow = 0;
                granted(this, granted, list.size() > 1 && list.get(1) instanceof Long waited ? waited : 0);
            } else if (reply instanceof Long granted) {
                granted(this, granted, 0);
            } else if (reply != null) {
                UnavailableException why = new UnavailableException("the server answered LOCK.ACQUIRE with neither a token nor nil", null);
                connection.close(why);
                failed(why);
            } else if (current == this) {
                inARow = 0;
                notGranted();
            }
            if (state == State.WITHDRAWING && underWay.isEmpty()) {
                withdrawalMayBeDone();
            }
        }

        private void notGranted() {
            if (state != State.WAITING) {
                return;
            }
            long now = client.serial.now();
            if (!waits) {
                notAcquired();
            } else if (!hasPlace && wait == 0) {
                pool.rotate(Acquisition.this, false);
            } else if (wait > 0) {
                if (hasPlace) {
                    ask();
                }
            } else if (wait == 0 || now >= sent + waitMs * MS - 50 * MS) {
                if (now < deadline - MS) {
                    ask();
                } else {
                    end(null);
                }
            } else if (deadline >= ENDLESS) {
                again(pool.pause(lease));
            } else {
                end(null);
            }
        }

        private void refused(RedisError error) {
            if (state != State.WAITING || current != this) {
                return;
            }
            if (error.code().equals("SUPERSEDED")) {
                if (++inARow > 1) {
                    again(pool.pause(lease));
                } else {
                    ask();
                }
                return;
            }
            lastError = Reply.exception(error);
            if (redirected(error)) {
                if (++inARow > 1) {
                    again(pool.pause(lease));
                } else {
                    ask();
                }
            } else if (Reply.passes(error)) {
                client.lookAgain(error, pool, connection);
                if (hasPlace || wait == 0) {
                    again(pool.pause(lease));
                }
            } else {
                end(Reply.exception(error));
            }
        }

        @Override
        void failed(Throwable why) {
            underWay.remove(this);
            dropped();
            boolean written = connection != null;
            broke |= written;
            if (state == State.WITHDRAWING && underWay.isEmpty()) {
                withdrawalMayBeDone();
            }
            if (state != State.WAITING || current != this && current != null && !current.done) {
                return;
            }
            lastError = why;
            if (Reply.isFatal(why) || client.isClosed()) {
                end(why);
            } else if (!hasPlace && wait > 0) {
                return;
            } else if (written && connection.wasIdle() && !replacedAtOnce) {
                replacedAtOnce = true;
                ask();
            } else {
                again(pool.pause(lease));
            }
        }
    }

    private void granted(Ask ask, long granted, long waited) {
        if (state == State.WITHDRAWING || (state != State.WAITING && granted != token)) {
            // The request came after the lock was released or withdrawn, or after it was lost (B20).
            if (state == State.HELD) {
                lose(LossReason.GONE);
            }
            withdrawn = 0;
            withdraw();
            return;
        }
        if (state != State.WAITING) {
            return;
        }
        long until = ask.sent + waited * MS + (long) (lease * 0.99);
        boolean first = token == 0;
        token = granted;
        setCertain(Math.max(certain, until), ask.sent);
        if (spec.ephemeral() && ask.connection != null) {
            dedicated = ask.connection;
            dedicated.dedicate(this::disconnected);
        }
        if (certain - client.serial.now() >= lease / 2 || lease < SHORT) {
            hold(ask.sent + waited * MS);
        } else if (first) {
            // Too old to count as held: one renewal decides (B8).
            client.serial.after(ask.wait == 0 ? 0 : ask.pool.pause(lease) / 2, () -> renewNow());
        }
    }

    private void hold(long from) {
        state = State.HELD;
        heldSince = client.serial.now();
        leaveQueues();
        client.held.add(this);
        renewAt(from + lease / 4);
        checkCertain();
        client.tell(listener -> listener.acquired(spec.title(), Duration.ofNanos(heldSince - began)));
        if (!result.complete(new Hold(this))) {
            releaseInBackground();
        }
    }

    private void leaveQueues() {
        if (deadlineTimer != null) {
            deadlineTimer.cancel();
        }
        leavePlace();
        if (queuedHere) {
            queuedHere = false;
            client.leaveQueue(this);
        }
    }

    private void timeOver() {
        if (state != State.WAITING) {
            return;
        }
        if (underWay.isEmpty() && token == 0) {
            end(null);
        } else {
            client.serial.after(GRACE, () -> {
                if (state == State.WAITING) {
                    end(null);
                }
            });
        }
    }

    /** The acquisition ends without the lock: by an error, or because the time is over (null). */
    private void end(@Nullable Throwable why) {
        Throwable error = why;
        if (error == null && waits) {
            error = new NotAcquiredException("lock '" + spec.title() + "' was not acquired in time", lastError);
        } else if (error == null) {
            error = new UnavailableException("lock '" + spec.title() + "': no answer of the server in time", lastError);
        } else if (!(error instanceof HoldfastException) && !(error instanceof IllegalStateException)) {
            error = new HoldfastException(String.valueOf(error.getMessage()), error);
        }
        finish(broke || !underWay.isEmpty() || token != 0);
        result.completeExceptionally(error);
    }

    /** A try is over: the lock is held by another owner, or the grant came too late to count. */
    private void notAcquired() {
        finish(broke || !underWay.isEmpty() || token != 0);
        result.complete(null);
    }

    private void finish(boolean withdraw) {
        state = withdraw ? State.WITHDRAWING : State.RELEASED;
        leaveQueues();
        client.tell(listener -> listener.notAcquired(spec.title(), Duration.ofNanos(client.serial.now() - began)));
        if (withdraw) {
            withdraw();
        } else {
            client.acquisitions.remove(this);
        }
    }

    /** The caller does not want the lock any more: cancelled, interrupted, or the client is closed. */
    void cancel(Throwable why) {
        if (state == State.WAITING) {
            finish(asked && (broke || !underWay.isEmpty() || token != 0));
            result.completeExceptionally(why);
        } else if (state == State.HELD) {
            releaseInBackground();
        }
    }

    // ---- Withdrawing ----

    private void withdraw() {
        Pool pool = route();
        for (Ask ask : new ArrayList<>(underWay)) {
            ask.closeIn(SECOND + silence(lease) + replicasTimeout(pool));
        }
        pool.submit(bounded(pool, new Request(Request.RELEASE) {
            @Override
            List<byte[][]> write(long now) {
                List<Object> command = start("RELEASE");
                command.add("ALL");
                return List.<byte[][]>of(Reply.command(command));
            }

            @Override
            void answered(int index, @Nullable Object reply) {
                if (reply instanceof RedisError error && !redirected(error) && !Reply.passes(error)) {
                    LOG.warn("lock '{}' could not be withdrawn: {}", spec.title(), error.message());
                    withdrawalDone();
                } else if (reply instanceof RedisError error) {
                    client.lookAgain(error, pool, connection);
                    repeat(pool.pause(lease));
                } else {
                    withdrawn++;
                    withdrawalMayBeDone();
                }
            }

            @Override
            void failed(Throwable why) {
                repeat(pool.pause(lease));
            }
        }));
    }

    private void withdrawalMayBeDone() {
        if (withdrawn == 0 || !underWay.isEmpty()) {
            return;
        }
        if (!broke || withdrawn >= 2) {
            withdrawalDone();
        } else {
            repeat(SECOND);
        }
    }

    private boolean repeating;

    private void repeat(long delay) {
        if (repeating) {
            return;
        }
        if (client.isShut() || client.serial.now() > lastAsked + Math.max(lease, SECOND)) {
            withdrawalDone();
            return;
        }
        repeating = true;
        client.serial.after(delay, () -> {
            repeating = false;
            withdraw();
        });
    }

    private void withdrawalDone() {
        if (state == State.WITHDRAWING) {
            state = State.RELEASED;
        }
        if (dedicated != null) {
            dedicated.close(new HoldfastException("the lock was withdrawn", null));
        }
        client.acquisitions.remove(this);
    }

    // ---- Holding ----

    private void setCertain(long until, long sent) {
        certain = until;
        wallCertain = client.serial.clock.wall() + (until - client.serial.now()) / MS;
    }

    private void renewAt(long at) {
        if (renewTimer != null) {
            renewTimer.cancel();
        }
        if (renews && state == State.HELD) {
            // Holds that are due within the same hundredth of the lease, at most 10 ms, share a pipeline.
            long grid = Math.max(1, Math.min(10 * MS, lease / 100));
            renewTimer = client.serial.after(at / grid * grid - client.serial.now(), this::renewNow);
        }
    }

    private void renewNow() {
        if ((state == State.HELD || state == State.WAITING) && renewal == null) {
            renewal = new Renewal(dedicated == null ? route() : null);
            renewal.begin();
        }
    }

    private void checkCertain() {
        if (certainTimer != null) {
            certainTimer.cancel();
        }
        if (state == State.HELD && client.serial.now() >= certain) {
            lose(LossReason.EXPIRED);
        } else if (state == State.HELD) {
            certainTimer = client.serial.after(certain - client.serial.now(), this::checkCertain);
        }
    }

    private final class Renewal extends Request {
        private final @Nullable Pool pool;
        private final long asked = lease;
        private long sent;

        Renewal(@Nullable Pool pool) {
            super(RENEW);
            this.pool = pool;
        }

        void begin() {
            if (pool == null) {
                overDedicated(this);
            } else {
                asking = takeAsking();
                client.serial.after(silence(asked) + replicasTimeout(pool), () -> pool.abandon(this, "no answer to LOCK.RENEW"));
                pool.submit(this);
            }
        }

        @Override
        List<byte[][]> write(long now) {
            if (state != State.HELD && state != State.WAITING) {
                return List.of();
            }
            sent = now;
            List<Object> command = start("RENEW");
            command.addAll(List.of("TOKEN", token, "LEASE", ms(asked)));
            if (spec.replicas() > 0) {
                command.addAll(List.of("REPLICAS", spec.replicas()));
            }
            return List.<byte[][]>of(Reply.command(command));
        }

        @Override
        void answered(int index, @Nullable Object reply) {
            renewal = null;
            if (state != State.HELD && state != State.WAITING) {
                return;
            }
            if (reply instanceof RedisError error) {
                if (error.code().equals("WRONGTYPE")) {
                    gone(LossReason.CHANGED);
                } else {
                    boolean redirected = redirected(error);
                    client.lookAgain(error, pool, connection);
                    retry(Reply.exception(error), redirected && ++inARow == 1);
                }
            } else if (missing(reply)) {
                gone(LossReason.GONE);
            } else {
                inARow = 0;
                replacedAtOnce = false;
                long until = sent + (long) (asked * 0.99);
                setCertain(asked == lease && shortened ? until : Math.max(certain, until), sent);
                shortened &= asked != lease;
                succeeded();
            }
        }

        private void succeeded() {
            if (state == State.WAITING) {
                hold(sent);
                return;
            }
            if (certainTimer != null && certainTimer.at > certain) {
                checkCertain();
            }
            if (asked != lease) {
                renewNow();
                return;
            }
            List<CompletableFuture<Void>> told = new ArrayList<>(renewed);
            renewed.clear();
            told.forEach(future -> future.complete(null));
            renewAt(sent + lease / 4);
        }

        @Override
        void failed(Throwable why) {
            renewal = null;
            broke |= sent != 0;
            boolean atOnce = connection != null && connection.wasIdle() && !replacedAtOnce;
            replacedAtOnce |= atOnce;
            retry(why, atOnce);
        }

        private void retry(Throwable why, boolean atOnce) {
            lastError = why;
            if (state == State.WAITING && !waits) {
                notAcquired();
            } else {
                Pool node = pool == null ? client.poolOf(slot) : pool;
                client.serial.after(atOnce ? 0 : node.pause(lease), Acquisition.this::renewNow);
            }
        }
    }

    /** The lease was made shorter by hand, and the server has not confirmed it yet. */
    private boolean shortened;

    private void gone(LossReason why) {
        if (state == State.WAITING) {
            token = 0;
            certain = 0;
            if (waits) {
                current = null;
                ask();
            } else {
                notAcquired();
            }
        } else {
            lose(why);
        }
    }

    private void lose(LossReason why) {
        state = State.LOST;
        reason = why;
        if (renewTimer != null) {
            renewTimer.cancel();
        }
        client.held.remove(this);
        client.acquisitions.remove(this);
        LOG.atLevel(renews ? Level.WARN : Level.INFO).log("lock '{}' of owner '{}' is lost: {}", spec.title(), owner, why);
        List<CompletableFuture<Void>> told = new ArrayList<>(renewed);
        renewed.clear();
        told.forEach(future -> future.completeExceptionally(lost()));
        client.tell(listener -> listener.lost(spec.title(), why));
        onLost.forEach(action -> client.callback(() -> action.accept(why)));
        onLost.clear();
        if (broke || !underWay.isEmpty()) {
            withdraw();
        }
        if (dedicated != null) {
            dedicated.close(new UnavailableException("the lock was lost", null));
        }
    }

    LockLostException lost() {
        LossReason why = reason == null ? LossReason.EXPIRED : reason;
        return new LockLostException("lock '" + spec.title() + "' of owner '" + owner + "' is lost: " + why, why);
    }

    /** For all threads. If only the wall clock says that the time is over, the machine was suspended: not certain, and renewed at once (B7). */
    boolean isHeld() {
        if (state != State.HELD || client.serial.now() >= certain) {
            return false;
        }
        if (client.serial.clock.wall() >= wallCertain + 1) {
            client.serial.run(this::renewNow);
            return false;
        }
        return true;
    }

    void onLost(Consumer<LossReason> action) {
        if (state == State.LOST && reason != null) {
            LossReason why = reason;
            client.callback(() -> action.accept(why));
        } else {
            onLost.add(action);
        }
    }

    /** Begins the lease anew, with this length from now on. */
    void renew(Duration length, CompletableFuture<Void> told) {
        if (state != State.HELD) {
            told.completeExceptionally(state == State.LOST ? lost() : new IllegalStateException("lock '" + spec.title() + "' is released"));
            return;
        }
        long before = lease;
        lease = Math.max(MS, length.toNanos());
        shortened |= lease < before;
        renewed.add(told);
        renewNow();
        client.serial.after(client.timeout, () -> told.completeExceptionally(new UnavailableException("lock '" + spec.title() + "' was not renewed in time", lastError)));
    }

    /** Asks the server whether this owner holds the lock, and lengthens nothing (B9). */
    void check(CompletableFuture<Boolean> told) {
        if (state != State.HELD) {
            told.complete(false);
            return;
        }
        int[] left = {keys.size()};
        for (byte[] key : keys) {
            client.ask(slot, List.of("LOCK.INFO", key, "COUNT", 5000)).whenComplete((reply, why) -> {
                if (why != null) {
                    told.completeExceptionally(why);
                } else if (!holds(reply)) {
                    if (state == State.HELD) {
                        lose(LossReason.GONE);
                    }
                    told.complete(false);
                } else if (--left[0] == 0) {
                    told.complete(isHeld());
                }
            });
        }
    }

    private boolean holds(@Nullable Object info) {
        return Reply.map(info).get("holders") instanceof List<?> holders && holders.stream().map(Reply::map)
            .anyMatch(holder -> owner.equals(Reply.text(holder.get("owner"))) && Long.valueOf(token).equals(holder.get("token")));
    }

    // ---- Releasing ----

    void releaseInBackground() {
        release(null, new CompletableFuture<>());
    }

    /** Releases the lock, or (with a time) keeps it for so long without renewing it (B36). */
    void release(@Nullable Duration keep, CompletableFuture<Void> told) {
        if (state == State.RELEASED || state == State.RELEASING || state == State.WITHDRAWING) {
            told.completeExceptionally(new IllegalStateException("lock '" + spec.title() + "' is released already"));
            return;
        }
        boolean wasLost = state == State.LOST;
        if (!wasLost) {
            state = State.RELEASING;
        }
        if (renewTimer != null) {
            renewTimer.cancel();
        }
        List<CompletableFuture<Void>> pending = new ArrayList<>(renewed);
        renewed.clear();
        pending.forEach(future -> future.completeExceptionally(new IllegalStateException("lock '" + spec.title() + "' is released")));
        if (wasLost) {
            told.completeExceptionally(lost());
        }
        release = new Release(keep, told);
        release.begin();
    }

    private final class Release {
        private final @Nullable Duration keep;
        private final CompletableFuture<Void> told;
        private final long until = client.serial.now() + Math.max(lease, SECOND);
        private int attempts;
        private boolean certainAtFirst;

        Release(@Nullable Duration keep, CompletableFuture<Void> told) {
            this.keep = keep;
            this.told = told;
        }

        void begin() {
            Pool.Connection over = dedicated;
            if (over == null) {
                attempt(route());
            } else {
                client.serial.after(Math.max(lease, SECOND), () -> over.close(new UnavailableException("no answer to LOCK.RELEASE", null)));
                overDedicated(new Attempt(null));
            }
        }

        private void attempt(Pool pool) {
            pool.submit(bounded(pool, new Attempt(pool)));
        }

        private void again(Throwable why, boolean atOnce) {
            lastError = why;
            if (client.serial.now() > until || client.isShut() || dedicated != null) {
                done(dedicated != null && dedicated.closed ? null : new UnavailableException("lock '" + spec.title() + "': the release was not confirmed", why));
            } else {
                client.serial.after(atOnce ? 0 : client.poolOf(slot).pause(lease), this::begin);
            }
        }

        private void done(@Nullable Throwable why) {
            if (state == State.RELEASING) {
                if (why instanceof LockLostException lost) {
                    lose(lost.reason());
                } else {
                    state = State.RELEASED;
                    client.tell(listener -> listener.released(spec.title(), Duration.ofNanos(client.serial.now() - heldSince)));
                }
            }
            client.held.remove(Acquisition.this);
            client.acquisitions.remove(Acquisition.this);
            if (dedicated != null) {
                dedicated.close(new HoldfastException("the lock was released", null));
            }
            if (why == null) {
                told.complete(null);
            } else {
                told.completeExceptionally(why);
            }
        }

        private final class Attempt extends Request {
            private final @Nullable Pool pool;

            Attempt(@Nullable Pool pool) {
                super(RELEASE);
                this.pool = pool;
            }

            @Override
            List<byte[][]> write(long now) {
                if (++attempts == 1) {
                    certainAtFirst = now < certain;
                }
                List<Object> command = start(keep == null ? "RELEASE" : "RENEW");
                command.addAll(List.of("TOKEN", token));
                if (keep != null) {
                    command.addAll(List.of("FENCE", token + 1, "LEASE", ms(keep.toNanos())));
                }
                if (keep == null && (broke || !underWay.isEmpty())) {
                    // A stale request may still be in the queue (B18).
                    List<Object> all = start("RELEASE");
                    all.add("ALL");
                    return List.<byte[][]>of(Reply.command(command), Reply.command(all));
                }
                return List.<byte[][]>of(Reply.command(command));
            }

            private boolean judged;

            @Override
            void answered(int index, @Nullable Object reply) {
                if (index > 0) {
                    return;
                }
                judged = true;
                if (reply instanceof RedisError error) {
                    boolean redirected = redirected(error);
                    client.lookAgain(error, pool, connection);
                    if (error.code().equals("WRONGTYPE")) {
                        done(new LockLostException("lock '" + spec.title() + "' is lost: the key holds something else", LossReason.CHANGED));
                    } else if (redirected || Reply.passes(error)) {
                        again(Reply.exception(error), redirected && attempts == 1);
                    } else {
                        done(Reply.exception(error));
                    }
                } else if (missing(reply) && (attempts == 1 || !certainAtFirst)) {
                    done(state == State.RELEASING ? new LockLostException("lock '" + spec.title() + "' of owner '" + owner + "' was lost before it was released", LossReason.GONE) : lost());
                } else {
                    done(null);
                }
            }

            @Override
            void failed(Throwable why) {
                if (!judged) {
                    broke |= attempts > 0;
                    again(why, connection != null && connection.wasIdle() && attempts == 1);
                }
            }
        }
    }

    // ---- What requests share ----

    private Request bounded(Pool pool, Request request) {
        request.asking = takeAsking();
        client.serial.after(silence(lease), () -> pool.abandon(request, "no answer to a release"));
        return request;
    }

    private void overDedicated(Request request) {
        Pool.Connection connection = dedicated;
        if (connection == null || connection.closed) {
            request.failed(new UnavailableException("the connection of the ephemeral lock was closed", null));
        } else {
            connection.send(List.of(request));
        }
    }

    /** The connection of an ephemeral hold ended. */
    private void disconnected() {
        if (state == State.HELD) {
            lose(LossReason.DISCONNECTED);
        }
    }

    private List<Object> start(String verb) {
        List<Object> command = new ArrayList<>();
        if (keys.size() == 1) {
            command.add("LOCK." + verb);
        } else {
            command.add("LOCK.M" + verb);
            command.add(keys.size());
        }
        command.addAll(keys);
        command.add(ownerBytes);
        return command;
    }

    /** Any nil of several keys is a loss (B35). */
    private static boolean missing(@Nullable Object reply) {
        return reply == null || reply instanceof List<?> list && list.stream().anyMatch(it -> it == null);
    }

    private long replicasTimeout(Pool pool) {
        return spec.replicas() > 0 ? pool.replicasTimeout * MS : 0;
    }

    private static long silence(long lease) {
        return Math.max(50 * MS, Math.min(SECOND, lease / 8));
    }

    /** Rounded up, at least 1: 0 would mean for ever (B2). */
    private static long ms(long nanos) {
        return Math.max(1, (nanos + MS - 1) / MS);
    }
}
