package holdfast_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"holdfast"
)

// The client of the examples. An application makes its own by goredis.New(rdb) or rueidis.New(client, option).
var client = newClient()

func newClient() *holdfast.Client {
	locate := func(context.Context, string, bool) (string, error) { return holdfast.ExampleAddr, nil }
	c, err := holdfast.New(holdfast.Config{Locate: locate})
	if err != nil {
		panic(err)
	}
	return c
}

func Example() {
	ctx := context.Background()

	hold, err := client.Lock(ctx, "report")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("held, fence", hold.Fence())
	if err := hold.Release(ctx); err != nil {
		fmt.Println(err)
	}
	// Output: held, fence 7
}

func ExampleClient_Lock() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	hold, err := client.Lock(ctx, "report", holdfast.Lease(30*time.Second))
	switch {
	case errors.Is(err, holdfast.ErrNotAcquired):
		fmt.Println("another process holds the lock")
	case err != nil:
		fmt.Println(err)
	default:
		defer hold.Release(ctx)
		fmt.Println("held:", hold.Held())
	}
	// Output: held: true
}

func ExampleClient_TryLock() {
	hold, err := client.TryLock(context.Background(), "report")
	if errors.Is(err, holdfast.ErrNotAcquired) {
		fmt.Println("another process makes the report")
		return
	}
	fmt.Println("fence", hold.Fence())
	// Output: fence 7
}

func ExampleClient_Do() {
	err := client.Do(context.Background(), "report", func(ctx context.Context) error {
		fmt.Println("this ends if the lock is lost:", ctx.Err() == nil)
		return nil
	})
	fmt.Println(err)
	// Output:
	// this ends if the lock is lost: true
	// <nil>
}

func ExampleClient_LockAll() {
	ctx := context.Background()

	hold, err := client.LockAll(ctx, []string{"account:1", "account:2"})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(hold.Name())
	_ = hold.Release(ctx)
	// Output: account:1,account:2
}

func ExampleClient_RWLock() {
	ctx := context.Background()

	config := client.RWLock("config")
	reader, err := config.RLock(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(reader.Release(ctx))
	// Output: <nil>
}

func ExampleClient_Semaphore() {
	ctx := context.Background()

	licences := client.Semaphore("licences", 3)
	hold, err := licences.TryAcquire(ctx)
	if err != nil {
		fmt.Println("all licences are in use")
		return
	}
	fmt.Println(hold.Release(ctx))
	// Output: <nil>
}

func ExampleClient_Elect() {
	err := client.Elect(context.Background(), "scheduler", "node-1", func(_ context.Context, term int64) error {
		fmt.Println("leads in term", term)
		return nil // resigns
	})
	fmt.Println(err)
	// Output:
	// leads in term 7
	// <nil>
}

func ExampleClient_Leader() {
	leader, err := client.Leader(context.Background(), "scheduler")
	fmt.Println(leader.Value, leader.Term, err)
	// Output: node-1 7 <nil>
}

func ExampleClient_Info() {
	info, err := client.Info(context.Background(), "report")
	fmt.Println(len(info.Holders), "holder,", info.Waiters, "waiters,", err)
	// Output: 1 holder, 0 waiters, <nil>
}

func ExampleHold_Context() {
	hold, err := client.Lock(context.Background(), "report")
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := hold.Context() // pass it to whatever the lock guards
	_ = hold.Release(context.Background())
	<-ctx.Done()
	fmt.Println("lost:", errors.Is(context.Cause(ctx), holdfast.ErrLockLost))
	// Output: lost: false
}

func ExampleHold_ReleaseAfter() {
	ctx := context.Background()

	hold, err := client.TryLock(ctx, "nightly")
	if err != nil {
		return // another machine runs the job
	}
	fmt.Println(hold.ReleaseAfter(ctx, time.Minute)) // no other machine runs it within a minute
	// Output: <nil>
}

func ExampleClient_Observe() {
	ctx, cancel := context.WithCancel(context.Background())
	err := client.Observe(ctx, "scheduler", time.Second, func(leader holdfast.Leader) {
		fmt.Println(leader.Value, "leads in term", leader.Term)
		cancel()
	})
	fmt.Println(err)
	// Output:
	// node-1 leads in term 7
	// context canceled
}

func ExampleClient_Waiters() {
	waiters, err := client.Waiters(context.Background(), "report")
	for _, waiter := range waiters {
		fmt.Println(waiter.Owner, "has waited for", waiter.Waited)
	}
	fmt.Println(err)
	// Output:
	// node-2#5c has waited for 1.5s
	// <nil>
}

func ExampleClient_Force() {
	wasHeld, err := client.Force(context.Background(), "report")
	fmt.Println(wasHeld, err)
	// Output: true <nil>
}

func ExampleHold_Renew() {
	ctx := context.Background()

	hold, err := client.TryLock(ctx, "upload", holdfast.NoRenew(), holdfast.Lease(time.Minute))
	if err != nil {
		return // another process uploads
	}
	defer hold.Release(ctx)
	for part := range 3 {
		if err := hold.Renew(ctx, 0); err != nil { // a part that hangs is not renewed
			fmt.Println(err)
			return
		}
		fmt.Println("part", part)
	}
	// Output:
	// part 0
	// part 1
	// part 2
}

// Passed to goredis.New or rueidis.New, this option logs what happens to each lock.
func ExampleHooks() {
	logs := func(config *holdfast.Config) {
		config.Hooks = holdfast.Hooks{
			Acquired: func(name string, waited time.Duration) { slog.Info("lock acquired", "name", name, "waited", waited) },
			Released: func(name string, held time.Duration) { slog.Info("lock released", "name", name, "held", held) },
			Lost:     func(name string, reason holdfast.Reason) { slog.Warn("lock lost", "name", name, "reason", reason) },
		}
	}
	config := holdfast.Config{Addr: "127.0.0.1:6379"}
	logs(&config)
	// Output:
}
