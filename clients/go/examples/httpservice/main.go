// Httpservice handles each order in one request at a time, whichever machine it reaches.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"time"

	"github.com/redis/go-redis/v9"

	"holdfast"
	"holdfast/goredis"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	client, err := goredis.New(redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379"}), func(config *holdfast.Config) {
		config.Hooks.Lost = func(name string, reason holdfast.Reason) { slog.Warn("lock lost", "name", name, "reason", reason) }
	})
	if err != nil {
		log.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders/{id}", func(w http.ResponseWriter, r *http.Request) {
		err := client.Do(r.Context(), "order:"+r.PathValue("id"), func(ctx context.Context) error {
			return handle(ctx, r.PathValue("id"))
		}, holdfast.Wait(2*time.Second))
		switch {
		case errors.Is(err, holdfast.ErrNotAcquired):
			http.Error(w, "the order is being handled", http.StatusConflict)
		case err != nil:
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		default:
			_, _ = fmt.Fprintln(w, "done")
		}
	})
	server := &http.Server{Addr: "127.0.0.1:8080", Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	context.AfterFunc(ctx, func() { _ = server.Shutdown(context.Background()) })
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		log.Print(err)
	}
	_ = client.Close() // releases what is still held
}

func handle(ctx context.Context, _ string) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(100 * time.Millisecond): // the work
		return nil
	}
}
