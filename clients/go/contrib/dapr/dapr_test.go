package dapr

import (
	"context"
	"errors"
	"testing"

	"github.com/dapr/components-contrib/lock"
	"github.com/dapr/components-contrib/metadata"
	conformance "github.com/dapr/components-contrib/tests/conformance/lock"

	"holdfast/internal/testserver"
)

func TestConformance(t *testing.T) {
	s := testserver.Start(t)
	store := New(nil)
	t.Cleanup(func() { _ = store.Close() })
	config, err := conformance.NewTestConfig("holdfast", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	conformance.ConformanceTests(t, map[string]string{"redisHost": s.Addr}, store, config)
}

func newStore(t *testing.T, s *testserver.Server) *Store {
	t.Helper()
	store := New(nil)
	m := lock.Metadata{Base: metadata.Base{Properties: map[string]string{"redisHost": s.Addr}}}
	if err := store.InitLockStore(context.Background(), m); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	return store
}

func TestTryLockReportsThatItsContextHasEnded(t *testing.T) {
	store := newStore(t, testserver.Start(t))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	r, err := store.TryLock(ctx, &lock.TryLockRequest{ResourceID: "k", LockOwner: "app", ExpiryInSeconds: 10})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v, %v", r, err)
	}
}

func TestUnlockReleasesTheHoldOfAnotherProcessAfterALoss(t *testing.T) {
	s := testserver.Start(t)
	a, b := newStore(t, s), newStore(t, s)
	ctx := context.Background()
	acquire := func(store *Store) {
		t.Helper()
		r, err := store.TryLock(ctx, &lock.TryLockRequest{ResourceID: "k", LockOwner: "app", ExpiryInSeconds: 60})
		if err != nil || !r.Success {
			t.Fatalf("%v, %v", r, err)
		}
	}
	acquire(a)
	if _, err := a.client.Force(ctx, "k"); err != nil {
		t.Fatal(err)
	}
	acquire(b)
	r, err := a.Unlock(ctx, &lock.UnlockRequest{ResourceID: "k", LockOwner: "app"})
	if err != nil || r.Status != lock.Success {
		t.Errorf("%v, %v", r, err)
	}
	acquire(a)
}
