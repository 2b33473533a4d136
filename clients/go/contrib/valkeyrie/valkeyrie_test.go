package valkeyrie

import (
	"context"
	"testing"
	"time"

	"github.com/kvtools/valkeyrie/store"
	"github.com/kvtools/valkeyrie/testsuite"

	"holdfast"
	"holdfast/internal/testserver"
)

func newStore(t *testing.T, s *testserver.Server) *Store {
	t.Helper()
	c, err := holdfast.New(holdfast.Config{Addr: s.Addr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return New(c)
}

func TestLock(t *testing.T) { testsuite.RunTestLock(t, newStore(t, testserver.Start(t))) }

func TestLockTTL(t *testing.T) {
	s := testserver.Start(t)
	testsuite.RunTestLockTTL(t, newStore(t, s), newStore(t, s))
}

func TestClosingRenewLockEndsOnlyTheRenewal(t *testing.T) {
	s := testserver.Start(t)
	a, b := newStore(t, s), newStore(t, s)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	const ttl = 2 * time.Second
	acquire := func(s *Store, ttl time.Duration, renew chan struct{}) (store.Locker, <-chan struct{}) {
		t.Helper()
		l, err := s.NewLock(ctx, "k", &store.LockOptions{TTL: ttl, RenewLock: renew})
		if err != nil {
			t.Fatal(err)
		}
		lost, err := l.Lock(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return l, lost
	}
	renew := make(chan struct{})
	_, lost := acquire(a, ttl, renew)
	select {
	case <-lost:
		t.Fatal("not renewed")
	case <-time.After(2 * ttl):
	}
	close(renew)
	select {
	case <-lost:
		t.Error("reported as lost while it is held")
	case <-time.After(ttl / 4):
	}
	<-lost

	renew = make(chan struct{})
	l, _ := acquire(a, time.Hour, renew)
	close(renew)
	time.Sleep(100 * time.Millisecond)
	if err := l.Unlock(ctx); err != nil {
		t.Error(err)
	}
	acquire(b, ttl, nil) // it was released, or this would take an hour
}
