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

/** The connections to one node, the requests that wait for one, and the pause after failures, which all requests share. All methods are called in steps. */
final class Pool {
    private static final int PIPELINE = 256;
    private static final long FIRST_PAUSE = 20 * Rules.MS;
    private static final long LONGEST_PAUSE = Rules.SECOND;
    private static final long CONNECT = 2 * Rules.SECOND;
    /** The greatest number of attempts to connect that were not in time and have not returned. */
    private static final int HUNG = 4;

    /** A connection, which may not be open yet, and its pending requests. */
    final class Connection {
        private @Nullable RedisConnection raw;
        /** Requests whose replies have not been read. */
        private final Deque<Request> pending = new ArrayDeque<>();
        private boolean used;
        /** It had been idle before the pending commands were written. */
        private boolean reused;
        /** It was not open in time. */
        private boolean late;
        /** Its version was checked, or need not be: it takes requests of the application. */
        private boolean greeted;
        /** Of an ephemeral hold. */
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
                // No thread can be had.
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
                // A connection that is open after all is used.
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

        /** The first connection, and the first after an outage, must show that the server replies before others are opened. */
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

        /** Writes requests in one pipeline. Returns false if none of them has commands any more. */
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
                        // ASKING is for one command only.
                        written.add(Reply.command("ASKING"));
                    }
                    written.add(command);
                }
                request.connection = this;
                request.unread = request.asking ? 2 * commands.size() : commands.size();
                pending.add(request);
            }
            if (!written.isEmpty()) {
                used = true;
                raw.send(written, reply -> client.serial.run(() -> read(reply)));
            }
            return !written.isEmpty();
        }

        private void read(@Nullable Object reply) {
            Request request = pending.peek();
            if (closed || request == null) {
                return;
            }
            request.unread--;
            boolean isReplyToAsking = request.asking && request.unread % 2 == 1;
            if (isReplyToAsking) {
                return;
            }
            if (request.unread == 0) {
                pending.remove();
            }
            if (greeted && !(reply instanceof RedisError)) {
                // A successful reply to a request of the application ends the outage; one to LOCK.VERSION does not.
                pause = 0;
                pauseUntil = 0;
                proven = true;
            }
            request.end(reply);
            release();
        }

        /** Makes the connection idle, unless it has pending requests or belongs to an ephemeral hold. */
        private void release() {
            if (greeted && pending.isEmpty() && whenClosed == null && !closed) {
                idle.addFirst(this);
                wake();
            }
        }

        private void ended() {
            close(new UnavailableException("the connection to " + node + " was closed", null));
        }

        /** Closes the connection; its pending requests fail. */
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
            // Without pending requests too, if this was the last connection: the server may be gone.
            proven &= !all.isEmpty() && pending.isEmpty();
            if (!pending.isEmpty()) {
                outage();
                if (reused) {
                    // They are as old as this one.
                    dropIdle();
                }
                client.connectionLost(node);
            }
            if (whenClosed != null) {
                whenClosed.run();
            }
            List<Request> failed = new ArrayList<>(pending);
            pending.clear();
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
    /** Attempts to connect that were not in time and have not returned. */
    private int hung;
    /** The server has replied since the last connection broke or could not be opened. Until it has, one attempt to connect is made at a time. */
    private boolean proven;
    /** {@link #serve} is a queued step. */
    private boolean waking;
    private long pause;
    private long pauseUntil;
    /** Opens a connection after the pause. */
    private Serial.@Nullable Timer attempt;
    /** In ms. */
    long replicasTimeout = 1000;

    /** How many acquisitions may wait at the server. */
    private int places;
    /** Acquisitions that wait for a place, in order of arrival. */
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

    /** Ends a request that was not answered in time. If it was written, closes its connection. */
    void abandon(Request request) {
        UnavailableException why = new UnavailableException(node + " did not reply in time", null);
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

    /** Finds an error reply about credentials, which is fatal, among the causes of a failed attempt to connect. */
    private static Throwable refusal(Throwable why) {
        for (Throwable cause = why; cause != null; cause = cause.getCause()) {
            String message = String.valueOf(cause.getMessage());
            if (message.startsWith("NOAUTH") || message.startsWith("WRONGPASS") || message.startsWith("NOPERM")) {
                return new HoldfastException(message, why);
            }
        }
        return why;
    }

    /** Fails all requests that wait for a connection: they share the outcome of the attempt. */
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

    /** Begins a pause after a failure, unless there is one: it is twice as long as the one before. */
    private void outage() {
        long now = client.serial.now();
        if (now >= pauseUntil) {
            pause = pause == 0 ? FIRST_PAUSE : Math.min(2 * pause, LONGEST_PAUSE);
            pauseUntil = now + ThreadLocalRandom.current().nextLong(pause / 2, pause + 1);
        }
    }

    /** Begins a pause after a failure. Returns how long a request with this lease waits before it is sent again, in ns. */
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

    /** Passes the place to the acquisition that has waited for one longest. */
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
