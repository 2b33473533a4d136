package gocron

import (
	"context"
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

func TestThreeSchedulersRunEachJobOnce(t *testing.T) {
	s := testserver.Start(t)
	var runs atomic.Int32
	start := time.Now().Add(500 * time.Millisecond)
	for i := range 3 { // their clocks differ by 60 ms
		scheduler, err := gocron.NewScheduler(gocron.WithDistributedLocker(NewLocker(newClient(t, s), 500*time.Millisecond)))
		if err != nil {
			t.Fatal(err)
		}
		at := start.Add(time.Duration(i) * 60 * time.Millisecond)
		_, err = scheduler.NewJob(gocron.DurationJob(time.Second), gocron.NewTask(func() { runs.Add(1) }),
			gocron.WithName("job"), gocron.WithStartAt(gocron.WithStartDateTime(at)), gocron.WithLimitedRuns(3))
		if err != nil {
			t.Fatal(err)
		}
		scheduler.Start()
		defer func() { _ = scheduler.Shutdown() }()
	}
	testserver.Eventually(t, "three rounds have run", func() bool { return runs.Load() >= 3 })
	time.Sleep(time.Until(start.Add(2500 * time.Millisecond))) // the other schedulers' third round
	if n := runs.Load(); n != 3 {
		t.Errorf("%d runs in three rounds", n)
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
