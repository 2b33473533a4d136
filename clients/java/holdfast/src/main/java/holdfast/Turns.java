package holdfast;

import java.util.HashMap;
import java.util.LinkedHashSet;
import java.util.Map;

/** Lines of tasks, of which the first one is served until it leaves. Everything runs in steps. */
final class Turns {
    private final Serial serial;
    private final Map<Object, LinkedHashSet<Runnable>> lines = new HashMap<>();

    Turns(Serial serial) {
        this.serial = serial;
    }

    /** Joins a line; the task runs when it is the first one. Returns whether it waits for that. */
    boolean join(Object name, Runnable task) {
        LinkedHashSet<Runnable> line = lines.computeIfAbsent(name, it -> new LinkedHashSet<>());
        boolean isNew = line.add(task);
        boolean isFirst = line.iterator().next() == task;
        if (isNew && isFirst) {
            task.run();
        }
        return !isFirst;
    }

    void leave(Object name, Runnable task) {
        LinkedHashSet<Runnable> line = lines.get(name);
        if (line == null) {
            return;
        }
        boolean wasFirst = line.iterator().next() == task;
        line.remove(task);
        if (line.isEmpty()) {
            lines.remove(name);
        } else if (wasFirst) {
            serial.run(line.iterator().next());
        }
    }
}
