// Package gocron lets one of several gocron schedulers run each job.
package gocron

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-co-op/gocron/v2"

	"holdfast"
)

// A Locker implements [gocron.Locker]: the name of a job is the name of its lock.
type Locker struct {
	client  *holdfast.Client
	atLeast time.Duration
	options []holdfast.Option
}

var _ gocron.Locker = (*Locker)(nil)

// NewLocker returns a locker. A lock is held for at least the given time, so that a scheduler whose clock is late does
// not run a short job again. The time must be longer than the clocks differ, and shorter than the interval of the jobs.
func NewLocker(client *holdfast.Client, atLeast time.Duration, options ...holdfast.Option) *Locker {
	return &Locker{client, atLeast, options}
}

// Lock acquires the lock of a job, or fails if another scheduler holds it.
func (l *Locker) Lock(ctx context.Context, key string) (gocron.Lock, error) {
	hold, err := l.client.TryLock(ctx, key, l.options...)
	if err != nil {
		return nil, err
	}
	return &lock{hold, time.Now().Add(l.atLeast)}, nil
}

type lock struct {
	hold  *holdfast.Hold
	until time.Time
}

// Unlock releases the lock or, if it was not held for long enough yet, lets it expire after the rest of the time.
func (l *lock) Unlock(ctx context.Context) error {
	return l.hold.ReleaseAfter(ctx, max(time.Until(l.until), 0))
}

// An Elector implements [gocron.Elector]: only the scheduler that leads runs jobs.
type Elector struct {
	client *holdfast.Client
	name   string
	mu     sync.Mutex
	hold   *holdfast.Hold
}

var _ gocron.Elector = (*Elector)(nil)

// NewElector returns an elector. All schedulers of a fleet must name the same election.
func NewElector(client *holdfast.Client, name string) *Elector {
	return &Elector{client: client, name: name}
}

var errUncertain = errors.New("holdfast: it is not certain whether this scheduler leads")

// IsLeader returns nil if this scheduler leads. It stands for election if there is no leader.
func (e *Elector) IsLeader(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.hold != nil && e.hold.Held() {
		return nil
	}
	if e.hold != nil && e.hold.Context().Err() == nil { // the client will find out; until then, a try would be refused because of this hold
		return errUncertain
	}
	hold, err := e.client.TryLock(ctx, e.name, holdfast.Lease(5*time.Second))
	e.hold = hold
	return err
}

// Resign releases the lead.
func (e *Elector) Resign(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.hold == nil {
		return nil
	}
	hold := e.hold
	e.hold = nil
	return hold.Release(ctx)
}
