package holdfast;

import java.util.HashMap;
import java.util.LinkedHashSet;
import java.util.Map;

/** Lines of tasks: the first task of a line has its turn until it leaves. All methods are called in steps. */
final class Turns {
    private final Serial serial;
    private final Map<Object, LinkedHashSet<Runnable>> lines = new HashMap<>();

    Turns(Serial serial) {
        this.serial = serial;
    }

    /** Joins a line, unless the task is in it. The task runs when it becomes the first. Returns whether another task is the first. */
    boolean join(Object name, Runnable task) {
        LinkedHashSet<Runnable> line = lines.computeIfAbsent(name, it -> new LinkedHashSet<>());
        boolean isNew = line.add(task);
        boolean isFirst = line.iterator().next() == task;
        if (isNew && isFirst) {
            task.run();
        }
        return !isFirst;
    }

    /** Returns how many tasks are in a line that has some. */
    int size(Object name) {
        return lines.get(name).size();
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
