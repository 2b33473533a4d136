package holdfast;

import static java.nio.charset.StandardCharsets.UTF_8;

import holdfast.spi.RedisError;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.function.LongPredicate;
import org.jspecify.annotations.Nullable;

/** Converts commands and replies. */
final class Reply {
    private Reply() {}

    static byte[][] command(Object... parts) {
        return command(List.of(parts));
    }

    static byte[][] command(List<?> parts) {
        return parts.stream().map(part -> part.toString().getBytes(UTF_8)).toArray(byte[][]::new);
    }

    static @Nullable String text(@Nullable Object reply) {
        return reply instanceof byte[] bytes ? new String(bytes, UTF_8) : reply == null ? null : reply.toString();
    }

    static Map<String, Object> map(@Nullable Object reply) {
        Map<String, Object> map = new LinkedHashMap<>();
        if (reply instanceof List<?> list) {
            for (int i = 0; i + 1 < list.size(); i += 2) {
                map.put(String.valueOf(text(list.get(i))), list.get(i + 1));
            }
        }
        return map;
    }

    static List<Map<String, Object>> maps(@Nullable Object reply) {
        return reply instanceof List<?> list ? list.stream().map(Reply::map).toList() : List.of();
    }

    static Optional<Long> number(@Nullable Object reply) {
        return reply instanceof Long number ? Optional.of(number) : Optional.empty();
    }

    /** Returns whether a reply is a token and the time that the request waited, in ms. Further elements are ignored. */
    static boolean isGrant(Object reply) {
        return reply instanceof List<?> list && list.size() > 1 && list.get(0) instanceof Long && list.get(1) instanceof Long;
    }

    /** Returns whether a reply has one element for each name, each nil or a number that {@code confirms}. For one name, the reply is that element. */
    static boolean answersEach(List<String> names, Object reply, LongPredicate confirms) {
        List<?> elements = names.size() == 1 ? List.of(reply) : reply instanceof List<?> list ? list : List.of();
        return elements.size() == names.size() && elements.stream().allMatch(it -> it == null || it instanceof Long number && confirms.test(number));
    }

    /** Reads a time in ms; empty if it is negative, which means without an end. */
    static Optional<Duration> time(@Nullable Object reply) {
        return number(reply).filter(ms -> ms >= 0).map(Duration::ofMillis);
    }

    static HoldfastException exception(RedisError error) {
        if (error.code().equals("DEADLOCK")) {
            return new DeadlockException(error.message());
        }
        if (error.message().contains("unknown command") && error.message().contains("LOCK.")) {
            return new ModuleNotLoadedException("the Holdfast module is not loaded: start the server with --loadmodule libholdfast.so, or run MODULE LOAD (" + error.message() + ")");
        }
        return Verdict.of(error).passes() ? new UnavailableException(error.message(), null) : new HoldfastException(error.message(), null);
    }

    /** Returns the slot of a key in a cluster: the CRC16 of the text between the first braces or, if there is none, of the whole key. */
    static int slot(byte[] key) {
        int open = indexOf(key, '{', 0);
        int close = open < 0 ? -1 : indexOf(key, '}', open);
        boolean isTagged = close > open + 1;
        int from = isTagged ? open + 1 : 0;
        int to = isTagged ? close : key.length;
        int crc = 0;
        for (int i = from; i < to; i++) {
            crc ^= (key[i] & 0xff) << 8;
            for (int bit = 0; bit < 8; bit++) {
                crc = (crc & 0x8000) != 0 ? (crc << 1) ^ 0x1021 : crc << 1;
            }
        }
        return crc & 0x3fff;
    }

    private static int indexOf(byte[] key, char sign, int from) {
        int at = from;
        while (at < key.length && key[at] != sign) {
            at++;
        }
        return at < key.length ? at : -1;
    }
}
