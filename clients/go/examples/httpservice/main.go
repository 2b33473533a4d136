// Httpservice handles requests for the same order one at a time, on all hosts together. Requests for different orders run in parallel.
//
//	httpservice PORT        curl -X POST 127.0.0.1:PORT/orders/7/items
//
// A request that has waited for two seconds gets 409. A process that is killed during a request blocks its order for a lease.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"holdfast"
	"holdfast/goredis"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: httpservice PORT")
	}
	options, err := redis.ParseURL(cmp.Or(os.Getenv("REDIS_URL"), "redis://127.0.0.1:6379"))
	if err != nil {
		log.Fatal(err)
	}
	rdb := redis.NewClient(options)
	client, err := goredis.New(rdb, func(config *holdfast.Config) {
		config.Hooks.Lost = func(name string, reason holdfast.Reason) { slog.Warn("lock lost", "name", name, "reason", reason) }
	})
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders/{order}/items", func(w http.ResponseWriter, r *http.Request) {
		order, items := r.PathValue("order"), 0
		err := client.Do(r.Context(), "order:"+order, func(ctx context.Context) (err error) {
			items, err = addItem(ctx, rdb, "items:"+order)
			return err
		}, holdfast.Wait(2*time.Second), holdfast.Lease(5*time.Second))
		switch {
		case errors.Is(err, holdfast.ErrNotAcquired):
			http.Error(w, "this order is being changed", http.StatusConflict)
		case err != nil:
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		default:
			_, _ = fmt.Fprintln(w, items, "items")
		}
	})
	server := &http.Server{Addr: net.JoinHostPort("127.0.0.1", os.Args[1]), Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() {
		log.Print(server.ListenAndServe()) // returns when Shutdown begins
		stop()
	}()
	<-ctx.Done()
	drain, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = server.Shutdown(drain) // waits for the requests
	_ = client.Close()         // releases locks that are still held
}

// addItem reads, computes and writes: without the lock, two concurrent requests could count one item.
func addItem(ctx context.Context, rdb *redis.Client, key string) (int, error) {
	items, err := rdb.Get(ctx, key).Int()
	if err != nil && !errors.Is(err, redis.Nil) {
		return 0, err
	}
	select {
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	case <-time.After(10 * time.Millisecond): // the work
	}
	return items + 1, rdb.Set(ctx, key, items+1, 0).Err()
}
