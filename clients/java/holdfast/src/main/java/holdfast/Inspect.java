package holdfast;

import java.util.List;
import java.util.Map;
import org.jspecify.annotations.Nullable;

/** Reads what the server says of a lock; unknown fields are ignored. */
final class Inspect {
    private Inspect() {}

    static LockInfo info(Object reply) {
        Map<String, Object> map = Reply.map(reply);
        List<LockInfo.Holder> holders = maps(map.get("holders")).stream()
            .map(it -> new LockInfo.Holder(String.valueOf(Reply.text(it.get("owner"))), Reply.number(it.get("token")).orElse(0L), Reply.number(it.get("holds")).orElse(1L), Reply.time(it.get("ttl"))))
            .toList();
        return new LockInfo(Reply.number(map.get("limit")), Reply.number(map.get("fence")), Reply.time(map.get("ttl")), holders,
            Reply.number(map.get("holder_count")).orElse((long) holders.size()), Reply.number(map.get("waiters")).orElse(0L));
    }

    static List<LockInfo.Waiter> waiters(@Nullable Object reply) {
        return maps(reply).stream()
            .map(it -> new LockInfo.Waiter(String.valueOf(Reply.text(it.get("owner"))), Reply.time(it.get("waited")).orElseThrow(), Reply.time(it.get("remaining"))))
            .toList();
    }

    private static List<Map<String, Object>> maps(@Nullable Object reply) {
        return reply instanceof List<?> list ? list.stream().map(Reply::map).toList() : List.of();
    }
}
