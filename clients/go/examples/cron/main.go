// Cron runs a job every minute on one machine of a fleet. Start it on as many machines as you like.
package main

import (
	"context"
	"errors"
	"log"
	"os"
	"os/signal"
	"time"

	"github.com/redis/go-redis/v9"

	"holdfast"
	"holdfast/goredis"
)

const (
	interval = time.Minute
	// The clocks of the fleet differ by less: a machine that is late finds the lock still held.
	atLeast = 10 * time.Second
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"})
	client, err := goredis.New(rdb)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	for {
		next := time.Now().Truncate(interval).Add(interval)
		select {
		case <-time.After(time.Until(next)):
		case <-ctx.Done():
			return
		}
		hold, err := client.TryLock(ctx, "cron:report")
		if errors.Is(err, holdfast.ErrNotAcquired) {
			continue // another machine runs it
		}
		if err != nil {
			log.Print(err)
			continue
		}
		began := time.Now()
		log.Print("runs the report")
		if err := hold.ReleaseAfter(context.Background(), max(atLeast-time.Since(began), 0)); err != nil {
			log.Print(err)
		}
	}
}
