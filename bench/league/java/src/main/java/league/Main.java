package league;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintWriter;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicIntegerArray;

/** The Java part of the league: locks with one contender as league.py tells it on standard input. Arguments: contender, league, endpoints. */
public final class Main {
    /** How a lock is asked for. Most contenders have one object for a mutex and another for a lock with readers. */
    enum Mode { MUTEX, READ, WRITE }

    /** What a client got. A token of 0 means that the contender has none. */
    record Held(long token, Unlock unlock) {}

    interface Unlock {
        void run() throws Exception;
    }

    /** One client, with connections of its own. */
    interface Client {
        Held lock(String key, Mode mode) throws Exception;
    }

    interface Contender {
        Client connect(String league, List<String> endpoints) throws Exception;
    }

    private record Sample(int client, int key, boolean shared, long asked, long granted, long releasing, long released, long token) {}

    private static final int WRITER = 1 << 16;

    private final Contender contender;
    private final String league;
    private final List<String> endpoints;
    private final List<Client> clients = new ArrayList<>();
    private final Map<String, Unlock> unlocks = new HashMap<>();

    private Main(Contender contender, String league, List<String> endpoints) {
        this.contender = contender;
        this.league = league;
        this.endpoints = endpoints;
    }

    public static void main(String[] arguments) throws Exception {
        Contender contender = Contenders.ALL.get(arguments[0]);
        if (contender == null) {
            throw new IllegalArgumentException("unknown contender " + arguments[0]);
        }
        Main main = new Main(contender, arguments[1], List.of(arguments[2].split(",")));
        say("ready");
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            main.obey(line.split(" "));
        }
        System.exit(0);
    }

    private static synchronized void say(Object... words) {
        List<String> texts = new ArrayList<>();
        for (Object word : words) {
            texts.add(String.valueOf(word).replace('\n', ' '));
        }
        System.out.println(String.join(" ", texts));
        System.out.flush();
    }

    private void obey(String[] words) throws Exception {
        Map<String, Integer> numbers = new HashMap<>();
        for (String word : words) {
            if (word.matches("[a-z]+=[0-9]+")) {
                numbers.put(word.substring(0, word.indexOf('=')), Integer.valueOf(word.substring(word.indexOf('=') + 1)));
            }
        }
        while (clients.size() < numbers.getOrDefault("clients", 1)) {
            clients.add(contender.connect(league, endpoints));
        }
        switch (words[0]) {
            case "run" -> run(numbers, Path.of(words[words.length - 1]));
            case "lock" -> {
                try {
                    Held held = clients.get(0).lock(words[1], Mode.MUTEX);
                    unlocks.put(words[1], held.unlock());
                    say("held", System.nanoTime(), held.token());
                } catch (Exception why) {
                    say("failed", why);
                }
            }
            case "unlock" -> {
                try {
                    unlocks.get(words[1]).run();
                    say("released");
                } catch (Exception why) {
                    say("failed", why);
                }
            }
            case "wait" -> {
                for (Client client : clients) {
                    Thread thread = new Thread(() -> {
                        try {
                            client.lock(words[1], Mode.MUTEX);
                        } catch (Exception why) {
                            System.err.println("league: " + why);
                        }
                    });
                    thread.setDaemon(true);
                    thread.start();
                }
                say("waiting");
            }
            default -> throw new IllegalArgumentException("unknown request " + words[0]);
        }
    }

    private void run(Map<String, Integer> numbers, Path path) throws Exception {
        int keys = numbers.get("keys");
        AtomicIntegerArray inside = new AtomicIntegerArray(keys);
        AtomicInteger overlaps = new AtomicInteger();
        AtomicInteger failures = new AtomicInteger();
        List<List<Sample>> samples = new ArrayList<>();
        List<Thread> threads = new ArrayList<>();
        boolean[] stop = new boolean[1];
        for (int number = 0; number < numbers.get("clients"); number++) {
            int client = number;
            int key = number % keys;
            String name = "league:" + numbers.get("round") + ":" + key;
            List<Sample> own = new ArrayList<>();
            samples.add(own);
            threads.add(new Thread(() -> {
                int seed = client + 1;
                while (!stopped(stop)) {
                    seed = seed * 1664525 + 1013904223;
                    boolean shared = (seed >>> 16) % 100 < numbers.get("readers");
                    Mode mode = numbers.get("readers") == 0 ? Mode.MUTEX : shared ? Mode.READ : Mode.WRITE;
                    long asked = System.nanoTime();
                    try {
                        Held held = clients.get(client).lock(name, mode);
                        long granted = System.nanoTime();
                        int weight = shared ? 1 : WRITER;
                        if (inside.addAndGet(key, weight) > (shared ? WRITER - 1 : WRITER)) {
                            overlaps.incrementAndGet();
                        }
                        inside.addAndGet(key, -weight);
                        long releasing = System.nanoTime();
                        held.unlock().run();
                        own.add(new Sample(client, key, shared, asked, granted, releasing, System.nanoTime(), held.token()));
                    } catch (Exception why) {
                        System.err.println("league: " + why);
                        failures.incrementAndGet();
                    }
                }
            }));
        }
        threads.forEach(Thread::start);
        Thread.sleep(numbers.get("warm"));
        say("begin", System.nanoTime());
        Thread.sleep(numbers.get("ms"));
        say("end", System.nanoTime());
        synchronized (stop) {
            stop[0] = true;
        }
        for (Thread thread : threads) {
            thread.join();
        }
        write(path, samples);
        say("done", overlaps.get(), failures.get());
    }

    private static boolean stopped(boolean[] stop) {
        synchronized (stop) {
            return stop[0];
        }
    }

    private static void write(Path path, List<List<Sample>> samples) throws IOException {
        try (PrintWriter out = new PrintWriter(Files.newBufferedWriter(path))) {
            for (List<Sample> of : samples) {
                for (Sample s : of) {
                    out.printf("%d %d %d %d %d %d %d %d%n", s.client, s.key, s.shared ? 1 : 0, s.asked, s.granted, s.releasing, s.released, s.token);
                }
            }
        }
    }
}
