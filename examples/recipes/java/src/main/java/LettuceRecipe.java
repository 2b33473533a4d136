import io.lettuce.core.ClientOptions;
import io.lettuce.core.RedisClient;
import io.lettuce.core.RedisCommandExecutionException;
import io.lettuce.core.RedisURI;
import io.lettuce.core.api.StatefulRedisConnection;
import io.lettuce.core.codec.StringCodec;
import io.lettuce.core.output.IntegerOutput;
import io.lettuce.core.protocol.CommandArgs;
import io.lettuce.core.protocol.ProtocolKeyword;
import java.nio.charset.StandardCharsets;
import java.time.Duration;

/** A lock with Lettuce and raw LOCK.* commands. Usage: LettuceRecipe PORT KEY */
public final class LettuceRecipe {
    /** A connection of its own, since a wait holds up all that share one. Lettuce must not reconnect: it would send the command again. */
    private static final class Sender implements Recipe.Send {
        private final RedisClient client;
        private final Duration timeout;
        private StatefulRedisConnection<String, String> connection;

        Sender(RedisClient client, Duration timeout) {
            this.client = client;
            this.timeout = timeout;
        }

        @Override
        public synchronized Long send(String command, String key, String... args) throws Recipe.Broken {
            try {
                if (connection == null) {
                    connection = client.connect();
                    connection.setTimeout(timeout);
                }
                var all = new CommandArgs<>(StringCodec.UTF8).addKey(key);
                for (String arg : args) all.add(arg);
                ProtocolKeyword name = () -> command.getBytes(StandardCharsets.US_ASCII);
                return connection.sync().dispatch(name, new IntegerOutput<>(StringCodec.UTF8), all);
            } catch (RedisCommandExecutionException errorReply) {
                throw errorReply;
            } catch (RuntimeException e) {
                if (connection != null) connection.closeAsync();
                connection = null;
                throw new Recipe.Broken(e);
            }
        }
    }

    public static void main(String[] args) throws Exception {
        var client = RedisClient.create(RedisURI.create("127.0.0.1", Integer.parseInt(args[0])));
        client.setOptions(ClientOptions.builder().autoReconnect(false).build());
        try {
            var shorts = new Sender(client, Duration.ofMillis(Recipe.LEASE / 8));
            new Recipe(new Sender(client, Duration.ZERO), shorts, args[1]).main(new Sender(client, Duration.ofSeconds(1)));
        } finally {
            client.shutdown();
        }
    }
}
