package holdfast;

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Objects;
import org.jspecify.annotations.Nullable;

/**
 * Describes a lock and its terms.
 *
 * @param names the names of the lock, which are keys of the server; several are acquired together and, in a cluster, must be in one slot
 * @param lease for how long the lock is held unless it is renewed; null: the client's default
 * @param renew whether the client renews the lease while the process runs
 * @param limit how many owners may hold the lock: 1: a mutex; more: a semaphore; 0: any number of readers
 * @param ephemeral whether the server releases the lock when the connection that acquired it ends
 * @param replicas how many replicas must confirm the grant and each renewal
 * @param label a readable beginning of the owner, in which {@code %} and {@code #} are {@code %25} and {@code %23}, shown by {@link Holdfast#info}; null: none
 */
public record LockSpec(List<String> names, @Nullable Duration lease, boolean renew, int limit, boolean ephemeral, int replicas, @Nullable String label) {
    public LockSpec {
        names.forEach(name -> Objects.requireNonNull(name, "name"));
        names = List.copyOf(names);
        check(!names.isEmpty() && names.size() <= 128, "a lock must have 1 to 128 names, got " + names.size());
        for (String name : names) {
            int length = name.getBytes(StandardCharsets.UTF_8).length;
            check(length <= 1024, "a name must have at most 1,024 bytes, got " + length);
        }
        check(names.stream().distinct().count() == names.size(), "the names of a lock must differ, got " + names);
        if (lease != null) {
            checkTime("lease", lease);
        }
        check(limit >= 0, "limit must be at least 0, got " + limit);
        check(limit == 1 || names.size() == 1, "several names must have limit 1, got " + limit);
        check(replicas >= 0, "replicas must be at least 0, got " + replicas);
        int length = label == null ? 0 : escape(label).getBytes(StandardCharsets.UTF_8).length;
        check(length <= 400, "label must have at most 400 bytes, where % and # count as three, got " + length);
    }

    /** Refuses a time that the server does not take as a lease. One that it takes fits into a long of ns. */
    static Duration checkTime(String what, Duration time) {
        check(time.compareTo(Duration.ZERO) > 0 && time.compareTo(Duration.ofDays(3650)) <= 0, what + " must be between 1 ms and 3,650 days, got " + time);
        return time;
    }

    private static void check(boolean holds, String message) {
        if (!holds) {
            throw new IllegalArgumentException(message);
        }
    }

    /** Returns a label as it is in an owner, where it contains no {@code #} (B43). */
    static String escape(String text) {
        return text.replace("%", "%25").replace("#", "%23");
    }

    static String unescape(String text) {
        return text.replace("%23", "#").replace("%25", "%");
    }

    /** Returns a mutex that is renewed and has the client's default lease. */
    public static LockSpec of(String... names) {
        return builder(names).build();
    }

    /** Returns a builder that begins with {@link #of}. */
    public static Builder builder(String... names) {
        return new Builder(new LockSpec(Arrays.asList(names), null, true, 1, false, 0, null));
    }

    /** Returns a builder that begins with these terms. */
    public Builder toBuilder() {
        return new Builder(this);
    }

    boolean isMutex() {
        return limit == 1 && names.size() == 1;
    }

    String title() {
        return names.size() == 1 ? names.get(0) : names.toString();
    }

    /** Builds a {@link LockSpec}. */
    public static final class Builder {
        private LockSpec spec;

        private Builder(LockSpec spec) {
            this.spec = spec;
        }

        private Builder with(@Nullable Duration lease, boolean renew, int limit, boolean ephemeral, int replicas, @Nullable String label) {
            spec = new LockSpec(spec.names, lease, renew, limit, ephemeral, replicas, label);
            return this;
        }

        /** Sets the lease. The client renews it unless {@link #renew} is set to false. */
        public Builder lease(Duration lease) {
            return with(lease, spec.renew, spec.limit, spec.ephemeral, spec.replicas, spec.label);
        }

        /** Sets whether the client renews the lease. */
        public Builder renew(boolean renew) {
            return with(spec.lease, renew, spec.limit, spec.ephemeral, spec.replicas, spec.label);
        }

        /** Lets this many owners hold the lock at once: at least 1. */
        public Builder limit(int limit) {
            check(limit > 0, "limit must be at least 1, got " + limit);
            return with(spec.lease, spec.renew, limit, spec.ephemeral, spec.replicas, spec.label);
        }

        /** Lets any number of readers hold the lock at once. */
        public Builder shared() {
            return with(spec.lease, spec.renew, 0, spec.ephemeral, spec.replicas, spec.label);
        }

        /** Has the server release the lock when the connection that acquired it ends. The server may notice that before the client: check the fence. */
        public Builder ephemeral(boolean ephemeral) {
            return with(spec.lease, spec.renew, spec.limit, ephemeral, spec.replicas, spec.label);
        }

        /** Requires that this many replicas confirm the grant and each renewal. */
        public Builder replicas(int replicas) {
            return with(spec.lease, spec.renew, spec.limit, spec.ephemeral, replicas, spec.label);
        }

        /** Sets a readable beginning of the owner. */
        public Builder label(String label) {
            return with(spec.lease, spec.renew, spec.limit, spec.ephemeral, spec.replicas, label);
        }

        public LockSpec build() {
            return spec;
        }
    }
}
