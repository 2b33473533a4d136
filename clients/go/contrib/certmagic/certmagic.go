// Package certmagic provides the locks of a certmagic storage.
package certmagic

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/caddyserver/certmagic"

	"holdfast"
)

// A Locker implements [certmagic.Locker], [certmagic.TryLocker] and [certmagic.LockLeaseRenewer]. Embed it in a
// storage. Certmagic releases locks by name, so the Locker refers to holds by name. A name may have several: those that
// were lost and not yet unlocked, and the one that was acquired after them.
type Locker struct {
	client  *holdfast.Client
	options []holdfast.Option
	mu      sync.Mutex
	holds   map[string][]*holdfast.Hold // in the order of their acquisition
}

var (
	_ certmagic.Locker           = (*Locker)(nil)
	_ certmagic.TryLocker        = (*Locker)(nil)
	_ certmagic.LockLeaseRenewer = (*Locker)(nil)
)

// New returns a locker. Its locks are renewed until they are released.
func New(client *holdfast.Client, options ...holdfast.Option) *Locker {
	return &Locker{client: client, options: options, holds: map[string][]*holdfast.Hold{}}
}

// Lock waits for the lock of this name.
func (l *Locker) Lock(ctx context.Context, name string) error {
	hold, err := l.client.Lock(ctx, name, l.options...)
	l.keep(name, hold)
	return err
}

// TryLock acquires the lock of this name if it is free.
func (l *Locker) TryLock(ctx context.Context, name string) (bool, error) {
	hold, err := l.client.TryLock(ctx, name, l.options...)
	l.keep(name, hold)
	if errors.Is(err, holdfast.ErrNotAcquired) {
		return false, ctx.Err()
	}
	return err == nil, err
}

func (l *Locker) keep(name string, hold *holdfast.Hold) {
	if hold != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.holds[name] = append(l.holds[name], hold)
	}
}

// Unlock releases the lock of this name; of several holds, the one that was acquired first. It fails if that hold was
// lost, or if this process has none.
func (l *Locker) Unlock(ctx context.Context, name string) error {
	l.mu.Lock()
	holds := l.holds[name]
	if len(holds) > 1 {
		l.holds[name] = holds[1:]
	} else {
		delete(l.holds, name)
	}
	l.mu.Unlock()
	if len(holds) == 0 {
		return notHeld(name)
	}
	return holds[0].Release(ctx)
}

// RenewLockLease restarts the lease of a held lock with this duration; of several holds, the one that was acquired last.
func (l *Locker) RenewLockLease(ctx context.Context, name string, lease time.Duration) error {
	l.mu.Lock()
	holds := l.holds[name]
	l.mu.Unlock()
	if len(holds) == 0 {
		return notHeld(name)
	}
	return holds[len(holds)-1].Renew(ctx, lease)
}

func notHeld(name string) error {
	return fmt.Errorf("holdfast: lock %s is not held by this process", name)
}
