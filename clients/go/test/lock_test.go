// Package test runs the Go client against real servers.
package test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredislib "github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"holdfast"
	"holdfast/internal/testserver"
)

func TestMain(m *testing.M) {
	if err := flag.Set("rapid.checks", "30"); err != nil { // which takes seconds on a busy machine
		panic(err)
	}
	// The Close of rueidis does not wait for a refresh of the slot map, which runs in the background.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/redis/rueidis.(*clusterClient)._refresh.func2"))
}

var ctx = context.Background()

func client(t testing.TB, s *testserver.Server, options ...func(*holdfast.Config)) *holdfast.Client {
	t.Helper()
	config := holdfast.Config{Addr: s.Addr, Logger: slog.New(slog.DiscardHandler)}
	for _, option := range options {
		option(&config)
	}
	c, err := holdfast.New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func must[T any](t testing.TB) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func short(t testing.TB) context.Context {
	c, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return c
}

// free waits until a lock is neither held nor waited for.
func free(t testing.TB, c *holdfast.Client, name string) {
	t.Helper()
	testserver.Eventually(t, name+" is free", func() bool {
		info, err := c.Info(ctx, name)
		return err == nil && len(info.Holders) == 0 && info.Waiters == 0
	})
}

// waiting waits until at least n requests wait for a lock.
func waiting(t testing.TB, c *holdfast.Client, name string, n int) {
	t.Helper()
	testserver.Eventually(t, fmt.Sprint(n, " wait for ", name), func() bool {
		waiters, err := c.Waiters(ctx, name)
		return err == nil && len(waiters) >= n
	})
}

func TestLockExcludesAndServesInOrder(t *testing.T) {
	s := testserver.Start(t)
	c, second := client(t, s), client(t, s)
	first := must[*holdfast.Hold](t)(c.Lock(short(t), "k"))
	if _, err := c.TryLock(ctx, "k"); !errors.Is(err, holdfast.ErrNotAcquired) {
		t.Fatal(err)
	}
	if _, err := c.Lock(ctx, "k", holdfast.Wait(30*time.Millisecond)); !errors.Is(err, holdfast.ErrNotAcquired) {
		t.Fatal(err)
	}
	granted := make(chan *holdfast.Hold)
	go func() {
		h, _ := second.Lock(short(t), "k")
		granted <- h
	}()
	waiting(t, c, "k", 1)
	if err := first.Check(ctx); err != nil {
		t.Error(err)
	}
	if err := first.Release(ctx); err != nil {
		t.Fatal(err)
	}
	h := <-granted
	if h.Fence() <= first.Fence() {
		t.Errorf("fence %d after %d", h.Fence(), first.Fence())
	}
	if err := h.Release(ctx); err != nil {
		t.Fatal(err)
	}
	free(t, c, "k")
}

func TestLossIsReportedWithItsReason(t *testing.T) {
	c := client(t, testserver.Start(t))
	h := must[*holdfast.Hold](t)(c.Lock(short(t), "k", holdfast.Lease(8*time.Second)))
	if forced := must[bool](t)(c.Force(ctx, "k")); !forced {
		t.Error("not forced")
	}
	if err := h.Check(ctx); !errors.Is(err, holdfast.ErrLockLost) {
		t.Error(err)
	}
	<-h.Lost()
	if err := h.Release(ctx); !errors.Is(err, holdfast.ErrLockLost) {
		t.Error(err)
	}
	h = must[*holdfast.Hold](t)(c.Lock(short(t), "k", holdfast.Lease(8*time.Second)))
	_ = must[bool](t)(c.Force(ctx, "k"))
	<-h.Context().Done() // by the next renewal
	var lost *holdfast.LostError
	if !errors.As(context.Cause(h.Context()), &lost) || lost.Reason != holdfast.ReasonGone {
		t.Error(context.Cause(h.Context()))
	}
}

func TestReadersShareAndSemaphoreLimits(t *testing.T) {
	c := client(t, testserver.Start(t))
	rw := c.RWLock("rw")
	a := must[*holdfast.Hold](t)(rw.RLock(short(t)))
	b := must[*holdfast.Hold](t)(rw.RLock(short(t)))
	if _, err := rw.Lock(ctx, holdfast.Wait(20*time.Millisecond)); !errors.Is(err, holdfast.ErrNotAcquired) {
		t.Error(err)
	}
	_, _ = a.Release(ctx), b.Release(ctx)
	w := must[*holdfast.Hold](t)(rw.Lock(short(t)))
	if err := w.Release(ctx); err != nil {
		t.Error(err)
	}
	s := c.Semaphore("s", 2)
	one := must[*holdfast.Hold](t)(s.TryAcquire(ctx))
	two := must[*holdfast.Hold](t)(s.Acquire(short(t)))
	if _, err := s.TryAcquire(ctx); !errors.Is(err, holdfast.ErrNotAcquired) {
		t.Error(err)
	}
	_, _ = one.Release(ctx), two.Release(ctx)
	all := must[*holdfast.Hold](t)(c.LockAll(short(t), []string{"a", "b", "c"}))
	if _, err := c.TryLock(ctx, "b"); !errors.Is(err, holdfast.ErrNotAcquired) {
		t.Error(err)
	}
	if err := all.Release(ctx); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"rw", "s", "a", "b", "c"} {
		free(t, c, name)
	}
}

func TestTenThousandTasksShareAFewConnections(t *testing.T) {
	c := client(t, testserver.Start(t))
	const tasks, keys = 10_000, 100
	var held [keys]atomic.Int32
	var done sync.WaitGroup
	for i := range tasks {
		done.Go(func() {
			h, err := c.Lock(short(t), fmt.Sprint("k", i%keys))
			if err != nil {
				t.Error(err)
				return
			}
			if held[i%keys].Add(1) != 1 {
				t.Error("two holders")
			}
			held[i%keys].Add(-1)
			if err := h.Release(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	done.Wait()
}

// Each task holds an outer lock while it waits for an inner one. There are fewer connections than waits.
func TestNestedLocksDoNotBlockThePool(t *testing.T) {
	s := testserver.Start(t)
	c := client(t, s, func(config *holdfast.Config) { config.MaxConnections = 4 })
	other := client(t, s)
	outside := must[*holdfast.Hold](t)(other.Lock(short(t), "inner"))
	var done sync.WaitGroup
	for i := range 8 {
		done.Go(func() {
			outer, err := c.Lock(short(t), fmt.Sprint("outer", i))
			if err != nil {
				t.Error(err)
				return
			}
			inner, err := c.Semaphore("inner", 1).Acquire(short(t))
			if err != nil {
				t.Error(err)
			} else if err := inner.Release(ctx); err != nil {
				t.Error(err)
			}
			if err := outer.Release(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	waiting(t, other, "inner", 2)
	if err := outside.Release(ctx); err != nil {
		t.Error(err)
	}
	done.Wait()
	free(t, c, "inner")
}

func TestCancelledWaitsLeaveNothingAtTheServer(t *testing.T) {
	s := testserver.Start(t)
	c := client(t, s)
	for round := range 200 {
		h := must[*holdfast.Hold](t)(c.Lock(short(t), "k"))
		waits, cancel := context.WithCancel(ctx)
		var done sync.WaitGroup
		for range 3 {
			done.Go(func() {
				if h, err := c.RWLock("k").RLock(waits); err == nil {
					_ = h.Release(ctx)
				}
			})
		}
		if round%2 == 0 {
			waiting(t, c, "k", 1)
		}
		go cancel()
		if err := h.Release(ctx); err != nil {
			t.Fatal(err)
		}
		done.Wait()
		cancel()
	}
	free(t, c, "k")
}

func TestEphemeralLockIsFreeWhenItsConnectionEnds(t *testing.T) {
	s := testserver.Start(t)
	proxy := newProxy(t, s)
	c, other := client(t, proxy.server()), client(t, s)
	h := must[*holdfast.Hold](t)(c.Lock(short(t), "k", holdfast.Ephemeral(), holdfast.Lease(time.Minute)))
	if err := h.Check(ctx); err != nil {
		t.Error(err)
	}
	if err := h.Renew(ctx, 0); err != nil {
		t.Error(err)
	}
	proxy.cut()
	<-h.Lost()
	next := must[*holdfast.Hold](t)(other.Lock(short(t), "k"))
	if err := next.Release(ctx); err != nil {
		t.Error(err)
	}
}

func TestReleaseAfterKeepsTheLockAndLetsItExpire(t *testing.T) {
	c := client(t, testserver.Start(t))
	for name, option := range map[string]holdfast.Option{"plain": holdfast.NoRenew(), "ephemeral": holdfast.Ephemeral()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := must[*holdfast.Hold](t)(c.Lock(short(t), name, holdfast.Lease(time.Minute), option))
			if err := h.ReleaseAfter(ctx, 4*time.Second); err != nil {
				t.Fatal(err)
			}
			if _, err := c.TryLock(ctx, name); !errors.Is(err, holdfast.ErrNotAcquired) {
				t.Error(err)
			}
			free(t, c, name)
		})
	}
	t.Run("several", func(t *testing.T) {
		t.Parallel()
		h := must[*holdfast.Hold](t)(c.LockAll(short(t), []string{"a", "b"}, holdfast.Lease(time.Minute)))
		if err := h.ReleaseAfter(ctx, 4*time.Second); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"a", "b"} {
			if _, err := c.TryLock(ctx, name); !errors.Is(err, holdfast.ErrNotAcquired) {
				t.Error(name, err)
			}
		}
		free(t, c, "a")
		free(t, c, "b")
	})
}

func TestHoldsSurviveAPauseOfTheServer(t *testing.T) {
	s := testserver.Start(t)
	c := client(t, s)
	var holds []*holdfast.Hold
	for i := range 20 {
		holds = append(holds, must[*holdfast.Hold](t)(c.Lock(short(t), fmt.Sprint("k", i), holdfast.Lease(8*time.Second))))
	}
	s.Pause(2200 * time.Millisecond) // the first renewals are due after 2 s
	for _, h := range holds {
		if err := h.Check(short(t)); err != nil {
			t.Error(err)
		}
		if err := h.Release(short(t)); err != nil {
			t.Error(err)
		}
	}
}

func TestElectHandsOver(t *testing.T) {
	s := testserver.Start(t)
	a, b := client(t, s), client(t, s)
	terms := make(chan int64)
	resign := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		_ = a.Elect(short(t), "leader", "a:1#%", func(_ context.Context, term int64) error { terms <- term; <-resign; return nil })
	})
	first := <-terms
	done.Go(func() {
		_ = b.Elect(short(t), "leader", "b", func(_ context.Context, term int64) error { terms <- term; return nil })
	})
	if leader := must[holdfast.Leader](t)(b.Leader(ctx, "leader")); leader != (holdfast.Leader{Value: "a:1#%", Term: first}) {
		t.Error(leader)
	}
	close(resign)
	if second := <-terms; second <= first {
		t.Errorf("term %d after %d", second, first)
	}
	done.Wait()
	if leader := must[holdfast.Leader](t)(b.Leader(ctx, "leader")); leader != (holdfast.Leader{}) {
		t.Error(leader)
	}
}

func TestObserveReportsEachLeader(t *testing.T) {
	s := testserver.Start(t)
	a, b := client(t, s), client(t, s)
	seen := make(chan holdfast.Leader)
	observing, stop := context.WithCancel(short(t))
	var done sync.WaitGroup
	done.Go(func() {
		if err := b.Observe(observing, "leader", 10*time.Millisecond, func(l holdfast.Leader) { seen <- l }); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	if leader := <-seen; leader != (holdfast.Leader{}) {
		t.Error(leader)
	}
	err := a.Elect(short(t), "leader", "a", func(_ context.Context, term int64) error {
		if leader := <-seen; leader != (holdfast.Leader{Value: "a", Term: term}) {
			t.Error(leader)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if leader := <-seen; leader != (holdfast.Leader{}) {
		t.Error(leader)
	}
	stop()
	done.Wait()
}

func TestGivenOwnerIsRefusedTwiceAndReleasedByReleaseOwner(t *testing.T) {
	c := client(t, testserver.Start(t))
	h := must[*holdfast.Hold](t)(c.TryLock(ctx, "k", holdfast.Owner("app"), holdfast.NoRenew()))
	if _, err := c.TryLock(ctx, "k", holdfast.Owner("app")); !errors.Is(err, holdfast.ErrNotAcquired) {
		t.Error(err)
	}
	if ok := must[bool](t)(c.ReleaseOwner(ctx, "k", "other", 0)); ok {
		t.Error("released for another owner")
	}
	if ok := must[bool](t)(c.ReleaseOwner(ctx, "k", "app", h.Fence())); !ok {
		t.Error("not released")
	}
	free(t, c, "k")
}

func TestCloseReleasesWhatIsHeld(t *testing.T) {
	s := testserver.Start(t)
	c, other := client(t, s), client(t, s)
	_ = must[*holdfast.Hold](t)(c.Lock(short(t), "k", holdfast.Lease(time.Minute)))
	refused := make(chan error)
	go func() {
		_, err := c.RWLock("k").RLock(ctx)
		refused <- err
	}()
	waiting(t, other, "k", 1)
	_ = c.Close()
	if err := <-refused; !errors.Is(err, holdfast.ErrClosed) {
		t.Error(err)
	}
	free(t, other, "k")
	if _, err := c.TryLock(ctx, "k"); !errors.Is(err, holdfast.ErrClosed) {
		t.Error(err)
	}
}

func TestEphemeralLeaderIsReplacedWhenItsConnectionEnds(t *testing.T) {
	s := testserver.Start(t)
	proxy := newProxy(t, s)
	a, b := client(t, proxy.server()), client(t, s)
	ctx := short(t)
	terms := make(chan string)
	var done sync.WaitGroup
	// The lease outlasts the test: only the end of the connection ends the term.
	forever, resign := context.WithCancel(ctx)
	done.Go(func() {
		_ = a.Elect(forever, "leader", "a", func(ctx context.Context, _ int64) error {
			terms <- "a"
			<-ctx.Done()
			return context.Cause(ctx)
		}, holdfast.Ephemeral(), holdfast.Lease(time.Hour))
	})
	if leader := <-terms; leader != "a" {
		t.Fatal(leader)
	}
	done.Go(func() {
		if err := b.Elect(ctx, "leader", "b", func(context.Context, int64) error { terms <- "b"; return nil }, holdfast.Ephemeral()); err != nil {
			t.Error(err)
		}
	})
	waiting(t, b, "leader", 1)
	proxy.cut()
	if leader := <-terms; leader != "b" {
		t.Error(leader)
	}
	if leader := <-terms; leader != "a" { // a stood again
		t.Error(leader)
	}
	resign()
	done.Wait()
	free(t, b, "leader")
}

func TestElectNeedsTheReplicaToConfirmTheTerm(t *testing.T) {
	primary := testserver.Start(t, "--port", testserver.Port(t))
	host, port, _ := net.SplitHostPort(primary.Addr)
	replica := testserver.Start(t, "--port", testserver.Port(t), "--replicaof", host+" "+port, "--repl-diskless-sync-delay", "0")
	admin, there := goredislib.NewClient(&goredislib.Options{Addr: primary.Addr}), goredislib.NewClient(&goredislib.Options{Addr: replica.Addr})
	t.Cleanup(func() { _, _ = admin.Close(), there.Close() })
	testserver.Eventually(t, "the replica is online", func() bool {
		return strings.Contains(admin.Info(ctx, "replication").Val(), "state=online")
	})
	c := client(t, primary)
	err := c.Elect(short(t), "leader", "a", func(_ context.Context, term int64) error {
		if fence := there.HGet(ctx, "leader", "#fence").Val(); fence != fmt.Sprint(term) {
			t.Errorf("the replica knows %q in term %d", fence, term)
		}
		return nil
	}, holdfast.Replicas(1), holdfast.Lease(time.Minute))
	if err != nil {
		t.Error(err)
	}
	replica.Kill()
	err = c.Elect(short(t), "leader", "a", func(context.Context, int64) error {
		t.Error("elected without a confirmation")
		return nil
	}, holdfast.Replicas(1), holdfast.Wait(3*time.Second))
	if !errors.Is(err, holdfast.ErrNotAcquired) {
		t.Error(err)
	}
	free(t, c, "leader")
}
