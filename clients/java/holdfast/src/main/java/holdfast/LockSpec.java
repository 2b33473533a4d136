package holdfast;

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * Which lock, and on what terms.
 *
 * @param names the names of the lock, which are keys of the server; several are acquired all together (in a cluster, all in one slot)
 * @param lease for how long the lock is held unless it is renewed; null: the client's default
 * @param renew whether the client renews the lease while the process runs
 * @param limit how many owners may hold the lock: 1 a mutex, more a semaphore, 0 any number of readers
 * @param ephemeral whether the lock is released when the connection that acquired it ends
 * @param replicas how many replicas have to confirm the grant
 * @param label a readable beginning of the owner, with {@code %} and {@code #} as {@code %25} and {@code %23}, shown by {@link Holdfast#info}; null: none
 */
public record LockSpec(List<String> names, @Nullable Duration lease, boolean renew, int limit, boolean ephemeral, int replicas, @Nullable String label) {
    public LockSpec {
        names = List.copyOf(names);
        check(!names.isEmpty() && names.size() <= 128, "a lock has 1 to 128 names, not " + names.size());
        for (String name : names) {
            int length = name.getBytes(StandardCharsets.UTF_8).length;
            check(length <= 1024, "a name has at most 1,024 bytes, not " + length);
        }
        check(names.stream().distinct().count() == names.size(), "a name is given twice");
        if (lease != null) {
            checkLease(lease);
        }
        check(limit >= 0, "a limit is at least 1 (0: any number), not " + limit);
        check(limit == 1 || names.size() == 1, "only a mutex may have several names");
        check(replicas >= 0, "replicas are at least 0, not " + replicas);
        check(label == null || escape(label).getBytes(StandardCharsets.UTF_8).length <= 400, "a label has at most 400 bytes, where % and # count as three");
    }

    /** What the server takes as a lease; it also fits into a long of ns. */
    static void checkLease(Duration lease) {
        check(lease.compareTo(Duration.ZERO) > 0 && lease.compareTo(Duration.ofDays(3650)) <= 0, "a lease is between 1 ms and 3,650 days, not " + lease);
    }

    private static void check(boolean holds, String message) {
        if (!holds) {
            throw new IllegalArgumentException(message);
        }
    }

    /** The text before the random part of an owner, without the separator (B43). */
    static String escape(String text) {
        return text.replace("%", "%25").replace("#", "%23");
    }

    static String unescape(String text) {
        return text.replace("%23", "#").replace("%25", "%");
    }

    /** A renewed mutex with the client's default lease. */
    public static LockSpec of(String... names) {
        return builder(names).build();
    }

    /** Begins a description. */
    public static Builder builder(String... names) {
        return new Builder(new LockSpec(List.of(names), null, true, 1, false, 0, null));
    }

    /** Begins a description with these terms. */
    public Builder toBuilder() {
        return new Builder(this);
    }

    boolean isMutex() {
        return limit == 1 && names.size() == 1;
    }

    String title() {
        return names.size() == 1 ? names.get(0) : names.toString();
    }

    /** Builds a description. */
    public static final class Builder {
        private LockSpec spec;

        private Builder(LockSpec spec) {
            this.spec = spec;
        }

        private Builder with(@Nullable Duration lease, boolean renew, int limit, boolean ephemeral, int replicas, @Nullable String label) {
            spec = new LockSpec(spec.names, lease, renew, limit, ephemeral, replicas, label);
            return this;
        }

        /** The lease, at least 1 ms; it is renewed unless {@link #renew} says otherwise. */
        public Builder lease(Duration lease) {
            return with(lease, spec.renew, spec.limit, spec.ephemeral, spec.replicas, spec.label);
        }

        /** Whether the client renews the lease. */
        public Builder renew(boolean renew) {
            return with(spec.lease, renew, spec.limit, spec.ephemeral, spec.replicas, spec.label);
        }

        /** Lets this many owners hold the lock. */
        public Builder limit(int limit) {
            check(limit > 0, "a limit is at least 1, not " + limit);
            return with(spec.lease, spec.renew, limit, spec.ephemeral, spec.replicas, spec.label);
        }

        /** Lets any number of owners hold the lock: readers. */
        public Builder shared() {
            return with(spec.lease, spec.renew, 0, spec.ephemeral, spec.replicas, spec.label);
        }

        /** Releases the lock when the connection that acquired it ends. Such a hold is never certain by time: check the fence. */
        public Builder ephemeral(boolean ephemeral) {
            return with(spec.lease, spec.renew, spec.limit, ephemeral, spec.replicas, spec.label);
        }

        /** Has so many replicas confirm the grant. */
        public Builder replicas(int replicas) {
            return with(spec.lease, spec.renew, spec.limit, spec.ephemeral, replicas, spec.label);
        }

        /** A readable beginning of the owner. */
        public Builder label(String label) {
            return with(spec.lease, spec.renew, spec.limit, spec.ephemeral, spec.replicas, label);
        }

        public LockSpec build() {
            return spec;
        }
    }
}
