// Package dapr provides a lock store for dapr.
package dapr

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/dapr/components-contrib/lock"
	"github.com/dapr/components-contrib/metadata"

	"holdfast"
)

// A Store implements [lock.Store]. Dapr chooses the owner of each lock: an owner that already holds the lock is refused.
type Store struct {
	client *holdfast.Client
	owns   bool // InitLockStore has made the client

	mu    sync.Mutex
	holds map[[2]string]*holdfast.Hold // locks that this process acquired, by resource and owner
}

var _ lock.Store = (*Store)(nil)

// New returns a store. If client is nil, InitLockStore makes one from the component's metadata: redisHost,
// redisUsername, redisPassword and redisDB.
func New(client *holdfast.Client) *Store {
	return &Store{client: client, holds: map[[2]string]*holdfast.Hold{}}
}

// InitLockStore connects to the server that the metadata names, unless the store was given a client.
func (s *Store) InitLockStore(_ context.Context, m lock.Metadata) error {
	if s.client != nil {
		return nil
	}
	host := m.Properties["redisHost"]
	if host == "" {
		return errors.New("holdfast: the component's metadata must name redisHost")
	}
	db, err := strconv.Atoi(cmp.Or(m.Properties["redisDB"], "0"))
	if err != nil {
		return fmt.Errorf("holdfast: redisDB: %w", err)
	}
	handshake := holdfast.Handshake(m.Properties["redisUsername"], m.Properties["redisPassword"], db, "")
	s.owns = true
	setup := func(context.Context, net.Addr) ([][]string, error) { return handshake, nil }
	s.client, err = holdfast.New(holdfast.Config{Addr: host, Setup: setup})
	return err
}

// TryLock acquires a lock if it is free. The lock is not renewed: it expires if it is not unlocked.
func (s *Store) TryLock(ctx context.Context, r *lock.TryLockRequest) (*lock.TryLockResponse, error) {
	lease := time.Duration(r.ExpiryInSeconds) * time.Second
	hold, err := s.client.TryLock(ctx, r.ResourceID, holdfast.Owner(r.LockOwner), holdfast.Lease(lease), holdfast.NoRenew())
	if errors.Is(err, holdfast.ErrNotAcquired) && ctx.Err() == nil {
		return &lock.TryLockResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	id := [2]string{r.ResourceID, r.LockOwner}
	s.mu.Lock()
	s.holds[id] = hold
	s.mu.Unlock()
	context.AfterFunc(hold.Context(), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.holds[id] == hold {
			delete(s.holds, id)
		}
	})
	return &lock.TryLockResponse{Success: true, Metadata: map[string]string{"fence": fmt.Sprint(hold.Fence())}}, nil
}

// Unlock releases a lock of this owner, even if another process has acquired it.
func (s *Store) Unlock(ctx context.Context, r *lock.UnlockRequest) (*lock.UnlockResponse, error) {
	s.mu.Lock()
	hold := s.holds[[2]string{r.ResourceID, r.LockOwner}]
	s.mu.Unlock()
	var released bool
	var err error
	if hold != nil {
		err = hold.Release(ctx)
		released = err == nil
	}
	if hold == nil || errors.Is(err, holdfast.ErrLockLost) { // another process may have acquired the lock for this owner
		released, err = s.client.ReleaseOwner(ctx, r.ResourceID, r.LockOwner, 0)
	}
	if err != nil {
		return &lock.UnlockResponse{Status: lock.InternalError}, err
	}
	if released {
		return &lock.UnlockResponse{Status: lock.Success}, nil
	}
	info, err := s.client.Info(ctx, r.ResourceID)
	switch {
	case err != nil:
		return &lock.UnlockResponse{Status: lock.InternalError}, err
	case len(info.Holders) == 0:
		return &lock.UnlockResponse{Status: lock.LockDoesNotExist}, nil
	}
	return &lock.UnlockResponse{Status: lock.LockBelongsToOthers}, nil
}

// Close closes the client that InitLockStore made.
func (s *Store) Close() error {
	if s.owns {
		return s.client.Close()
	}
	return nil
}

// GetComponentMetadata returns an empty map. The properties of the metadata are those that New names.
func (s *Store) GetComponentMetadata() metadata.MetadataMap { return metadata.MetadataMap{} }
