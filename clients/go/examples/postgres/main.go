// Postgres guards an update by a fencing token: a holder that lost its lock without noticing changes nothing.
//
//	DATABASE_URL=postgresql://… postgres AMOUNT
//
// The row keeps the token of its last writer, and "fence <= token" is a condition of the update: it changes one row, or none. The lock makes
// writers wait for each other instead of failing; the token excludes late writes. A process that is killed blocks others for its lease.
package main

import (
	"bufio"
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"os"
	"strconv"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/redis/go-redis/v9"

	"holdfast"
	"holdfast/goredis"
)

const (
	table = `CREATE TABLE IF NOT EXISTS account (id int PRIMARY KEY, balance int NOT NULL, fence bigint NOT NULL DEFAULT 0)`
	row   = `INSERT INTO account (id, balance) VALUES (7, 0) ON CONFLICT DO NOTHING`
)

var errRefused = errors.New("refused: a later holder has written")

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: postgres AMOUNT")
	}
	if err := run(context.Background(), os.Args[1]); err != nil {
		log.Fatal(err)
	}
	fmt.Println("written")
}

func run(ctx context.Context, argument string) error {
	amount, err := strconv.Atoi(argument)
	if err != nil {
		return err
	}
	options, err := redis.ParseURL(cmp.Or(os.Getenv("REDIS_URL"), "redis://127.0.0.1:6379"))
	if err != nil {
		return err
	}
	rdb := redis.NewClient(options)
	defer func() { _ = rdb.Close() }()
	client, err := goredis.New(rdb)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	for _, statement := range []string{table, row} {
		if _, err := db.ExecContext(ctx, statement); err != nil {
			return err
		}
	}
	hold, err := client.Lock(ctx, "account:7")
	if err != nil {
		return err
	}
	return errors.Join(add(ctx, db, hold, amount), hold.Release(ctx))
}

// add does not use hold.Context(), which ends when the lock is lost: here the row decides.
func add(ctx context.Context, db *sql.DB, hold *holdfast.Hold, amount int) error {
	var balance int
	if err := db.QueryRowContext(ctx, "SELECT balance FROM account WHERE id = 7").Scan(&balance); err != nil {
		return err
	}
	fmt.Println("read", balance)
	if os.Getenv("PAUSE") != "" { // here a process may be paused for longer than its lease
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	}
	result, err := db.ExecContext(ctx, "UPDATE account SET balance = $1, fence = $2 WHERE id = 7 AND fence <= $2", balance+amount, hold.Fence())
	if err != nil {
		return err
	}
	if rows, err := result.RowsAffected(); err != nil || rows == 0 {
		return cmp.Or(err, errRefused)
	}
	return nil
}
