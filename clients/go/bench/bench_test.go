// Package bench compares the cost of an uncontended pair, and the hand-off and its fairness, with other Go locks:
//
//	for i in 1 2 3 4 5; do HOLDFAST_MODULE=target/release/libholdfast.so go test -bench . || break; done
//
// With -count 5, the contenders would not alternate. Two servers run on unix sockets: one with the module, one without, for
// the others.
package bench

import (
	"context"
	"crypto/rand"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	redsyncgoredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"holdfast"
	"holdfast/goredis"
	"holdfast/internal/testserver"
)

const (
	lease     = 10 * time.Second
	processes = 16 // clients that contend in the hand-off, as if each were in a process of its own
)

// A lockFunc waits for the lock of a name, and returns the function that releases it.
type lockFunc func(ctx context.Context, name string) (release func() error, err error)

// contenders make clients: each gets a connection to a server with the module and to one without, and uses one of them.
var contenders = []struct {
	name   string
	client func(b *testing.B, with, without *redis.Client) lockFunc
}{
	// The commands that the client sends, with the same arguments.
	{"bare-commands", func(_ *testing.B, with, _ *redis.Client) lockFunc {
		return func(ctx context.Context, name string) (func() error, error) {
			owner := rand.Text()
			reply, err := with.Do(ctx, "LOCK.ACQUIRE", name, owner, "HOLDS", 1, "LEASE", lease.Milliseconds(), "WAIT", 3600000, "WITHWAITED").Slice()
			return func() error { return with.Do(ctx, "LOCK.RELEASE", name, owner, "TOKEN", reply[0]).Err() }, err
		}
	}},
	{"holdfast", func(b *testing.B, with, _ *redis.Client) lockFunc {
		client, err := goredis.New(with)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = client.Close() })
		return func(ctx context.Context, name string) (func() error, error) {
			h, err := client.Lock(ctx, name, holdfast.Lease(lease))
			return func() error { return h.Release(ctx) }, err
		}
	}},
	{"redislock", func(_ *testing.B, _, without *redis.Client) lockFunc {
		client := redislock.New(without)
		return func(ctx context.Context, name string) (func() error, error) {
			l, err := client.Obtain(ctx, name, lease, &redislock.Options{RetryStrategy: redislock.LinearBackoff(20 * time.Millisecond)})
			return func() error { return l.Release(ctx) }, err
		}
	}},
	{"redsync", func(_ *testing.B, _, without *redis.Client) lockFunc {
		client := redsync.New(redsyncgoredis.NewPool(without))
		return func(ctx context.Context, name string) (func() error, error) {
			m := client.NewMutex(name, redsync.WithExpiry(lease), redsync.WithTries(1_000_000))
			err := m.LockContext(ctx)
			return func() error { _, err := m.UnlockContext(ctx); return err }, err
		}
	}},
}

// compare runs a benchmark for each contender, with n clients.
func compare(b *testing.B, n int, run func(b *testing.B, clients []lockFunc)) {
	with, without := testserver.Start(b), testserver.StartPlain(b)
	for _, contender := range contenders {
		b.Run(contender.name, func(b *testing.B) {
			var clients []lockFunc
			for range n {
				open := func(s *testserver.Server) *redis.Client {
					rdb := redis.NewClient(&redis.Options{Network: "unix", Addr: s.Addr, ReadTimeout: -1})
					b.Cleanup(func() { _ = rdb.Close() })
					return rdb
				}
				clients = append(clients, contender.client(b, open(with), open(without)))
			}
			run(b, clients)
		})
	}
}

func BenchmarkUncontendedPair(b *testing.B) {
	compare(b, 1, func(b *testing.B, clients []lockFunc) {
		for b.Loop() {
			release, err := clients[0](context.Background(), "pair")
			if err == nil {
				err = release()
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	})
}

// A hand-off is a change of the owner among clients that contend for the lock. It does not count if a client acquires its
// own lock again. The fairness is the ratio of the most grants of a client to the fewest, at least one: 1.00 is fair.
func BenchmarkHandOff(b *testing.B) {
	compare(b, processes, func(b *testing.B, clients []lockFunc) {
		var mu sync.Mutex
		last, changed, grants := -1, 0, make([]int, len(clients))
		began := time.Now()
		var done sync.WaitGroup
		for i, lock := range clients {
			done.Go(func() {
				for {
					release, err := lock(context.Background(), "hand-off")
					if err != nil {
						b.Error(err)
						return
					}
					mu.Lock()
					over := changed >= b.N
					if !over {
						grants[i]++
						if last != i {
							last = i
							changed++
						}
					}
					mu.Unlock()
					if _ = release(); over {
						return
					}
				}
			})
		}
		done.Wait()
		b.ReportMetric(float64(changed)/time.Since(began).Seconds(), "changes/s")
		b.ReportMetric(float64(slices.Max(grants))/float64(max(slices.Min(grants), 1)), "fairness")
	})
}
