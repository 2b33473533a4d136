package holdfast;

import holdfast.spi.Node;
import holdfast.spi.RedisConnection;
import holdfast.spi.RedisError;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ThreadLocalRandom;
import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;

/** The connections to one server node, the requests that need one, and the pause after errors. Everything runs in steps of the client. */
final class Pool {
    private static final int PIPELINE = 256;
    private static final long FIRST_PAUSE = 20_000_000L;
    private static final long LONGEST_PAUSE = 1_000_000_000L;
    private static final long CONNECT = 2_000_000_000L;
    /** Attempts to connect that were given up but have not returned yet. */
    private static final int HUNG = 4;

    /** A request whose replies are still to be read. */
    private static final class Owed {
        final Request request;
        final int commands;
        /** How many replies to its commands have been read; the one to ASKING comes before. */
        int read;

        Owed(Request request, int commands) {
            this.request = request;
            this.commands = commands;
            read = request.asking ? -1 : 0;
        }
    }

    /** A connection and the requests whose replies it owes. */
    final class Connection implements RedisConnection.Replies {
        private final RedisConnection raw;
        private final Deque<Owed> owed = new ArrayDeque<>();
        private boolean used;
        /** It was idle before the commands that are under way. */
        private boolean reused;
        private @Nullable Runnable whenClosed;
        boolean closed;

        Connection(RedisConnection raw) {
            this.raw = raw;
        }

        boolean wasIdle() {
            return reused;
        }

        /** Writes requests in one pipeline; returns false if none of them is wanted any more. */
        boolean send(List<Request> requests) {
            List<byte[][]> all = new ArrayList<>();
            reused = used;
            for (Request request : requests) {
                List<byte[][]> commands = request.write(client.serial.now());
                if (commands.isEmpty()) {
                    request.done = true;
                    request.dropped();
                    continue;
                }
                if (request.asking) {
                    all.add(Reply.command("ASKING"));
                }
                all.addAll(commands);
                request.connection = this;
                owed.add(new Owed(request, commands.size()));
            }
            if (!all.isEmpty()) {
                used = true;
                raw.send(all, this);
            }
            return !all.isEmpty();
        }

        @Override
        public void reply(int index, @Nullable Object reply) {
            client.serial.run(() -> answered(reply));
        }

        private void answered(@Nullable Object reply) {
            Owed next = owed.peek();
            if (closed || next == null) {
                return;
            }
            int index = next.read++;
            boolean last = next.read == next.commands;
            if (last) {
                owed.remove();
            }
            if (!(reply instanceof RedisError)) {
                // The first reply after an outage is that to LOCK.VERSION. The pause is set back when a request is answered.
                if (proven) {
                    pause = 0;
                    pauseUntil = 0;
                }
                proven = true;
            }
            if (index >= 0) {
                next.request.done |= last;
                next.request.answered(index, reply);
            }
            if (owed.isEmpty() && whenClosed == null && !closed) {
                idle.addFirst(this);
                wake();
            }
        }

        @Override
        public void broken(Throwable cause) {
            client.serial.run(() -> close(cause));
        }

        /** Closes it; what it owes fails. */
        void close(Throwable cause) {
            if (closed) {
                return;
            }
            closed = true;
            all.remove(this);
            raw.close();
            idle.remove(this);
            // Also when the last one ends without a command under way: the server may be gone.
            proven &= !all.isEmpty() && owed.isEmpty();
            if (!owed.isEmpty()) {
                outage();
                if (reused) {
                    dropIdle();
                }
                client.connectionLost(node);
            }
            List<Owed> failed = new ArrayList<>(owed);
            owed.clear();
            if (whenClosed != null) {
                whenClosed.run();
            }
            for (Owed it : failed) {
                if (!it.request.done) {
                    it.request.done = true;
                    it.request.failed(cause);
                }
            }
            wake();
        }

        /** Takes it out of the pool, for an ephemeral hold. */
        void dedicate(Runnable whenClosed) {
            this.whenClosed = whenClosed;
            all.remove(this);
            wake();
        }
    }

    private final Holdfast client;
    final Node node;
    private final LinkedHashSet<Connection> all = new LinkedHashSet<>();
    private final Deque<Connection> idle = new ArrayDeque<>();
    private final List<Deque<Request>> queues = List.of(new ArrayDeque<>(), new ArrayDeque<>(), new ArrayDeque<>());
    private int opening;
    private int hung;
    /** The server has answered since the last connection broke or could not be opened. Until it has, one attempt to connect is made at a time. */
    private boolean proven;
    private boolean waking;
    private long pause;
    private long pauseUntil;
    private Serial.@Nullable Timer attempt;
    long replicasTimeout = 1000;

    /** Places for waits, and the acquisitions that have none: in the order of arrival, and in the order in which they ask. */
    private int places;
    private final LinkedHashSet<Acquisition> placeless = new LinkedHashSet<>();
    private final Deque<Acquisition> rotation = new ArrayDeque<>();
    private boolean polling;

    Pool(Holdfast client, Node node) {
        this.client = client;
        this.node = node;
    }

    void submit(Request request) {
        queues.get(request.priority).add(request);
        wake();
    }

    /** Forgets a request that has not been written; closes the connection of one that has. */
    void abandon(Request request, String why) {
        if (request.done) {
            return;
        }
        if (request.connection != null) {
            request.connection.close(new UnavailableException(why, null));
        } else {
            request.done = true;
            queues.get(request.priority).remove(request);
            request.failed(new UnavailableException(why, null));
        }
    }

    private void wake() {
        if (!waking) {
            waking = true;
            client.serial.run(this::serve);
        }
    }

    private void serve() {
        waking = false;
        for (Deque<Request> queue : queues) {
            while (!queue.isEmpty()) {
                if (queue.peek().done) {
                    queue.remove();
                    continue;
                }
                Connection connection = idle.poll();
                if (connection == null) {
                    open(queues.stream().mapToInt(Deque::size).sum());
                    return;
                }
                List<Request> batch = new ArrayList<>();
                do {
                    batch.add(queue.remove());
                } while (queue == queues.get(Request.RENEW) && !queue.isEmpty() && batch.size() < PIPELINE);
                batch.removeIf(request -> request.done);
                if (!connection.send(batch) && !connection.closed) {
                    idle.addFirst(connection);
                }
            }
        }
    }

    private void open(int wanted) {
        while (opening < (proven ? wanted : 1) && all.size() + opening < client.maxConnections) {
            long rest = pauseUntil - client.serial.now();
            if (!proven && (rest > 0 || hung >= HUNG)) {
                if (attempt == null) {
                    attempt = client.serial.after(Math.max(rest, FIRST_PAUSE), () -> {
                        attempt = null;
                        wake();
                    });
                }
                return;
            }
            opening++;
            new Attempt().start();
        }
    }

    /** An attempt to connect. */
    private final class Attempt {
        private boolean over;
        private boolean ended;
        private @Nullable Connection connection;

        void start() {
            Serial.Timer bound = client.serial.after(CONNECT, () -> {
                hung++;
                finish(null, new UnavailableException("no connection to " + node + " within 2 s", null));
            });
            client.worker.execute(() -> {
                try {
                    RedisConnection raw = client.connector.open(node, () -> client.serial.run(this::closed));
                    client.serial.run(() -> opened(bound, raw, null));
                } catch (Exception | LinkageError why) {
                    client.serial.run(() -> opened(bound, null, why));
                }
            });
        }

        private void closed() {
            ended = true;
            if (connection != null) {
                connection.close(new UnavailableException("the connection to " + node + " was closed", null));
            }
        }

        private void opened(Serial.Timer bound, @Nullable RedisConnection raw, @Nullable Throwable why) {
            bound.cancel();
            boolean late = over;
            hung -= late ? 1 : 0;
            if (raw != null && (client.isShut() || ended)) {
                raw.close();
            }
            if (!late || raw != null && !client.isShut() && !ended) {
                // A late connection is as good as any other one.
                opening += late ? 1 : 0;
                finish(client.isShut() || ended ? null : raw, why);
            } else {
                wake();
            }
        }

        private void finish(@Nullable RedisConnection raw, @Nullable Throwable why) {
            over = true;
            if (raw == null) {
                opening--;
                proven = false;
                outage();
                client.connectionLost(node);
                refuse(why == null ? new UnavailableException("no connection to " + node, null) : refusal(why));
                return;
            }
            connection = new Connection(raw);
            all.add(connection);
            if (proven) {
                opening--;
                idle.addLast(connection);
                wake();
            } else {
                verify(connection);
            }
        }
    }

    /** What the server says of credentials is no outage. */
    private static Throwable refusal(Throwable why) {
        for (Throwable cause = why; cause != null; cause = cause.getCause()) {
            String message = String.valueOf(cause.getMessage());
            if (message.startsWith("NOAUTH") || message.startsWith("WRONGPASS") || message.startsWith("NOPERM")) {
                return new HoldfastException(message, why);
            }
        }
        return why;
    }

    /** All that need a connection share the outcome of the attempt. */
    private void refuse(Throwable why) {
        for (Deque<Request> queue : queues) {
            List<Request> waiting = new ArrayList<>(queue);
            queue.clear();
            for (Request request : waiting) {
                if (!request.done) {
                    request.done = true;
                    request.failed(why);
                }
            }
        }
    }

    /** The first connection, and one after an outage, has to show that the server answers before others are opened. */
    private void verify(Connection connection) {
        ask(connection, "LOCK.VERSION", version -> {
            if (version instanceof RedisError error && error.message().contains("unknown command")) {
                ask(connection, "LOCK.ACQUIRE", acquire -> {
                    boolean loaded = !(acquire instanceof RedisError other && other.message().contains("unknown command"));
                    verified(connection, !loaded ? Reply.exception(error)
                        : new VersionException("the module of the server at " + node + " is too old: it has no LOCK.VERSION; this client needs protocol 4 (0.4)"));
                });
            } else {
                verified(connection, wrong(version));
            }
        });
    }

    private void ask(Connection connection, String command, Consumer<@Nullable Object> then) {
        Request request = new Request(Request.OTHER) {
            @Override
            List<byte[][]> write(long now) {
                return List.<byte[][]>of(Reply.command(command));
            }

            @Override
            void answered(int index, @Nullable Object reply) {
                then.accept(reply);
            }

            @Override
            void failed(Throwable why) {
                opening--;
                refuse(why);
            }
        };
        client.serial.after(CONNECT, () -> abandon(request, "no reply to " + command + " within 2 s"));
        connection.send(List.of(request));
    }

    private void verified(Connection connection, @Nullable HoldfastException wrong) {
        opening--;
        proven = wrong == null;
        if (proven) {
            return;
        }
        outage();
        connection.close(wrong);
        refuse(wrong);
    }

    private @Nullable HoldfastException wrong(@Nullable Object version) {
        if (version instanceof RedisError error) {
            return error.code().equals("NOPERM") ? null : Reply.exception(error);
        }
        Map<String, Object> map = Reply.map(version);
        if (map.get("protocol") instanceof List<?> range && range.size() >= 2 && range.get(0) instanceof Long lowest && range.get(1) instanceof Long highest
                && (lowest > 4 || highest < 4)) {
            return new VersionException("the server at " + node + " has module " + Reply.text(map.get("version")) + " with protocol " + lowest + " to " + highest
                + "; this client speaks protocol 4: " + (lowest > 4 ? "this client is too old" : "the server's module is too old"));
        }
        replicasTimeout = map.get("replicas-timeout") instanceof Long ms ? ms : replicasTimeout;
        return null;
    }

    /** An error that passes, or a broken connection: the pause doubles, once for each outage. */
    void outage() {
        long now = client.serial.now();
        if (now >= pauseUntil) {
            pause = pause == 0 ? FIRST_PAUSE : Math.min(2 * pause, LONGEST_PAUSE);
            pauseUntil = now + ThreadLocalRandom.current().nextLong(pause / 2, pause + 1);
        }
    }

    /** How long a request waits before it is sent again, in ns. */
    long pause(long lease) {
        outage();
        long most = Math.max(lease / 16, 1_000_000L);
        return Math.min(pauseUntil - client.serial.now(), ThreadLocalRandom.current().nextLong(most / 2, most + 1));
    }

    void dropIdle() {
        new ArrayList<>(idle).forEach(connection -> connection.close(new UnavailableException("the primary may have changed", null)));
    }

    /** Gives the acquisition a place for its wait, or lets it ask now and then until it gets one. */
    boolean takePlace(Acquisition acquisition) {
        if (places < Math.max(1, client.maxConnections - 2)) {
            places++;
            return true;
        }
        placeless.add(acquisition);
        return false;
    }

    /** An acquisition without a place was refused: it asks again in a second. One such request is under way at a time (B30). */
    void rotate(Acquisition acquisition, boolean wasPoll) {
        polling &= !wasPoll;
        if (placeless.contains(acquisition)) {
            acquisition.nextPoll = client.serial.now() + 1_000_000_000L;
            rotation.remove(acquisition);
            rotation.add(acquisition);
        }
        while (!rotation.isEmpty() && !placeless.contains(rotation.peek())) {
            rotation.remove();
        }
        if (!polling && !rotation.isEmpty()) {
            polling = true;
            Acquisition next = rotation.remove();
            client.serial.after(next.nextPoll - client.serial.now(), () -> {
                if (!placeless.contains(next) || !next.poll()) {
                    rotate(next, true);
                }
            });
        }
    }

    void leavePlace(Acquisition acquisition, boolean had) {
        placeless.remove(acquisition);
        if (had) {
            places--;
            if (!placeless.isEmpty()) {
                Acquisition next = placeless.iterator().next();
                placeless.remove(next);
                places++;
                next.gotPlace();
            }
        }
    }

    void close() {
        refuse(new HoldfastException("the client is closed", null));
        new ArrayList<>(all).forEach(connection -> connection.close(new HoldfastException("the client is closed", null)));
    }
}
