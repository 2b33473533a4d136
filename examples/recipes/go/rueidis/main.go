// A lock with rueidis and raw LOCK.* commands.  Usage: rueidis PORT KEY
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/redis/rueidis"

	"recipes/recipe"
)

func text(args []any) []string {
	all := make([]string, len(args))
	for i, arg := range args {
		all[i] = fmt.Sprint(arg)
	}
	return all
}

// sender marks waits as blocking: rueidis multiplexes all other commands over one connection, where a wait would hold up everybody.
func sender(c rueidis.Client, blocking bool) recipe.Send {
	return func(ctx context.Context, command, key string, args ...any) (int64, bool, error) {
		build := c.B().Arbitrary(command).Keys(key).Args(text(args)...)
		cmd := build.Build
		if blocking {
			cmd = build.Blocking
		}
		reply, err := c.Do(ctx, cmd()).AsInt64()
		if rueidis.IsRedisNil(err) {
			return 0, false, nil
		}
		if _, isReply := rueidis.IsRedisErr(err); err != nil && !isReply {
			return 0, false, fmt.Errorf("%w: %w", recipe.ErrBroken, err)
		}
		return reply, err == nil, err
	}
}

func main() {
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{"127.0.0.1:" + os.Args[1]}, DisableRetry: true, DisableCache: true})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	defer client.Close()
	incr := func(key string, by int64) (int64, error) {
		return client.Do(context.Background(), client.B().Incrby().Key(key).Increment(by).Build()).AsInt64()
	}
	recipe.Main(recipe.Library{Wait: sender(client, true), Short: sender(client, false)}, os.Args[2], incr)
}
