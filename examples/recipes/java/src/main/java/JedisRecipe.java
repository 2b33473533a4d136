import redis.clients.jedis.CommandArguments;
import redis.clients.jedis.Connection;
import redis.clients.jedis.DefaultJedisClientConfig;
import redis.clients.jedis.HostAndPort;
import redis.clients.jedis.exceptions.JedisConnectionException;
import redis.clients.jedis.util.SafeEncoder;

/** A lock with Jedis and raw LOCK.* commands. Usage: JedisRecipe PORT KEY */
public final class JedisRecipe {
    /** One connection, opened again when it broke. A plain {@code Connection} never repeats a command. */
    private static final class Sender implements Recipe.Send {
        private final HostAndPort address;
        private final int timeout;
        private Connection connection;

        Sender(int port, int timeout) {
            address = new HostAndPort("127.0.0.1", port);
            this.timeout = timeout;
        }

        @Override
        public synchronized Long send(String command, String key, String... args) throws Recipe.Broken {
            try {
                if (connection == null) {
                    connection = new Connection(address, DefaultJedisClientConfig.builder().socketTimeoutMillis(timeout).build());
                    if (timeout == 0) connection.setTimeoutInfinite();
                }
                var all = new CommandArguments(() -> SafeEncoder.encode(command)).key(key);
                for (String arg : args) all.add(arg);
                return (Long) connection.executeCommand(all);
            } catch (JedisConnectionException e) {
                if (connection != null) connection.close();
                connection = null;
                throw new Recipe.Broken(e);
            }
        }
    }

    public static void main(String[] args) throws Exception {
        int port = Integer.parseInt(args[0]);
        new Recipe(new Sender(port, 0), new Sender(port, (int) Recipe.LEASE / 8), args[1]).main(new Sender(port, 1_000));
    }
}
