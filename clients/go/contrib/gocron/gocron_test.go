package gocron

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-co-op/gocron/v2"

	"holdfast"
	"holdfast/internal/testserver"
)

func newClient(t *testing.T, s *testserver.Server) *holdfast.Client {
	t.Helper()
	c, err := holdfast.New(holdfast.Config{Addr: s.Addr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// A countingLocker counts the schedulers that have called it.
type countingLocker struct {
	gocron.Locker
	asked *atomic.Int32
}

func (l countingLocker) Lock(ctx context.Context, key string) (gocron.Lock, error) {
	defer l.asked.Add(1)
	return l.Locker.Lock(ctx, key)
}

func TestThreeSchedulersRunEachJobOnce(t *testing.T) {
	s := testserver.Start(t)
	var runs, asked atomic.Int32
	const jobs = 5
	for range 3 {
		locker := countingLocker{NewLocker(newClient(t, s), time.Minute), &asked}
		scheduler, err := gocron.NewScheduler(gocron.WithDistributedLocker(locker))
		if err != nil {
			t.Fatal(err)
		}
		for job := range jobs {
			_, err = scheduler.NewJob(gocron.OneTimeJob(gocron.OneTimeJobStartImmediately()),
				gocron.NewTask(func() { runs.Add(1) }), gocron.WithName(fmt.Sprint("job", job)))
			if err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(60 * time.Millisecond) // as if their clocks differed by so much
		scheduler.Start()
		defer func() { _ = scheduler.Shutdown() }()
	}
	testserver.Eventually(t, "each scheduler has asked for each job", func() bool { return asked.Load() == 3*jobs })
	testserver.Eventually(t, "each job has run", func() bool { return runs.Load() >= jobs })
	if n := runs.Load(); n != jobs {
		t.Errorf("%d runs of %d jobs", n, jobs)
	}
}

func TestElectorHasOneLeader(t *testing.T) {
	s := testserver.Start(t)
	ctx := context.Background()
	a, b := NewElector(newClient(t, s), "fleet"), NewElector(newClient(t, s), "fleet")
	if err := a.IsLeader(ctx); err != nil {
		t.Fatal(err)
	}
	if a.IsLeader(ctx) != nil || b.IsLeader(ctx) == nil {
		t.Error("not exactly one leads")
	}
	if err := a.Resign(ctx); err != nil {
		t.Fatal(err)
	}
	if err := b.IsLeader(ctx); err != nil {
		t.Error(err)
	}
}

// While it is not certain whether the client holds the lock, the elector neither leads nor requests the lock again.
func TestElectorKeepsAHoldThatIsNotCertain(t *testing.T) {
	s := testserver.Start(t)
	e := NewElector(newClient(t, s), "fleet")
	if err := e.IsLeader(context.Background()); err != nil {
		t.Fatal(err)
	}
	hold := e.hold
	s.Kill()
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	_ = hold.Release(ended) // begins and cannot end: the hold is not certain
	if err := e.IsLeader(context.Background()); !errors.Is(err, errUncertain) || e.hold != hold {
		t.Errorf("%v; the hold was replaced: %v", err, e.hold != hold)
	}
}

func TestElectorStandsAgainAfterALoss(t *testing.T) {
	c := newClient(t, testserver.Start(t))
	e := NewElector(c, "fleet")
	ctx := context.Background()
	if err := e.IsLeader(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Force(ctx, "fleet"); err != nil {
		t.Fatal(err)
	}
	<-e.hold.Context().Done()
	if err := e.IsLeader(ctx); err != nil || !e.hold.Held() {
		t.Error(err)
	}
}
