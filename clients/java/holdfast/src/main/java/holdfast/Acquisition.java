package holdfast;

import java.time.Duration;
import java.util.ArrayList;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Consumer;
import java.util.function.Predicate;
import org.jspecify.annotations.Nullable;

/**
 * One call of the application that requests a lock, and all that follows until the lock is released or lost: the state machine of
 * {@code docs/client-protocol.md}, whose rules (B…) the comments name. Methods are called in steps, except those that are documented as for all threads.
 */
final class Acquisition {
    /** The line of acquisitions without a place at the server: one at a time polls (B30). */
    private static final Object POLLS = new Object();

    enum State { WAITING, HELD, RELEASING, RELEASED, WITHDRAWING, LOST }

    final Holdfast client;
    final LockSpec spec;
    final String owner;
    private final Commands commands;
    private final Route route;
    private final boolean waits;
    private final long began;
    private final long deadline;
    /**
     * Completed in a step with this acquisition, or with null if a try found the lock held. Its dependents must not run code of the application in that step.
     * It is not completed with a {@link Hold}: the client refers to acquisitions, and would keep a forgotten hold from being garbage-collected.
     */
    final CompletableFuture<@Nullable Acquisition> result = new CompletableFuture<>();

    /** Completed in a step when the hold is lost or, with null, released. */
    final CompletableFuture<@Nullable LossReason> end = new CompletableFuture<>();

    volatile State state = State.WAITING;
    volatile long token;
    volatile long lease;
    volatile long certain;
    private volatile long wallCertain;
    /** Whether the hold is renewed. False once its release has begun or it is lost. */
    final AtomicBoolean renews;
    /** Whether the hold was renewed until it was lost. One that was not is expected to expire. */
    private volatile boolean wasRenewed;

    private final Runnable turn = this::ask;
    private final Runnable poll = this::poll;
    /** Where this acquisition has, or waits for, a place among the waits at the server. */
    private @Nullable Pool place;
    private boolean hasPlace;
    /** The newest request. */
    private @Nullable Ask current;
    /** Requests whose replies have not been read. */
    private final Set<Ask> pending = new LinkedHashSet<>();
    /** The next request names WAITED: it is not the first, or waited for its turn in this client. */
    private boolean repeated;
    private long lastAsked;
    private @Nullable Throwable lastError;
    private Serial.@Nullable Timer deadlineTimer;
    /** How many withdrawals were answered. */
    private int withdrawn;

    private long heldSince;
    private Serial.@Nullable Timer heldTimer;
    /** When the hold is renewed next. */
    private long due;
    /** A renewal is under way, or is sent again after a pause. */
    private boolean renewing;
    /** That of the newest renewal. */
    private long requestedLease;
    /** The last one that the server accepted. */
    private long acceptedLease;
    /** Callers that wait for a renewal. */
    private final List<CompletableFuture<Void>> renewed = new ArrayList<>();
    /** How many releases were written. */
    private int releases;
    /** The hold was certain when the first release was written. */
    private boolean wasCertain;

    Acquisition(Holdfast client, LockSpec spec, String owner, long wait) {
        this.client = client;
        this.spec = spec;
        this.owner = owner;
        commands = new Commands(spec, owner);
        lease = Math.max(Rules.MS, (spec.lease() == null ? client.lease : spec.lease()).toNanos());
        acceptedLease = lease;
        route = new Route(client, spec.names().get(0), lease, spec.replicas() > 0);
        waits = wait > 0;
        renews = new AtomicBoolean(spec.renew());
        began = client.serial.now();
        deadline = wait >= Rules.ENDLESS ? Rules.ENDLESS : began + (waits ? wait : client.timeout);
    }

    // ---- Requesting ----

    void begin() {
        if (client.isClosed()) {
            giveUp(new IllegalStateException("the client is closed"));
            return;
        }
        client.acquisitions.add(this);
        if (deadline < Rules.ENDLESS) {
            deadlineTimer = client.serial.after(deadline - client.serial.now(), this::timeOver);
        }
        if (waits && spec.isMutex()) {
            // Of this client's waits for the mutex, only the oldest is at the server (B31).
            repeated = client.turns.join(spec.title(), turn);
        } else {
            ask();
        }
    }

    private boolean isAsking() {
        return state == State.WAITING && token == 0 && client.serial.now() < deadline;
    }

    /** Sends a request, unless one is pending. */
    private void ask() {
        if (!isAsking() || current != null && !current.request.ended) {
            return;
        }
        Pool pool = route.pool();
        if (waits && place != pool) {
            leavePlace();
            place = pool;
            hasPlace = pool.takePlace(this);
        }
        if (hasPlace) {
            current = new Ask(pool, Rules.LONGEST_WAIT);
        } else if (waits && current != null) {
            client.turns.join(POLLS, poll);
        } else {
            current = new Ask(pool, 0);
        }
    }

    /** Sends a request with a short wait, when it is this acquisition's turn. */
    private void poll() {
        if (isAsking() && !hasPlace && place != null && (current == null || current.request.ended)) {
            current = new Ask(place, Rules.poll(client.turns.size(POLLS)));
        } else {
            client.turns.leave(POLLS, poll);
        }
    }

    void gotPlace() {
        hasPlace = true;
        client.turns.leave(POLLS, poll);
        ask();
    }

    private void leavePlace() {
        if (place != null) {
            place.leavePlace(this);
            place = null;
            hasPlace = false;
        }
    }

    /** An ACQUIRE. */
    private final class Ask {
        private final Pool pool;
        /** The greatest WAIT, in ms; 0: none. */
        private final long longest;
        private final Request request;
        /** The WAIT that was sent, in ms. */
        private long wait;

        Ask(Pool pool, long longest) {
            this.pool = pool;
            this.longest = longest;
            request = route.request(pool, Request.OTHER, this::command, Reply::isGrant, this::ended);
            pool.submit(request);
        }

        private List<byte[][]> command() {
            if (!isAsking() || current != this) {
                return List.of();
            }
            long now = client.serial.now();
            if (longest == 0) {
                closeIn(Rules.silence(lease));
            } else {
                wait = Math.min(longest, Rules.ms(deadline - now));
                closeIn(Rules.QUIET + (longest < Rules.LONGEST_WAIT ? longest * Rules.MS : 0), this::silent);
            }
            long waited = repeated ? Math.max(1, now - began) : 0;
            repeated = true;
            lastAsked = now;
            pending.add(this);
            return List.<byte[][]>of(commands.acquire(lease, wait, waited));
        }

        /** No reply arrived in time: another request takes over the place in the queue (B11). */
        private void silent() {
            if (isAsking() && current == this) {
                lastError = new UnavailableException("no reply for 2 s", null);
                current = new Ask(pool, longest);
            }
            closeIn(Rules.SECOND);
        }

        /** Closes the connection unless the reply arrives in time. */
        void closeIn(long delay) {
            closeIn(delay, () -> pool.abandon(request));
        }

        private void closeIn(long delay, Runnable action) {
            request.limit(client.serial.after(delay + route.confirmation(pool), action));
        }

        private void ended(Route.Answer answer) {
            pending.remove(this);
            if (current == this) {
                client.turns.leave(POLLS, poll);
            }
            if (answer.verdict() == Verdict.YES && answer.reply() instanceof List<?> grant) {
                granted(this, (Long) grant.get(0), (Long) grant.get(1));
            } else if (state == State.WAITING && current == this) {
                refused(this, answer);
            }
            if (state == State.WITHDRAWING) {
                withdrawalMayBeDone();
            }
        }
    }

    private void refused(Ask ask, Route.Answer answer) {
        switch (answer.verdict()) {
            case NIL -> notGranted(ask);
            case FATAL, OVERWRITTEN -> giveUp(answer.error());
            default -> {
                lastError = answer.error();
                if (client.isClosed()) {
                    giveUp(lastError);
                } else {
                    again(route.pause(answer));
                }
            }
        }
    }

    private void notGranted(Ask ask) {
        if (!waits) {
            giveUp(null);
        } else if (!hasPlace) {
            again(Rules.SECOND);
        } else if (ask.longest != Rules.LONGEST_WAIT) {
            ask();
        } else if (ask.request.sent + ask.wait * Rules.MS < deadline) {
            again(ask.pool.pause(lease));
        } else {
            giveUp(late());
        }
    }

    private void again(long delay) {
        client.serial.after(delay, turn);
    }

    private void granted(Ask ask, long granted, long waited) {
        if (state == State.WITHDRAWING || state != State.WAITING && granted != token) {
            // The server executed the request after the lock was released, withdrawn or lost (B20).
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
        if (spec.ephemeral() && ask != current && pending.contains(current)) {
            // The server binds the hold to the connection of the newest request, whose reply decides. If that is a refusal, this grant must be withdrawn.
            route.broke = true;
            return;
        }
        boolean isFirst = token == 0;
        token = granted;
        long from = ask.request.sent + waited * Rules.MS;
        setCertain(Math.max(certain, from + Rules.certain(lease)));
        if (spec.ephemeral() && ask.request.connection != null) {
            route.dedicated = ask.request.connection;
            route.dedicated.dedicate(this::disconnected);
        }
        if (certain - client.serial.now() >= lease / 2 || lease < Rules.SHORT) {
            hold(from);
        } else if (isFirst) {
            // Too little of the lease is certain: one renewal decides (B8).
            client.serial.after(waits ? ask.pool.pause(lease) / 2 : 0, this::renewNow);
        }
    }

    private void hold(long from) {
        state = State.HELD;
        heldSince = client.serial.now();
        leaveQueues();
        renewFrom(from);
        client.publish(listener -> listener.acquired(spec.title(), Duration.ofNanos(heldSince - began)));
        if (!result.complete(this)) {
            release(null, new CompletableFuture<>());
        }
    }

    private void leaveQueues() {
        if (deadlineTimer != null) {
            deadlineTimer.cancel();
        }
        leavePlace();
        client.turns.leave(POLLS, poll);
        client.turns.leave(spec.title(), turn);
    }

    private void timeOver() {
        if (pending.isEmpty() && token == 0) {
            giveUp(late());
        } else {
            deadlineTimer = client.serial.after(Rules.GRACE, () -> giveUp(late()));
        }
    }

    private HoldfastException late() {
        Throwable why = lastError;
        if (why == null && current != null && current.request.connection == null) {
            why = new UnavailableException("no connection to the server", null);
        }
        String reason = why == null ? "" : ": " + why.getMessage();
        return waits ? new NotAcquiredException("lock '" + spec.title() + "' was not acquired in time" + reason, why)
            : new UnavailableException("lock '" + spec.title() + "': the server did not reply in time" + reason, why);
    }

    /** Ends the acquisition without the lock: with an error, or with null if another owner holds the lock. */
    private void giveUp(@Nullable Throwable why) {
        state = State.WITHDRAWING;
        leaveQueues();
        disown();
        client.publish(listener -> listener.notAcquired(spec.title(), Duration.ofNanos(client.serial.now() - began)));
        if (route.broke || !pending.isEmpty() || token != 0) {
            withdraw();
        } else {
            withdrawalDone();
        }
        Holdfast.pass(null, why, result);
    }

    /** Withdraws the request or releases the lock: the caller cancelled, was interrupted, or closes the client. */
    void cancel(Throwable why) {
        if (state == State.WAITING) {
            giveUp(why);
        } else if (state == State.HELD) {
            release(null, new CompletableFuture<>());
        }
    }

    // ---- Withdrawing ----

    private void withdraw() {
        pending.forEach(ask -> ask.closeIn(Rules.SECOND + Rules.silence(lease)));
        route.repeat(Request.RELEASE, withdrawnUntil(), () -> List.<byte[][]>of(commands.withdraw()), this::isRelease, answer -> {
            if (answer.verdict() == Verdict.YES || answer.verdict() == Verdict.NIL) {
                withdrawn++;
                withdrawalMayBeDone();
            } else {
                String text = "the request for lock '" + spec.title() + "' could not be withdrawn";
                if (answer.verdict().passes()) {
                    Log.write(log -> log.debug(text, answer.error()));
                } else {
                    Log.write(log -> log.warn(text, answer.error()));
                }
                withdrawalDone();
            }
        });
    }

    private long withdrawnUntil() {
        return lastAsked + Math.max(lease, Rules.SECOND);
    }

    private void withdrawalMayBeDone() {
        if (withdrawn == 0 || !pending.isEmpty()) {
            return;
        }
        if (route.broke && withdrawn < 2 && client.serial.now() <= withdrawnUntil() && !client.isShut()) {
            client.serial.after(Rules.SECOND, this::withdraw);
        } else {
            withdrawalDone();
        }
    }

    private void withdrawalDone() {
        forget(state == State.WITHDRAWING ? State.RELEASED : state);
    }

    /** Ends the acquisition in this state. */
    private void forget(State last) {
        state = last;
        renews.set(false);
        if (heldTimer != null) {
            heldTimer.cancel();
        }
        client.acquisitions.remove(this);
    }

    // ---- Holding ----

    private void setCertain(long until) {
        certain = until;
        wallCertain = client.serial.clock.wall() + (until - client.serial.now()) / Rules.MS;
        schedule();
    }

    private void renewFrom(long from) {
        due = renews.get() ? Rules.renewal(from, lease, spec.ephemeral()) : Rules.ENDLESS;
        schedule();
    }

    /** Sets the timer for the next renewal or, if it is earlier, the end of the certainty. */
    private void schedule() {
        if (state == State.HELD) {
            if (heldTimer != null) {
                heldTimer.cancel();
            }
            heldTimer = client.serial.after(Math.min(due, certain) - client.serial.now(), this::attend);
        }
    }

    private void attend() {
        long now = client.serial.now();
        if (now >= certain) {
            lose(LossReason.EXPIRED);
        } else {
            if (now >= due) {
                renewNow();
            }
            schedule();
        }
    }

    /** Whether a token was granted, and is neither lost nor being released. */
    private boolean isGranted() {
        return state == State.HELD || state == State.WAITING && token != 0;
    }

    private void renewNow() {
        if (isGranted() && !renewing) {
            sendRenewal();
        }
    }

    private void sendRenewal() {
        renewing = isGranted();
        if (renewing) {
            due = Rules.ENDLESS;
            route.send(Request.RENEW, this::renewal, this::isRenewal, this::renewed);
        }
    }

    private List<byte[][]> renewal() {
        if (!isGranted()) {
            return List.of();
        }
        requestedLease = lease;
        long until = client.serial.now() + Rules.certain(requestedLease);
        if (until < certain) {
            // The lease becomes shorter when the server executes this, even if the reply is lost.
            setCertain(until);
        }
        return List.<byte[][]>of(commands.renew(token, requestedLease));
    }

    private boolean isRenewal(Object reply) {
        return Reply.answersEach(spec.names(), reply, this::isToken);
    }

    /** Whether this may be the token in a reply to RENEW, which may have raised it by one (B36). */
    private boolean isToken(long number) {
        return number == token || number == token + 1;
    }

    private boolean isRelease(Object reply) {
        return Reply.answersEach(spec.names(), reply, number -> true);
    }

    private void renewed(Route.Answer answer) {
        renewing = false;
        if (!isGranted()) {
            return;
        }
        switch (answer.verdict()) {
            case YES -> confirmed(answer.request().sent);
            case NIL -> gone(LossReason.GONE);
            case OVERWRITTEN -> gone(LossReason.CHANGED);
            default -> {
                lastError = answer.error();
                boolean refusesLease = answer.verdict() == Verdict.FATAL && requestedLease == lease && requestedLease != acceptedLease;
                if (refusesLease) {
                    lease = acceptedLease;
                    route.lease = acceptedLease;
                    endRenewals(it -> it.completeExceptionally(answer.error()));
                }
                if (state == State.WAITING && !waits) {
                    giveUp(null);
                } else if (!refusesLease || renews.get()) {
                    renewing = true;
                    client.serial.after(route.pause(answer), this::sendRenewal);
                }
            }
        }
    }

    private void confirmed(long sent) {
        acceptedLease = requestedLease;
        setCertain(Math.max(certain, sent + Rules.certain(requestedLease)));
        if (state == State.WAITING) {
            hold(sent);
        } else if (requestedLease != lease) {
            renewNow();
        } else {
            endRenewals(it -> it.complete(null));
            renewFrom(sent);
        }
    }

    private void endRenewals(Consumer<CompletableFuture<Void>> end) {
        List<CompletableFuture<Void>> ended = new ArrayList<>(renewed);
        renewed.clear();
        ended.forEach(end);
    }

    /** The server does not know the token any more. A grant that did not count yet is requested again. */
    private void gone(LossReason why) {
        if (state == State.WAITING) {
            token = 0;
            certain = 0;
            disown();
            if (waits) {
                ask();
            } else {
                giveUp(null);
            }
        } else {
            lose(why);
        }
    }

    private void lose(LossReason why) {
        wasRenewed = renews.get() || spec.renew();
        forget(State.LOST);
        end.complete(why);
        String text = "lock '" + spec.title() + "' of owner '" + owner + "' is lost: " + why;
        if (wasRenewed) {
            Log.write(log -> log.warn(text));
        } else {
            Log.write(log -> log.info(text));
        }
        endRenewals(it -> it.completeExceptionally(lost()));
        client.publish(listener -> listener.lost(spec.title(), why));
        disown();
        if (route.broke || !pending.isEmpty()) {
            withdraw();
        } else if (spec.names().size() > 1) {
            // The server may still hold the other names (B35).
            route.send(Request.RELEASE, () -> List.<byte[][]>of(commands.release(token)), this::isRelease, answer -> { });
        }
    }

    /** The connection of an ephemeral hold ended. */
    private void disconnected() {
        if (isGranted()) {
            gone(LossReason.DISCONNECTED);
        }
    }

    /** Closes the connection of an ephemeral hold. */
    void disown() {
        Pool.Connection connection = route.dedicated;
        route.dedicated = null;
        if (connection != null) {
            connection.close(new UnavailableException("the lock is not held any more", null));
        }
    }

    LockLostException lost() {
        LossReason why = end.getNow(LossReason.EXPIRED);
        return new LockLostException("lock '" + spec.title() + "' of owner '" + owner + "' is lost: " + why, why);
    }

    /** For all threads: whether the lock is certainly held, by the monotonic clock. */
    boolean isCertain() {
        return state == State.HELD && client.serial.now() < certain;
    }

    /**
     * For all threads: whether the lock is certainly held, by both clocks. If only the wall clock says that the time is over, the machine was suspended: the
     * hold is renewed at once (B7).
     */
    boolean isHeld() {
        if (!isCertain()) {
            return false;
        }
        boolean isHeld = client.serial.clock.wall() <= wallCertain;
        if (!isHeld && renews.get()) {
            client.serial.run(this::renewNow);
        }
        return isHeld;
    }

    /** For all threads: whether the hold is renewed or, if it is lost, was. */
    boolean isOrWasRenewed() {
        return renews.get() || wasRenewed;
    }

    /** Restarts the lease, with this duration from now on. If {@code keepsRenewing}, the client renews it from now on. */
    void renew(Duration length, boolean keepsRenewing, CompletableFuture<Void> future) {
        if (state != State.HELD) {
            future.completeExceptionally(state == State.LOST ? lost() : released());
            return;
        }
        lease = Math.max(Rules.MS, length.toNanos());
        route.lease = lease;
        renews.compareAndSet(false, keepsRenewing);
        renewed.add(future);
        renewNow();
    }

    UnavailableException notRenewed() {
        return new UnavailableException("lock '" + spec.title() + "' was not renewed in time", lastError);
    }

    private IllegalStateException released() {
        return new IllegalStateException("lock '" + spec.title() + "' is released");
    }

    /** Asks the server whether this owner holds the lock, without renewing it (B9). */
    void check(CompletableFuture<Boolean> future) {
        if (state != State.HELD) {
            future.complete(false);
            return;
        }
        List<CompletableFuture<@Nullable Object>> infos = spec.names().stream().map(name -> client.ask(name, "LOCK.INFO", name, "COUNT", 5000)).toList();
        CompletableFuture.allOf(infos.toArray(new CompletableFuture<?>[0])).whenComplete((all, why) -> {
            if (why != null) {
                future.completeExceptionally(why.getCause());
                return;
            }
            if (state == State.HELD && !infos.stream().allMatch(info -> holds(info.join()))) {
                lose(LossReason.GONE);
            }
            future.complete(isHeld());
        });
    }

    /** Whether the reply to LOCK.INFO shows this hold, or may have left it out: it may show fewer holders than there are. */
    private boolean holds(@Nullable Object info) {
        Map<String, Object> map = Reply.map(info);
        List<Map<String, Object>> holders = Reply.maps(map.get("holders"));
        return Reply.number(map.get("holder_count")).orElse(0L) > holders.size()
            || holders.stream().anyMatch(holder -> owner.equals(Reply.text(holder.get("owner"))) && Long.valueOf(token).equals(holder.get("token")));
    }

    // ---- Releasing ----

    /** Releases the lock or, with a time, lets it expire after that time (B36). */
    void release(@Nullable Duration keep, CompletableFuture<Void> future) {
        if (state == State.LOST) {
            future.completeExceptionally(lost());
        } else if (state == State.HELD) {
            state = State.RELEASING;
            renews.set(false);
            // The server's answer decides, also if the lease ends before it.
            if (heldTimer != null) {
                heldTimer.cancel();
            }
            endRenewals(it -> it.completeExceptionally(released()));
        } else {
            future.completeExceptionally(released());
            return;
        }
        long until = client.serial.now() + Math.max(lease, Rules.SECOND);
        Consumer<Route.Answer> then = answer -> {
            LossReason loss = null;
            Throwable error = null;
            switch (answer.verdict()) {
                case YES -> { }
                case NIL, OVERWRITTEN -> {
                    // Nil to a repetition may mean that the reply to the first attempt was lost (B17).
                    if (releases == 1 || !wasCertain || keep != null) {
                        loss = answer.verdict() == Verdict.NIL ? LossReason.GONE : LossReason.CHANGED;
                    }
                }
                case BROKEN -> {
                    // If an ephemeral hold's connection ended, the server releases it.
                    if (route.dedicated == null || keep != null) {
                        error = new UnavailableException("lock '" + spec.title() + "': the release was not confirmed", answer.error());
                    }
                }
                default -> error = answer.error();
            }
            if (state == State.RELEASING && loss != null) {
                lose(loss);
            } else if (state == State.RELEASING) {
                forget(State.RELEASED);
                disown();
                end.complete(null);
                client.publish(listener -> listener.released(spec.title(), Duration.ofNanos(client.serial.now() - heldSince)));
            }
            if (loss != null || error != null) {
                future.completeExceptionally(loss == null ? error : lost());
            } else {
                future.complete(null);
            }
        };
        if (keep == null) {
            route.repeat(Request.RELEASE, until, this::releaseCommands, this::isRelease, then);
        } else {
            keep(keep.toNanos(), until, then);
        }
    }

    /** Sends a RENEW for each name; the pool writes them in one pipeline. If an answer is not positive, the first such is the outcome. */
    private void keep(long time, long until, Consumer<Route.Answer> then) {
        List<Route.Answer> answers = new ArrayList<>();
        for (String name : spec.names()) {
            Predicate<Object> isReply = reply -> Reply.answersEach(List.of(name), reply, this::isToken);
            route.repeat(Request.RENEW, until, () -> List.<byte[][]>of(commands.keep(name, token, time)), isReply, answer -> {
                answers.add(answer);
                if (answers.size() == spec.names().size()) {
                    then.accept(answers.stream().filter(it -> it.verdict() != Verdict.YES).findFirst().orElse(answer));
                }
            });
        }
    }

    private List<byte[][]> releaseCommands() {
        if (++releases == 1) {
            wasCertain = client.serial.now() < certain;
        }
        if (route.broke || !pending.isEmpty()) {
            // A stale ACQUIRE may still be in the queue (B18).
            return List.of(commands.release(token), commands.withdraw());
        }
        return List.<byte[][]>of(commands.release(token));
    }
}
