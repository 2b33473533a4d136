// Package vault provides the high availability backend of HashiCorp Vault: a lock that elects the active node.
package vault

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/vault/sdk/physical"

	"holdfast"
)

// A Backend implements [physical.HABackend] and [physical.FencingHABackend].
type Backend struct {
	client *holdfast.Client
	lease  time.Duration
	mu     sync.Mutex
	active *Lock
}

var (
	_ physical.HABackend        = (*Backend)(nil)
	_ physical.FencingHABackend = (*Backend)(nil)
)

// New returns a backend. A killed active node is replaced after lease; 0 means 5 s.
func New(client *holdfast.Client, lease time.Duration) *Backend {
	if lease <= 0 {
		lease = 5 * time.Second
	}
	return &Backend{client: client, lease: lease}
}

// HAEnabled returns true.
func (b *Backend) HAEnabled() bool { return true }

// LockWith returns the lock of this key. Other nodes read the value of the lock's holder. It has at most 479 bytes, where
// each "%" and "#" counts as three.
func (b *Backend) LockWith(key, value string) (physical.Lock, error) {
	return &Lock{backend: b, key: key, value: value}, nil
}

// RegisterActiveNodeLock names the lock whose fence guards writes: see [Backend.Fence].
func (b *Backend) RegisterActiveNodeLock(l physical.Lock) error {
	lock, ok := l.(*Lock)
	if !ok {
		return errors.New("holdfast: not a lock of this backend")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.active = lock
	return nil
}

// Fence returns the fencing token of this node's registered lock, or 0 before the lock was acquired and after Unlock.
// After a loss it is still the old token, which the storage refuses once it has seen that of the next active node.
func (b *Backend) Fence() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.active == nil {
		return 0
	}
	if hold := b.active.current(); hold != nil {
		return hold.Fence()
	}
	return 0
}

// A Lock implements [physical.Lock].
type Lock struct {
	backend    *Backend
	key, value string
	mu         sync.Mutex
	hold       *holdfast.Hold
}

func (l *Lock) current() *holdfast.Hold {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.hold
}

// Lock waits for the lock. It returns nil if stop is closed first. The channel that it returns is closed when the lock is
// lost or released.
func (l *Lock) Lock(stop <-chan struct{}) (<-chan struct{}, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	hold, err := l.backend.client.Lock(ctx, l.key, holdfast.Value(l.value), holdfast.Lease(l.backend.lease))
	if err != nil {
		if ctx.Err() != nil {
			return nil, nil
		}
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hold = hold
	return hold.Context().Done(), nil
}

// Unlock releases the lock.
func (l *Lock) Unlock() error {
	l.mu.Lock()
	hold := l.hold
	l.hold = nil
	l.mu.Unlock()
	if hold == nil {
		return nil
	}
	return hold.Release(context.Background())
}

// Value returns whether any node holds the lock, and that node's value.
func (l *Lock) Value() (bool, string, error) {
	leader, err := l.backend.client.Leader(context.Background(), l.key)
	return leader.Term != 0, leader.Value, err
}
