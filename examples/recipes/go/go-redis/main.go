// A lock with go-redis and raw LOCK.* commands.  Usage: go-redis PORT KEY
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/redis/go-redis/v9"

	"recipes/recipe"
)

// client never repeats a command by itself. go-redis takes one connection of its pool for each command.
func client(readTimeout time.Duration) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: "127.0.0.1:" + os.Args[1], MaxRetries: -1, ReadTimeout: readTimeout})
}

func sender(c *redis.Client) recipe.Send {
	return func(ctx context.Context, command, key string, args ...any) (int64, bool, error) {
		reply, err := c.Do(ctx, append([]any{command, key}, args...)...).Int64()
		var answer redis.Error // an error reply, nil included
		switch {
		case errors.Is(err, redis.Nil):
			return 0, false, nil
		case errors.As(err, &answer):
			return 0, false, err
		case err != nil:
			return 0, false, fmt.Errorf("%w: %w", recipe.ErrBroken, err)
		}
		return reply, true, nil
	}
}

func main() {
	waits, short := client(-1), client(recipe.Silence)
	incr := func(key string, by int64) (int64, error) { return short.IncrBy(context.Background(), key, by).Result() }
	recipe.Main(recipe.Library{Wait: sender(waits), Short: sender(short)}, os.Args[2], incr)
}
