package holdfast;

import java.util.ArrayList;
import java.util.List;

/** The commands of one acquisition. Times are in ns, except {@code wait}. */
final class Commands {
    private final LockSpec spec;
    private final String owner;

    Commands(LockSpec spec, String owner) {
        this.spec = spec;
        this.owner = owner;
    }

    /** Requests the lock, with WAIT and WAITED only if these are not 0. */
    byte[][] acquire(long lease, long wait, long waited) {
        List<Object> terms = new ArrayList<>(List.of("HOLDS", 1, "LEASE", Rules.ms(lease)));
        if (wait > 0) {
            terms.addAll(List.of("WAIT", wait));
        }
        if (wait > 0 && waited > 0) {
            terms.addAll(List.of("WAITED", Rules.ms(waited)));
        }
        if (spec.limit() == 0) {
            terms.add("SHARED");
        } else if (spec.limit() > 1) {
            terms.addAll(List.of("LIMIT", spec.limit()));
        }
        if (spec.ephemeral()) {
            terms.add("EPHEMERAL");
        }
        addReplicas(terms);
        terms.add("WITHWAITED");
        return command("ACQUIRE", terms);
    }

    byte[][] renew(long token, long lease) {
        List<Object> terms = new ArrayList<>(List.of("TOKEN", token, "LEASE", Rules.ms(lease)));
        addReplicas(terms);
        return command("RENEW", terms);
    }

    /** Lets one name of the lock expire after a time. FENCE raises the token, so that a late renewal does not match it; LOCK.MRENEW has no FENCE (B36). */
    byte[][] keep(String name, long token, long time) {
        List<Object> words = new ArrayList<>(List.of("LOCK.RENEW", name, owner, "TOKEN", token, "FENCE", token + 1, "LEASE", Rules.ms(time)));
        if (spec.ephemeral()) {
            words.add("UNBIND");
        }
        return Reply.command(words);
    }

    byte[][] release(long token) {
        return command("RELEASE", List.of("TOKEN", token));
    }

    /** Releases every grant of this owner, and withdraws its requests. */
    byte[][] withdraw() {
        return command("RELEASE", List.of("ALL"));
    }

    private void addReplicas(List<Object> terms) {
        if (spec.replicas() > 0) {
            terms.addAll(List.of("REPLICAS", spec.replicas()));
        }
    }

    private byte[][] command(String verb, List<Object> terms) {
        List<Object> words = new ArrayList<>();
        if (spec.names().size() == 1) {
            words.add("LOCK." + verb);
        } else {
            words.addAll(List.of("LOCK.M" + verb, spec.names().size()));
        }
        words.addAll(spec.names());
        words.add(owner);
        words.addAll(terms);
        return Reply.command(words);
    }
}
