import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Scanner;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Reads and writes the lines of a driver: ../../DRIVER.md. Each call runs in its own thread. */
abstract class Lines {
    /** A member of a JSON object. Its value is a string, a list of strings, a number or a boolean. Strings have no escapes. */
    private static final Pattern MEMBER = Pattern.compile("\"(\\w+)\": ?(?:\"([^\"]*)\"|\\[([^]]*)]|(-?\\d+|true|false))");

    /** The fields of a line. Values are unparsed JSON, except that strings have no quotes. */
    record Call(Map<String, String> fields) {
        static Call parse(String line) {
            Map<String, String> fields = new LinkedHashMap<>();
            for (Matcher member = MEMBER.matcher(line); member.find(); ) {
                fields.put(member.group(1), member.group(2) != null ? member.group(2) : member.group(3) != null ? member.group(3) : member.group(4));
            }
            return new Call(fields);
        }

        String text(String name) {
            return fields.get(name);
        }

        boolean has(String name) {
            return fields.containsKey(name);
        }

        boolean is(String name) {
            return "true".equals(text(name));
        }

        int number(String name) {
            return Integer.parseInt(text(name));
        }

        Duration time(String name) {
            return Duration.ofMillis(number(name));
        }

        String[] list(String name) {
            return text(name).replaceAll("[\" ]", "").split(",");
        }
    }

    private static String string(String text) {
        return "\"" + text.replace("\\", "\\\\").replace("\"", "\\\"").replaceAll("\\p{Cntrl}", " ") + "\"";
    }

    /** Writes a JSON object with these names and values, and the current time. */
    static void write(Object... fields) {
        StringBuilder line = new StringBuilder("{");
        for (int i = 0; i < fields.length; i += 2) {
            line.append(string(fields[i].toString())).append(':').append(fields[i + 1] instanceof String text ? string(text) : fields[i + 1]).append(',');
        }
        synchronized (System.out) {
            System.out.println(line + "\"at\":" + System.nanoTime() / 1000 + "}");
        }
    }

    /** An exception and its causes, as text. */
    static String text(Throwable why) {
        return why + (why.getCause() == null ? "" : ", caused by " + text(why.getCause()));
    }

    /** Makes a call. Returns the names and values of its outcome. */
    abstract Object[] run(Call call) throws Exception;

    /** The names and values of the outcome of a failed call. */
    abstract Object[] failure(Throwable why);

    private void answer(Call call) {
        Object[] outcome;
        try {
            outcome = run(call);
        } catch (Exception why) {
            outcome = failure(why);
        }
        Object[] line = new Object[outcome.length + 2];
        line[0] = "id";
        line[1] = Long.valueOf(call.text("id"));
        System.arraycopy(outcome, 0, line, 2, outcome.length);
        write(line);
    }

    /** Serves calls until the input ends. */
    final void serve() {
        for (Scanner lines = new Scanner(System.in); lines.hasNextLine(); ) {
            Call call = Call.parse(lines.nextLine());
            switch (call.text("call")) {
                // These end before the next call is read.
                case "open", "cancel", "threads" -> answer(call);
                default -> {
                    Thread thread = new Thread(() -> answer(call));
                    thread.setDaemon(true);
                    thread.start();
                }
            }
        }
    }
}
