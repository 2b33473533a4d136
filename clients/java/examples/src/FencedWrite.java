import holdfast.Hold;
import holdfast.Holdfast;
import io.lettuce.core.RedisClient;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.Optional;

/**
 * A SQL update that is guarded by a fencing token: {@code DATABASE_URL=postgresql://… FencedWrite AMOUNT}. A holder that lost its lock without noticing
 * changes nothing.
 *
 * <p>The row keeps the token of its last writer, and {@code fence <= token} is a condition of the update: it changes one row, or none. The lock makes writers
 * wait for each other instead of failing; the token excludes late writes. A process that is killed blocks others for its lease.
 */
public class FencedWrite {
    public static void main(String[] arguments) throws Exception {
        RedisClient redis = RedisClient.create(Optional.ofNullable(System.getenv("REDIS_URL")).orElse("redis://127.0.0.1:6379"));
        boolean written;
        try (Holdfast client = Holdfast.create(redis); Connection database = DriverManager.getConnection("jdbc:" + System.getenv("DATABASE_URL"))) {
            try (Statement statement = database.createStatement()) {
                statement.execute("CREATE TABLE IF NOT EXISTS account (id int PRIMARY KEY, balance int NOT NULL, fence bigint NOT NULL DEFAULT 0)");
                statement.execute("INSERT INTO account (id, balance) VALUES (7, 0) ON CONFLICT DO NOTHING");
            }
            Hold hold = client.lock("account:7").acquire();
            int balance = balance(database);
            System.out.println("read " + balance);
            if (System.getenv("PAUSE") != null) {
                System.in.read(); // Here a process may be paused for longer than its lease.
            }
            written = write(database, balance + Integer.parseInt(arguments[0]), hold.fence());
            if (written) {
                hold.release();
            }
        } finally {
            redis.shutdown();
        }
        System.out.println(written ? "written" : "refused: a later holder has written");
        System.exit(written ? 0 : 1);
    }

    static int balance(Connection database) throws SQLException {
        try (Statement statement = database.createStatement(); ResultSet row = statement.executeQuery("SELECT balance FROM account WHERE id = 7")) {
            row.next();
            return row.getInt(1);
        }
    }

    /** Returns false if a later holder has written already. */
    static boolean write(Connection database, int balance, long fence) throws SQLException {
        try (PreparedStatement update = database.prepareStatement("UPDATE account SET balance = ?, fence = ? WHERE id = 7 AND fence <= ?")) {
            update.setInt(1, balance);
            update.setLong(2, fence);
            update.setLong(3, fence);
            return update.executeUpdate() == 1;
        }
    }
}
