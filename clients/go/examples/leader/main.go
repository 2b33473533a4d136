// Leader lets one of several processes lead and write. The storage refuses a late write of a former leader.
//
//	leader NAME
//
// A leader that exits hands over at once; one that is killed is replaced a lease (5 s) later. One that was paused may continue and write
// before it notices that it no longer leads: the fence of its term is lower than the new leader's, so the storage refuses the write.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"holdfast/goredis"
)

// The storage keeps the highest fence that it has seen, and refuses a lower one. Here it is a hash; ../postgres does it in SQL.
var write = redis.NewScript(`
	if tonumber(ARGV[1]) < tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) then return 0 end
	redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'by', ARGV[2])
	return 1`)

var errRefused = errors.New("refused, the term is over")

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: leader NAME")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1]); err != nil && ctx.Err() == nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, name string) error {
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
	// A leader that loses its term stands again. When ctx ends, Elect hands over and returns.
	return client.Elect(ctx, "scheduler", name, func(ctx context.Context, term int64) error {
		fmt.Printf("%s leads, term %d\n", name, term)
		err := lead(ctx, rdb, name, term)
		fmt.Printf("%s: %v\n", name, err)
		return err
	})
}

// lead writes until ctx ends, which happens at the end of the term at the latest.
func lead(ctx context.Context, rdb *redis.Client, name string, term int64) error {
	for ctx.Err() == nil {
		written, err := write.Run(ctx, rdb, []string{"schedule"}, term, name).Int()
		if err != nil {
			return err
		}
		if written == 0 {
			return errRefused
		}
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
	return context.Cause(ctx)
}
