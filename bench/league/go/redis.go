package main

import (
	"context"
	"math"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	redsyncpool "github.com/go-redsync/redsync/v4/redis"
	redsyncredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"holdfast"
	"holdfast/goredis"
)

// lease is that of every contender whose documentation leaves the choice to its user.
const lease = 10 * time.Second

var ephemeral = holdfast.Ephemeral()

func holdfastClient(options ...holdfast.Option) contender {
	return func(league string, endpoints []string) (lockFunc, error) {
		client, err := goredis.New(redis.NewClient(&redis.Options{Addr: endpoints[0]}))
		if err != nil {
			return nil, err
		}
		terms := options
		if league == "R" {
			terms = append([]holdfast.Option{holdfast.Replicas(1)}, options...)
		}
		return func(ctx context.Context, key string, shared bool) (int64, func() error, error) {
			lock := client.Lock
			if shared {
				rw := client.RWLock(key)
				lock = func(ctx context.Context, _ string, options ...holdfast.Option) (*holdfast.Hold, error) {
					return rw.RLock(ctx, options...)
				}
			}
			hold, err := lock(ctx, key, terms...)
			if err != nil {
				return 0, nil, err
			}
			return hold.Fence(), func() error { return hold.Release(context.Background()) }, nil
		}, nil
	}
}

// redsyncClient asks all endpoints: in league R they are three servers that know nothing of each other.
func redsyncClient(_ string, endpoints []string) (lockFunc, error) {
	var pools []redsyncpool.Pool
	for _, endpoint := range endpoints {
		pools = append(pools, redsyncredis.NewPool(redis.NewClient(&redis.Options{Addr: endpoint})))
	}
	sync := redsync.New(pools...)
	return func(ctx context.Context, key string, _ bool) (int64, func() error, error) {
		// The defaults (8 s, a delay of 50 to 250 ms) but for the number of tries, so that it waits.
		mutex := sync.NewMutex(key, redsync.WithTries(math.MaxInt32))
		if err := mutex.LockContext(ctx); err != nil {
			return 0, nil, err
		}
		return 0, func() error { _, err := mutex.Unlock(); return err }, nil
	}, nil
}

func redislockClient(_ string, endpoints []string) (lockFunc, error) {
	locker := redislock.New(redis.NewClient(&redis.Options{Addr: endpoints[0]}))
	return func(ctx context.Context, key string, _ bool) (int64, func() error, error) {
		// The retries of its README. Obtain gives up after the lease unless ctx has a deadline.
		ctx, cancel := context.WithTimeout(ctx, time.Hour)
		defer cancel()
		lock, err := locker.Obtain(ctx, key, lease, &redislock.Options{RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond)})
		if err != nil {
			return 0, nil, err
		}
		return 0, func() error { return lock.Release(context.Background()) }, nil
	}, nil
}
