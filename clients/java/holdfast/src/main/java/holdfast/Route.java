package holdfast;

import static java.nio.charset.StandardCharsets.UTF_8;

import holdfast.spi.Node;
import holdfast.spi.RedisError;
import java.util.List;
import java.util.function.Consumer;
import java.util.function.Predicate;
import java.util.function.Supplier;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.jspecify.annotations.Nullable;

/** Sends requests to the node that serves a key, follows redirects, and decides when a request may be repeated. All methods are called in steps. */
final class Route {
    /**
     * The outcome of a request.
     *
     * @param reply the reply, or an exception if no reply arrived
     */
    record Answer(Request request, Pool pool, Verdict verdict, @Nullable Object reply) {
        /** The exception that the application gets. */
        HoldfastException error() {
            return reply instanceof RedisError error ? Reply.exception(error)
                : reply instanceof HoldfastException why ? why
                : new UnavailableException(pool.node + " could not be reached", (Throwable) reply);
        }
    }

    private static final Pattern REDIRECT = Pattern.compile("\\w+ (\\d{1,5}) (.*):(\\d{1,5})");

    private final Holdfast client;
    private final int slot;
    private final boolean replicas;
    /** The lease of the lock, which timeouts and pauses depend on. */
    long lease;
    /** The connection of an ephemeral hold, which takes all its requests. */
    Pool.@Nullable Connection dedicated;
    /** A connection broke under a request, which may still be on its way to the server. */
    boolean broke;
    /** Whether requests whose replies were lost are repeated. */
    boolean repeatsLost = true;
    /** The node that the next request goes to, after ASK. */
    private @Nullable Node importing;
    /** The last repetition had no pause: the next one must have one. */
    private boolean hurried;

    Route(Holdfast client, String key, long lease, boolean replicas) {
        this.client = client;
        this.lease = lease;
        this.replicas = replicas;
        slot = client.connector.isCluster() ? Reply.slot(key.getBytes(UTF_8)) : 0;
    }

    /** Returns the pool of the node that the next request goes to. */
    Pool pool() {
        return importing == null ? client.poolOf(slot) : client.pool(importing);
    }

    /** Returns how much longer than others a request with REPLICAS may take, in ns. */
    long confirmation(Pool pool) {
        return replicas ? pool.replicasTimeout * Rules.MS : 0;
    }

    /**
     * Makes a request to the node that {@link #pool} returned.
     *
     * @param isReply whether the request can have this reply, which is neither nil nor an error; if it can't, its connection is closed
     */
    Request request(Pool pool, int priority, Supplier<List<byte[][]>> commands, Predicate<Object> isReply, Consumer<Answer> then) {
        Request request = new Request(priority, commands, (it, outcome) -> then.accept(answer(it, pool, checked(it, outcome, isReply))));
        request.asking = importing != null;
        importing = null;
        return request;
    }

    /** Sends a request that does not wait at the server. If no reply arrives in time, its connection is closed. */
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

    /** Sends a request, and repeats it until it is answered, fails for good, or the time is over. */
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

    private @Nullable Object checked(Request request, @Nullable Object outcome, Predicate<Object> isReply) {
        // Of a client for one server. No repetition would end otherwise.
        if (outcome instanceof RedisError error && Verdict.of(error) == Verdict.MOVED && !client.connector.isCluster()) {
            return new RedisError("ERR this server is a node of a cluster: give Holdfast a client for a cluster (redirect: " + error.message() + ")");
        }
        if (outcome == null || outcome instanceof RedisError || outcome instanceof Throwable || isReply.test(outcome)) {
            return outcome;
        }
        UnavailableException why = new UnavailableException("protocol error: unexpected reply", null);
        request.connection.close(why);
        return why;
    }

    private Answer answer(Request request, Pool pool, @Nullable Object outcome) {
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
     * Returns how long to wait before a request is repeated. A request that waited for a connection in vain needs no further pause. A redirect is followed,
     * and a dead idle connection is replaced, without a pause: but not twice in a row (B25).
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

    /** Follows a redirect. One without a host leads to another port of the node that replied. */
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
