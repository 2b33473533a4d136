// Postgres shows how a table refuses the writes of a holder that has lost its lock without knowing.
package main

import (
	"context"
	"database/sql"
	"errors"
	"log"
	"os"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/redis/go-redis/v9"

	"holdfast"
	"holdfast/goredis"
)

const schema = `CREATE TABLE IF NOT EXISTS report (
	name  text PRIMARY KEY,
	text  text NOT NULL,
	fence bigint NOT NULL
)`

// A row keeps the greatest fence that has written it. A smaller one changes nothing.
const upsert = `INSERT INTO report (name, text, fence) VALUES ($1, $2, $3)
	ON CONFLICT (name) DO UPDATE SET text = excluded.text, fence = excluded.fence
	WHERE report.fence <= excluded.fence`

var errStale = errors.New("a later holder has written the row")

func write(ctx context.Context, db *sql.DB, hold *holdfast.Hold, text string) error {
	result, err := db.ExecContext(ctx, upsert, hold.Name(), text, hold.Fence())
	if err != nil {
		return err
	}
	if n, err := result.RowsAffected(); err != nil || n == 0 {
		return errors.Join(err, errStale)
	}
	return nil
}

func run(ctx context.Context) error {
	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	if _, err := db.ExecContext(ctx, schema); err != nil {
		return err
	}
	client, err := goredis.New(redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"}))
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	hold, err := client.Lock(ctx, "report")
	if err != nil {
		return err
	}
	err = write(hold.Context(), db, hold, "written by one process at a time")
	return errors.Join(err, hold.Release(ctx))
}

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}
