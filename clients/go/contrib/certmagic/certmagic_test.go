package certmagic

import (
	"context"
	"errors"
	"testing"
	"time"

	"holdfast"
	"holdfast/internal/testserver"
)

func TestLockerKeepsTheContractOfCertmagic(t *testing.T) {
	s := testserver.Start(t)
	ctx := context.Background()
	lockers := make([]*Locker, 2)
	for i := range lockers {
		c, err := holdfast.New(holdfast.Config{Addr: s.Addr})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		lockers[i] = New(c)
	}
	a, b := lockers[0], lockers[1]
	if err := a.Lock(ctx, "example"); err != nil {
		t.Fatal(err)
	}
	if ok, err := b.TryLock(ctx, "example"); ok || err != nil {
		t.Errorf("try: %v, %v", ok, err)
	}
	wait, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if err := b.Lock(wait, "example"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a cancelled wait: %v", err)
	}
	if err := a.RenewLockLease(ctx, "example", time.Minute); err != nil {
		t.Error(err)
	}
	if err := b.Unlock(ctx, "example"); err == nil {
		t.Error("unlocked the lock of another process")
	}
	granted := make(chan error)
	go func() { granted <- b.Lock(ctx, "example") }()
	if err := a.Unlock(ctx, "example"); err != nil {
		t.Error(err)
	}
	if err := <-granted; err != nil {
		t.Error(err)
	}
	if err := b.Unlock(ctx, "example"); err != nil {
		t.Error(err)
	}
}

func newLocker(t *testing.T, s *testserver.Server) *Locker {
	t.Helper()
	c, err := holdfast.New(holdfast.Config{Addr: s.Addr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return New(c)
}

// A task that unlocks a lock that it has lost must not release the hold of the task that acquired the lock next.
func TestUnlockOfALostLockLeavesTheNextHold(t *testing.T) {
	s := testserver.Start(t)
	a, b := newLocker(t, s), newLocker(t, s)
	ctx := context.Background()
	if err := a.Lock(ctx, "example"); err != nil {
		t.Fatal(err)
	}
	if _, err := a.client.Force(ctx, "example"); err != nil {
		t.Fatal(err)
	}
	if err := a.Lock(ctx, "example"); err != nil {
		t.Fatal(err)
	}
	if err := a.RenewLockLease(ctx, "example", time.Minute); err != nil {
		t.Error(err)
	}
	if err := a.Unlock(ctx, "example"); !errors.Is(err, holdfast.ErrLockLost) {
		t.Errorf("the first: %v", err)
	}
	if ok, err := b.TryLock(ctx, "example"); ok || err != nil {
		t.Errorf("the second is not held: %v, %v", ok, err)
	}
	if err := a.Unlock(ctx, "example"); err != nil {
		t.Errorf("the second: %v", err)
	}
	if err := a.Unlock(ctx, "example"); err == nil || len(a.holds) > 0 {
		t.Errorf("a third: %v", err)
	}
}

func TestTryLockReportsThatItsContextHasEnded(t *testing.T) {
	l := newLocker(t, testserver.Start(t))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if ok, err := l.TryLock(ctx, "example"); ok || !errors.Is(err, context.Canceled) {
		t.Errorf("%v, %v", ok, err)
	}
}
