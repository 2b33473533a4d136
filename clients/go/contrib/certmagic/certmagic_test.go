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
		t.Error("unlocked what another holds")
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
