package holdfast.testing;

import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;

/** A proxy that cuts a connection at a chosen message: before a request reaches the server, or before its reply reaches the client. */
public final class FaultProxy implements AutoCloseable {
    private final ServerSocket listener;
    private final Set<Socket> sockets = ConcurrentHashMap.newKeySet();
    private final AtomicInteger messages = new AtomicInteger();
    private volatile int cutAt = -1;

    public FaultProxy(int target) throws IOException {
        listener = new ServerSocket(0, 100, InetAddress.getLoopbackAddress());
        daemon(() -> {
            while (true) {
                Socket client = listener.accept();
                Socket server = new Socket(InetAddress.getLoopbackAddress(), target);
                client.setTcpNoDelay(true);
                server.setTcpNoDelay(true);
                sockets.add(client);
                sockets.add(server);
                daemon(() -> copy(client, server));
                daemon(() -> copy(server, client));
            }
        });
    }

    private interface Task {
        void run() throws IOException;
    }

    private static void daemon(Task task) {
        Thread thread = new Thread(() -> {
            try {
                task.run();
            } catch (IOException ended) {
                // One of the two sides closed the connection.
            }
        }, "fault-proxy");
        thread.setDaemon(true);
        thread.start();
    }

    private void copy(Socket from, Socket to) throws IOException {
        byte[] buffer = new byte[65536];
        try (from; to) {
            InputStream in = from.getInputStream();
            OutputStream out = to.getOutputStream();
            for (int read = in.read(buffer); read >= 0; read = in.read(buffer)) {
                if (messages.getAndIncrement() == cutAt) {
                    return;
                }
                out.write(buffer, 0, read);
            }
        } finally {
            sockets.remove(from);
            sockets.remove(to);
        }
    }

    /** Cuts the connection of the n-th message from now on, counted from 0 and in either direction, instead of passing the message on. */
    public void cutAt(int message) {
        messages.set(0);
        cutAt = message;
    }


    public void cutAll() throws IOException {
        for (Socket socket : sockets) {
            socket.close();
        }
    }

    public int port() {
        return listener.getLocalPort();
    }

    @Override
    public void close() throws IOException {
        listener.close();
        cutAll();
    }
}
