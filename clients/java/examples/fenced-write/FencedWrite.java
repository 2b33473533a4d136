import holdfast.Hold;
import holdfast.Holdfast;
import io.lettuce.core.RedisClient;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.SQLException;
import java.time.Duration;

/**
 * A write that a stale holder can't make: the row remembers the greatest fence that wrote it. The table:
 * {@code CREATE TABLE account (id bigint PRIMARY KEY, balance bigint NOT NULL, fence bigint NOT NULL)}.
 */
public class FencedWrite {
    public static void main(String[] arguments) throws Exception {
        RedisClient redis = RedisClient.create("redis://127.0.0.1:6379");
        try (Holdfast client = Holdfast.create(redis); Connection database = DriverManager.getConnection(arguments[0])) {
            try (Hold hold = client.lock("account:17").acquire(Duration.ofSeconds(10))) {
                deposit(database, 17, 100, hold.fence());
            }
        } finally {
            redis.shutdown();
        }
    }

    static void deposit(Connection database, long account, long amount, long fence) throws SQLException {
        try (PreparedStatement update = database.prepareStatement("UPDATE account SET balance = balance + ?, fence = ? WHERE id = ? AND fence <= ?")) {
            update.setLong(1, amount);
            update.setLong(2, fence);
            update.setLong(3, account);
            update.setLong(4, fence);
            if (update.executeUpdate() == 0) {
                throw new SQLException("account " + account + " was written under a later lock: fence " + fence + " is stale");
            }
        }
    }
}
