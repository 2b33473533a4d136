package holdfast.testing;

import java.io.ByteArrayOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;

/** Reads and writes the parts of the Redis protocol that tests need. */
public final class Resp {
    private Resp() {}

    /** Reads one value: Long, byte[], List, null, or {@link holdfast.spi.RedisError}. */
    public static Object read(InputStream in) throws IOException {
        String line = line(in);
        String rest = line.substring(1);
        switch (line.charAt(0)) {
            case ':':
                return Long.valueOf(rest);
            case '+':
                return rest.getBytes(StandardCharsets.UTF_8);
            case '-':
                return new holdfast.spi.RedisError(rest);
            case '$': {
                int length = Integer.parseInt(rest);
                if (length < 0) {
                    return null;
                }
                byte[] bytes = in.readNBytes(length);
                if (bytes.length < length || in.read() < 0 || in.read() < 0) {
                    throw new EOFException();
                }
                return bytes;
            }
            case '*': {
                int length = Integer.parseInt(rest);
                if (length < 0) {
                    return null;
                }
                List<Object> list = new ArrayList<>();
                for (int i = 0; i < length; i++) {
                    list.add(read(in));
                }
                return list;
            }
            default:
                throw new IOException("not RESP2: " + line);
        }
    }

    private static String line(InputStream in) throws IOException {
        ByteArrayOutputStream line = new ByteArrayOutputStream();
        for (int next = in.read(); ; next = in.read()) {
            if (next < 0) {
                throw new EOFException();
            }
            if (next == '\r') {
                in.read();
                return line.toString(StandardCharsets.UTF_8);
            }
            line.write(next);
        }
    }

    public static byte[] command(List<byte[]> parts) {
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        out.writeBytes(("*" + parts.size() + "\r\n").getBytes(StandardCharsets.UTF_8));
        for (byte[] part : parts) {
            out.writeBytes(("$" + part.length + "\r\n").getBytes(StandardCharsets.UTF_8));
            out.writeBytes(part);
            out.writeBytes("\r\n".getBytes(StandardCharsets.UTF_8));
        }
        return out.toByteArray();
    }
}
