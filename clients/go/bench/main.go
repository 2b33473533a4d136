// Bench compares the cost of an uncontended pair and of a hand-off with other Go locks, in one run.
//
//	HOLDFAST_MODULE=target/release/libholdfast.so go run . [-time 5s]
//
// Two servers run on unix sockets: one with the module, one without, for the others.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	redsyncgoredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"holdfast"
)

const (
	lease     = 10 * time.Second
	waiters   = 16
	processes = 16 // clients of their own in the hand-off: as if each were a process
)

// A contender acquires the lock of a name, waiting for it, and returns how to release it.
type contender struct {
	name    string
	clients []func(ctx context.Context, name string) (release func() error, err error)
}

func start(dir, name string, args ...string) (addr string, stop func()) {
	addr = filepath.Join(dir, name)
	cmd := exec.Command("redis-server", append([]string{"--port", "0", "--unixsocket", addr, "--save", "", "--loglevel", "warning"}, args...)...)
	if err := cmd.Start(); err != nil {
		log.Fatal(err)
	}
	for {
		if c, err := net.Dial("unix", addr); err == nil {
			_ = c.Close()
			return addr, func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func check[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}

func contenders(with, without string) []contender {
	all := []contender{{name: "bare commands"}, {name: "holdfast"}, {name: "redislock"}, {name: "redsync"}}
	for i := range processes {
		rdb := redis.NewClient(&redis.Options{Network: "unix", Addr: without})
		bare := redis.NewClient(&redis.Options{Network: "unix", Addr: with, ReadTimeout: -1})
		hf := check(holdfast.New(holdfast.Config{Addr: with}))
		rl, rs := redislock.New(rdb), redsync.New(redsyncgoredis.NewPool(rdb))
		var owners atomic.Int64
		add := func(n int, lock func(ctx context.Context, name string) (func() error, error)) {
			all[n].clients = append(all[n].clients, lock)
		}
		add(0, func(ctx context.Context, name string) (func() error, error) {
			owner := fmt.Sprintf("bare-%d-%d", i, owners.Add(1))
			err := bare.Do(ctx, "LOCK.ACQUIRE", name, owner, "HOLDS", 1, "LEASE", lease.Milliseconds(), "WAIT", 60000).Err()
			return func() error { return bare.Do(ctx, "LOCK.RELEASE", name, owner).Err() }, err
		})
		add(1, func(ctx context.Context, name string) (func() error, error) {
			h, err := hf.Lock(ctx, name, holdfast.Lease(lease))
			return func() error { return h.Release(ctx) }, err
		})
		add(2, func(ctx context.Context, name string) (func() error, error) {
			l, err := rl.Obtain(ctx, name, lease, &redislock.Options{RetryStrategy: redislock.LinearBackoff(20 * time.Millisecond)})
			return func() error { return l.Release(ctx) }, err
		})
		add(3, func(ctx context.Context, name string) (func() error, error) {
			m := rs.NewMutex(name, redsync.WithExpiry(lease), redsync.WithTries(1_000_000))
			err := m.LockContext(ctx)
			return func() error { _, err := m.UnlockContext(ctx); return err }, err
		})
	}
	return all
}

// pair measures an uncontended acquire and release: the median.
func pair(c contender, d time.Duration) time.Duration {
	var took []time.Duration
	for end := time.Now().Add(d); time.Now().Before(end); {
		began := time.Now()
		if err := check(c.clients[0](context.Background(), "pair"))(); err != nil {
			log.Fatal(err)
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took[len(took)/2]
}

// handOff counts how often the lock changes its owner in a second, among clients that all want it, and compares
// the most served with the least.
func handOff(c contender, d time.Duration) (changes float64, fairness float64) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	var mu sync.Mutex
	last, changed, served := -1, 0, make([]int, waiters)
	var done sync.WaitGroup
	for i := range waiters {
		done.Go(func() {
			for ctx.Err() == nil {
				release, err := c.clients[i%processes](ctx, "hand-off")
				if err != nil {
					continue
				}
				mu.Lock()
				served[i]++
				if last != i {
					last = i
					changed++
				}
				mu.Unlock()
				_ = release()
			}
		})
	}
	done.Wait()
	return float64(changed) / d.Seconds(), float64(slices.Max(served)) / float64(max(slices.Min(served), 1))
}

func main() {
	d := flag.Duration("time", 5*time.Second, "how long each measurement takes")
	flag.Parse()
	dir := check(os.MkdirTemp("", "hf"))
	defer func() { _ = os.RemoveAll(dir) }()
	with, stop := start(dir, "with", "--loadmodule", os.Getenv("HOLDFAST_MODULE"))
	defer stop()
	without, stop2 := start(dir, "without")
	defer stop2()
	fmt.Printf("| lock | pair, median | owner changes a second among %d | most served / least |\n|---|---:|---:|---:|\n", waiters)
	for _, c := range contenders(with, without) {
		p := pair(c, *d)
		changes, fairness := handOff(c, *d)
		fmt.Printf("| %s | %d µs | %.0f | %.2f |\n", c.name, p.Microseconds(), changes, fairness)
	}
}
