// Cron runs a command once in a fleet: cron starts it on every host at the same time, and one host does the work.
//
//	cron PERIOD COMMAND [ARGUMENT...]
//
// PERIOD names the run, such as the day. A host whose clock is late finds that the work was done. If the working host is killed, its lock
// expires a lease later, and the next start does the work: at least once, and never twice at the same time.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"time"

	"github.com/redis/go-redis/v9"

	"holdfast"
	"holdfast/goredis"
)

func main() {
	if len(os.Args) < 3 {
		log.Fatal("usage: cron PERIOD COMMAND [ARGUMENT...]")
	}
	code, err := once(context.Background(), os.Args[1], os.Args[2:])
	if err != nil {
		log.Fatal(err)
	}
	os.Exit(code)
}

// once returns the exit code of the command, or 0 if another host runs or has run it.
func once(ctx context.Context, period string, command []string) (code int, err error) {
	options, err := redis.ParseURL(cmp.Or(os.Getenv("REDIS_URL"), "redis://127.0.0.1:6379"))
	if err != nil {
		return 0, err
	}
	rdb := redis.NewClient(options)
	defer func() { _ = rdb.Close() }()
	client, err := goredis.New(rdb)
	if err != nil {
		return 0, err
	}
	defer func() { _ = client.Close() }()

	hold, err := client.TryLock(ctx, "cron:report", holdfast.Lease(5*time.Second))
	if errors.Is(err, holdfast.ErrNotAcquired) {
		fmt.Println("another host is at it")
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, hold.Release(ctx)) }()
	last, err := rdb.Get(ctx, "cron:report:done").Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return 0, err
	}
	if last == period {
		fmt.Println(period, "is done")
		return 0, nil
	}
	// The loss of the lock ends the work: another host may have begun it.
	work := exec.CommandContext(hold.Context(), command[0], command[1:]...) //nolint:gosec // the command is that of the caller
	work.Stdout, work.Stderr = os.Stdout, os.Stderr
	err = work.Run()
	var failed *exec.ExitError
	switch {
	case errors.As(err, &failed):
		return failed.ExitCode(), nil
	case err != nil:
		return 0, err
	}
	return 0, rdb.Set(ctx, "cron:report:done", period, 0).Err()
}
