package holdfast;

import holdfast.spi.Node;
import holdfast.spi.RedisConnection;
import holdfast.spi.RedisError;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.Iterator;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ThreadLocalRandom;
import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;

/** The connections to one server node, the requests that need one, and the pause after errors. Everything runs in steps of the client. */
final class Pool {
    private static final int PIPELINE = 256;
    private static final long FIRST_PAUSE = 20 * Rules.MS;
    private static final long LONGEST_PAUSE = Rules.SECOND;
    private static final long CONNECT = 2 * Rules.SECOND;
    /** At most so many attempts to connect that were given up but have not returned yet. */
    private static final int HUNG = 4;

    /** A connection, which may still be opening, and the requests whose replies it owes. */
    final class Connection {
        private @Nullable RedisConnection raw;
        private final Deque<Request> owed = new ArrayDeque<>();
        private boolean used;
        /** It was idle before the commands that are under way. */
        private boolean reused;
        /** It was not open in time. */
        private boolean late;
        /** Requests of the application go over it. */
        private boolean greeted;
        private @Nullable Runnable whenClosed;
        boolean closed;

        private void open() {
            Serial.Timer limit = client.serial.after(CONNECT, () -> {
                late = true;
                hung++;
                notOpened(new UnavailableException("no connection to " + node + " within 2 s", null));
            });
            try {
                client.worker.execute(() -> {
                    try {
                        RedisConnection opened = client.connector.open(node, () -> client.serial.run(this::ended));
                        client.serial.run(() -> returned(limit, opened, null));
                    } catch (Exception | Error why) {
                        client.serial.run(() -> returned(limit, null, why));
                    }
                });
            } catch (RuntimeException | Error why) {
                // No thread is to be had.
                returned(limit, null, why);
            }
        }

        private void returned(Serial.Timer limit, @Nullable RedisConnection opened, @Nullable Throwable why) {
            limit.cancel();
            boolean isOpen = opened != null && !closed && !client.isShut();
            if (opened != null && !isOpen) {
                opened.close();
            }
            if (late) {
                // A late connection is as good as any other one.
                hung--;
                opening += isOpen ? 1 : 0;
            }
            if (isOpen) {
                raw = opened;
                all.add(this);
                greet();
            } else if (late) {
                wake();
            } else {
                notOpened(why == null ? new UnavailableException("no connection to " + node, null) : refusal(why));
            }
        }

        private void notOpened(Throwable why) {
            opening--;
            proven = false;
            outage();
            client.connectionLost(node);
            refuse(why);
        }

        /** The first connection, and one after an outage, has to show that the server answers before others are opened. */
        private void greet() {
            if (proven) {
                opening--;
                greeted = true;
                release();
                return;
            }
            ask("LOCK.VERSION", version -> {
                if (version instanceof RedisError error && error.message().contains("unknown command")) {
                    ask("LOCK.ACQUIRE", acquire -> greeted(acquire instanceof RedisError other && other.message().contains("unknown command") ? Reply.exception(error)
                        : new VersionException("the module of the server at " + node + " is too old: it has no LOCK.VERSION; this client needs protocol 4 (0.4)")));
                } else {
                    greeted(mismatch(version));
                }
            });
        }

        private void ask(String command, Consumer<@Nullable Object> then) {
            Request request = new Request(Request.OTHER, () -> List.<byte[][]>of(Reply.command(command)), (it, outcome) -> {
                if (outcome instanceof Throwable why) {
                    opening--;
                    refuse(why);
                } else {
                    then.accept(outcome);
                }
            });
            request.limit(client.serial.after(CONNECT, () -> abandon(request)));
            send(List.of(request));
        }

        private void greeted(@Nullable HoldfastException mismatch) {
            opening--;
            greeted = mismatch == null;
            proven = greeted;
            if (!greeted) {
                outage();
                close(mismatch);
                refuse(mismatch);
            }
        }

        boolean wasIdle() {
            return reused;
        }

        /** Writes requests in one pipeline; returns false if none of them is wanted any more. */
        boolean send(List<Request> requests) {
            List<byte[][]> written = new ArrayList<>();
            reused = used;
            for (Request request : requests) {
                request.sent = client.serial.now();
                List<byte[][]> commands = request.commands.get();
                if (commands.isEmpty()) {
                    request.ended = true;
                    request.forgetLimit();
                    continue;
                }
                for (byte[][] command : commands) {
                    if (request.asking) {
                        // It is for one command.
                        written.add(Reply.command("ASKING"));
                    }
                    written.add(command);
                }
                request.connection = this;
                request.unread = request.asking ? 2 * commands.size() : commands.size();
                owed.add(request);
            }
            if (!written.isEmpty()) {
                used = true;
                raw.send(written, reply -> client.serial.run(() -> read(reply)));
            }
            return !written.isEmpty();
        }

        private void read(@Nullable Object reply) {
            Request request = owed.peek();
            if (closed || request == null) {
                return;
            }
            request.unread--;
            if (request.asking && request.unread % 2 == 1) {
                // This is the reply to ASKING.
                return;
            }
            if (request.unread == 0) {
                owed.remove();
            }
            if (greeted && !(reply instanceof RedisError)) {
                // A reply to a request of the application, not to LOCK.VERSION.
                pause = 0;
                pauseUntil = 0;
                proven = true;
            }
            request.end(reply);
            release();
        }

        /** Others may use it, unless it is still being used. */
        private void release() {
            if (greeted && owed.isEmpty() && whenClosed == null && !closed) {
                idle.addFirst(this);
                wake();
            }
        }

        private void ended() {
            close(new UnavailableException("the connection to " + node + " was closed", null));
        }

        /** Closes it; what it owes fails. */
        void close(Throwable cause) {
            if (closed) {
                return;
            }
            closed = true;
            all.remove(this);
            idle.remove(this);
            if (raw != null) {
                raw.close();
            }
            // Also when the last one ends without a command under way: the server may be gone.
            proven &= !all.isEmpty() && owed.isEmpty();
            if (!owed.isEmpty()) {
                outage();
                if (reused) {
                    dropIdle();
                }
                client.connectionLost(node);
            }
            if (whenClosed != null) {
                whenClosed.run();
            }
            List<Request> failed = new ArrayList<>(owed);
            owed.clear();
            failed.forEach(request -> {
                request.unread = 0;
                request.end(cause);
            });
            wake();
        }

        /** Removes the connection from the pool, for an ephemeral hold. */
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

    /** How many waits have a place, and the acquisitions that have none, in the order of arrival. */
    private int places;
    private final LinkedHashSet<Acquisition> placeless = new LinkedHashSet<>();

    Pool(Holdfast client, Node node) {
        this.client = client;
        this.node = node;
    }

    void submit(Request request) {
        if (client.isShut()) {
            request.end(new HoldfastException("the client is closed", null));
        } else {
            queues.get(request.priority).add(request);
            wake();
        }
    }

    /** Forgets a request that has not been written; closes the connection of one that has. */
    void abandon(Request request) {
        UnavailableException why = new UnavailableException("no answer of " + node + " in time", null);
        if (request.connection != null) {
            request.connection.close(why);
        } else {
            queues.get(request.priority).remove(request);
            request.expired = true;
            request.end(why);
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
                Connection connection = idle.poll();
                if (connection == null) {
                    open(queues.stream().mapToInt(Deque::size).sum());
                    return;
                }
                List<Request> batch = new ArrayList<>();
                do {
                    batch.add(queue.remove());
                } while (queue == queues.get(Request.RENEW) && !queue.isEmpty() && batch.size() < PIPELINE);
                if (!connection.send(batch)) {
                    connection.release();
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
            new Connection().open();
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
            waiting.forEach(request -> request.end(why));
        }
    }

    private @Nullable HoldfastException mismatch(@Nullable Object version) {
        if (version instanceof RedisError error) {
            return error.code().equals("NOPERM") ? null : Reply.exception(error);
        }
        Map<String, Object> map = Reply.map(version);
        if (map.get("protocol") instanceof List<?> range && range.size() >= 2 && range.get(0) instanceof Long lowest && range.get(1) instanceof Long highest
                && (lowest > 4 || highest < 4)) {
            return new VersionException("the server at " + node + " has module " + Reply.text(map.get("version")) + " with protocol " + lowest + " to " + highest
                + "; this client speaks protocol 4: " + (lowest > 4 ? "this client is too old" : "the server's module is too old"));
        }
        replicasTimeout = Reply.number(map.get("replicas-timeout")).orElse(replicasTimeout);
        return null;
    }

    /** An error that passes, or a broken connection: the pause doubles, once for each outage. */
    private void outage() {
        long now = client.serial.now();
        if (now >= pauseUntil) {
            pause = pause == 0 ? FIRST_PAUSE : Math.min(2 * pause, LONGEST_PAUSE);
            pauseUntil = now + ThreadLocalRandom.current().nextLong(pause / 2, pause + 1);
        }
    }

    /** How long a request waits before it is sent again, in ns. */
    long pause(long lease) {
        outage();
        long most = Math.max(lease / 16, Rules.MS);
        return Math.min(pauseUntil - client.serial.now(), ThreadLocalRandom.current().nextLong(most / 2, most + 1));
    }

    void dropIdle() {
        new ArrayList<>(idle).forEach(connection -> connection.close(new UnavailableException("the primary may have changed", null)));
    }

    /** Gives the acquisition a place for its wait, if enough connections are left for other requests (B29). */
    boolean takePlace(Acquisition acquisition) {
        boolean hasPlace = places < Math.max(1, client.maxConnections - 2);
        if (hasPlace) {
            places++;
        } else {
            placeless.add(acquisition);
        }
        return hasPlace;
    }

    /** The place goes to the acquisition that has waited for one longest. */
    void leavePlace(Acquisition acquisition) {
        if (placeless.remove(acquisition)) {
            return;
        }
        Iterator<Acquisition> next = placeless.iterator();
        if (next.hasNext()) {
            Acquisition oldest = next.next();
            next.remove();
            oldest.gotPlace();
        } else {
            places--;
        }
    }

    void close() {
        refuse(new HoldfastException("the client is closed", null));
        new ArrayList<>(all).forEach(connection -> connection.close(new HoldfastException("the client is closed", null)));
    }
}
