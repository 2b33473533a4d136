package holdfast;

import holdfast.spi.Node;
import holdfast.spi.RedisError;
import java.util.List;
import java.util.function.Consumer;
import java.util.function.Predicate;
import java.util.function.Supplier;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.jspecify.annotations.Nullable;

/** Sends requests to the node that serves a key, follows the key when it moves, and says when a request may be repeated. Everything runs in steps. */
final class Route {
    /**
     * The outcome of a request.
     *
     * @param reply the reply; an error reply or an exception if it failed
     */
    record Answer(Request request, Pool pool, Verdict verdict, @Nullable Object reply) {
        /** What the application is to learn of a failure. */
        HoldfastException error() {
            return reply instanceof RedisError error ? Reply.exception(error)
                : reply instanceof HoldfastException why ? why
                : new UnavailableException("no answer of " + pool.node, (Throwable) reply);
        }
    }

    private static final Pattern REDIRECT = Pattern.compile("\\w+ (\\d{1,5}) (.*):(\\d{1,5})");

    private final Holdfast client;
    private final int slot;
    private final boolean replicas;
    /** Of the lock; times of requests depend on it. */
    long lease;
    /** The connection of an ephemeral hold: all requests go over it. */
    Pool.@Nullable Connection dedicated;
    /** A connection broke under a request: a stale one may still be on its way. */
    boolean broke;
    /** Whether a request is repeated whose reply was lost: not one that would do something else the second time. */
    boolean repeatsLost = true;
    private @Nullable Node importing;
    private boolean hurried;

    Route(Holdfast client, String key, long lease, boolean replicas) {
        this.client = client;
        this.lease = lease;
        this.replicas = replicas;
        slot = client.connector.isCluster() ? Reply.slot(Reply.command(key)[0]) : 0;
    }

    /** The connections to the node that the next request goes to. */
    Pool pool() {
        return importing == null ? client.poolOf(slot) : client.pool(importing);
    }

    /** How much longer a request may take that waits for replicas. */
    long confirmation(Pool pool) {
        return replicas ? pool.replicasTimeout * Rules.MS : 0;
    }

    /**
     * A request to the node that {@link #pool} returned.
     *
     * @param isReply whether this is a reply to it, if it is neither nil nor an error: if not, its connection counts as broken
     */
    Request request(Pool pool, int priority, Supplier<List<byte[][]>> commands, Predicate<Object> isReply, Consumer<Answer> then) {
        Request request = new Request(priority, commands, (it, outcome) -> then.accept(judged(it, pool, checked(it, outcome, isReply))));
        request.asking = importing != null;
        importing = null;
        return request;
    }

    /** Sends a request that does not wait at the server. Its connection is closed if it is silent. */
    void send(int priority, Supplier<List<byte[][]>> commands, Predicate<Object> isReply, Consumer<Answer> then) {
        Pool pool = pool();
        Request request = request(pool, priority, commands, isReply, then);
        long silence = dedicated == null ? Rules.silence(lease) + confirmation(pool) : Math.max(lease, Rules.SECOND);
        request.limit(client.serial.after(silence, () -> pool.abandon(request)));
        if (dedicated == null) {
            pool.submit(request);
        } else if (dedicated.closed) {
            request.end(new UnavailableException("the connection of the ephemeral lock was closed", null));
        } else {
            dedicated.send(List.of(request));
        }
    }

    /** Sends a request again and again until it is answered, a failure does not pass, or the time is over. */
    void repeat(int priority, long until, Supplier<List<byte[][]>> commands, Predicate<Object> isReply, Consumer<Answer> then) {
        send(priority, commands, isReply, answer -> {
            boolean lost = answer.verdict == Verdict.BROKEN && answer.request.connection != null;
            boolean passes = answer.verdict.passes() && (repeatsLost || !lost) && !client.isShut() && (dedicated == null || !dedicated.closed);
            long pause = passes ? pause(answer) : 0;
            if (passes && client.serial.now() + pause <= until) {
                client.serial.after(pause, () -> repeat(priority, until, commands, isReply, then));
            } else {
                then.accept(answer);
            }
        });
    }

    private static @Nullable Object checked(Request request, @Nullable Object outcome, Predicate<Object> isReply) {
        if (outcome == null || outcome instanceof RedisError || outcome instanceof Throwable || isReply.test(outcome)) {
            return outcome;
        }
        UnavailableException why = new UnavailableException("the server answered what is no reply to this request", null);
        request.connection.close(why);
        return why;
    }

    private Answer judged(Request request, Pool pool, @Nullable Object outcome) {
        Answer answer = new Answer(request, pool, Verdict.of(outcome), outcome);
        switch (answer.verdict) {
            case YES, NIL -> hurried = false;
            case MOVED -> follow((RedisError) outcome, pool.node);
            case PASSING -> client.connector.refresh();
            case BROKEN -> broke |= request.connection != null;
            case DEMOTED -> {
                pool.dropIdle();
                request.connection.close(new UnavailableException("the primary may have changed", null));
                client.connectionLost(pool.node);
            }
            default -> { }
        }
        return answer;
    }

    /**
     * How long to wait before a request is repeated. A request that waited for a connection without success needs no further pause. A redirect is followed at
     * once, and a dead idle connection is replaced at once: once (B25).
     */
    long pause(Answer answer) {
        if (answer.request.expired) {
            return 0;
        }
        boolean hurries = !hurried && switch (answer.verdict) {
            case SUPERSEDED -> true;
            case MOVED -> client.connector.isCluster();
            case BROKEN -> answer.request.connection != null && answer.request.connection.wasIdle();
            default -> false;
        };
        hurried |= hurries;
        return hurries ? 0 : answer.pool.pause(lease);
    }

    /** One without a host leads to another port of the node that answered. */
    private void follow(RedisError redirect, Node from) {
        Matcher words = REDIRECT.matcher(redirect.message());
        if (client.connector.isCluster() && words.matches()) {
            Node node = new Node(words.group(2).isEmpty() ? from.host() : words.group(2), Integer.parseInt(words.group(3)));
            if (redirect.code().equals("ASK")) {
                importing = node;
            } else {
                client.moved(Integer.parseInt(words.group(1)), node);
            }
        }
    }
}
