// Leader lets one of several processes lead. Start two, and end the first: the second leads at once.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"time"

	"github.com/redis/go-redis/v9"

	"holdfast/goredis"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	client, err := goredis.New(redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"}))
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	host, err := os.Hostname()
	if err != nil {
		log.Fatal(err)
	}
	err = client.Elect(ctx, "scheduler", host, func(ctx context.Context, term int64) error {
		log.Printf("leads in term %d", term)
		for ctx.Err() == nil { // ends when the lead is lost, or with the program
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
				log.Print("schedules")
			}
		}
		return ctx.Err()
	})
	log.Print(err)
}
