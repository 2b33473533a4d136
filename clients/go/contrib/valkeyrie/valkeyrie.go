// Package valkeyrie provides the locks of a valkeyrie store. The other operations of the store are not implemented.
package valkeyrie

import (
	"context"
	"sync"
	"time"

	"github.com/kvtools/valkeyrie/store"

	"holdfast"
)

const defaultTTL = 20 * time.Second

// A Store implements NewLock, Get (of a lock's value) and Close of [store.Store].
type Store struct {
	store.Store // nil: other operations panic
	client      *holdfast.Client
}

var _ store.Store = (*Store)(nil)

// New returns a store. Closing it does not close client.
func New(client *holdfast.Client) *Store { return &Store{client: client} }

// NewLock returns the lock of this key. It is renewed until RenewLock is closed, and then expires after its TTL. The value
// has at most 479 bytes, where each "%" and "#" counts as three.
func (s *Store) NewLock(_ context.Context, key string, opts *store.LockOptions) (store.Locker, error) {
	l := &lock{client: s.client, key: key, ttl: defaultTTL}
	if opts != nil {
		l.value, l.renew = string(opts.Value), opts.RenewLock
		if opts.TTL > 0 {
			l.ttl = opts.TTL
		}
	}
	return l, nil
}

// Get returns the value of the lock's holder, and its fencing token as LastIndex.
func (s *Store) Get(ctx context.Context, key string, _ *store.ReadOptions) (*store.KVPair, error) {
	holder, err := s.client.Leader(ctx, key)
	if err != nil {
		return nil, err
	}
	if holder.Term == 0 {
		return nil, store.ErrKeyNotFound
	}
	return &store.KVPair{Key: key, Value: []byte(holder.Value), LastIndex: uint64(holder.Term)}, nil
}

// Close does nothing: the application closes the client.
func (s *Store) Close() error { return nil }

type lock struct {
	client     *holdfast.Client
	key, value string
	ttl        time.Duration
	renew      chan struct{}
	mu         sync.Mutex
	hold       *holdfast.Hold
}

// Lock waits for the lock. The channel is closed when the lock is lost or released.
func (l *lock) Lock(ctx context.Context) (<-chan struct{}, error) {
	hold, err := l.client.Lock(ctx, l.key, holdfast.Value(l.value), holdfast.Lease(l.ttl))
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.hold = hold
	l.mu.Unlock()
	if l.renew != nil {
		go func() {
			select {
			case <-l.renew:
				hold.StopRenewing()
			case <-hold.Context().Done():
			}
		}()
	}
	return hold.Context().Done(), nil
}

// Unlock releases the lock.
func (l *lock) Unlock(ctx context.Context) error {
	l.mu.Lock()
	hold := l.hold
	l.hold = nil
	l.mu.Unlock()
	if hold == nil {
		return store.ErrCannotLock
	}
	return hold.Release(ctx)
}
