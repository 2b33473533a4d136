package holdfast

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// exampleClient is what goredis.New(rdb) or rueidis.New(client, option) returns in an application.
func exampleClient() *Client {
	client, err := New(Config{Addr: exampleAddr})
	if err != nil {
		panic(err)
	}
	return client
}

func Example() {
	client := exampleClient()
	defer client.Close()
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
	client := exampleClient()
	defer client.Close()

	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	hold, err := client.Lock(ctx, "report", Lease(30*time.Second))
	switch {
	case errors.Is(err, ErrNotAcquired):
		fmt.Println("another process holds the lock")
	case err != nil:
		fmt.Println(err)
	default:
		defer hold.Release(context.Background())
		fmt.Println("held:", hold.Held())
	}
	// Output: held: true
}

func ExampleClient_TryLock() {
	client := exampleClient()
	defer client.Close()

	hold, err := client.TryLock(context.Background(), "report")
	if errors.Is(err, ErrNotAcquired) {
		fmt.Println("another process makes the report")
		return
	}
	fmt.Println("fence", hold.Fence())
	// Output: fence 7
}

func ExampleClient_Do() {
	client := exampleClient()
	defer client.Close()

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
	client := exampleClient()
	defer client.Close()
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
	client := exampleClient()
	defer client.Close()
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
	client := exampleClient()
	defer client.Close()
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
	client := exampleClient()
	defer client.Close()

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
	client := exampleClient()
	defer client.Close()

	leader, err := client.Leader(context.Background(), "scheduler")
	fmt.Println(leader.Value, leader.Term, err)
	// Output: node-1 7 <nil>
}

func ExampleClient_Info() {
	client := exampleClient()
	defer client.Close()

	info, err := client.Info(context.Background(), "report")
	fmt.Println(len(info.Holders), "holder,", info.Waiters, "waiters,", err)
	// Output: 1 holder, 0 waiters, <nil>
}

func ExampleHold_Context() {
	client := exampleClient()
	defer client.Close()

	hold, err := client.Lock(context.Background(), "report")
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := hold.Context() // pass it to whatever the lock guards
	_ = hold.Release(context.Background())
	<-ctx.Done()
	fmt.Println("lost:", errors.Is(context.Cause(ctx), ErrLockLost))
	// Output: lost: false
}

func ExampleHold_ReleaseAfter() {
	client := exampleClient()
	defer client.Close()
	ctx := context.Background()

	hold, err := client.TryLock(ctx, "nightly")
	if err != nil {
		return // another machine runs the job
	}
	fmt.Println(hold.ReleaseAfter(ctx, time.Minute)) // no other machine runs it within a minute
	// Output: <nil>
}
