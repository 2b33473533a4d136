// Package holdfast acquires locks of a Redis or Valkey server with the Holdfast module.
//
// An adapter, holdfast/goredis or holdfast/rueidis, makes a [Client] from the application's Redis client, once. The
// Client opens a few connections of its own, as the application's client would.
//
//	hold, err := client.Lock(ctx, "report")
//	if err != nil {
//		return err
//	}
//	defer hold.Release(ctx)
//	return write(hold.Context(), hold.Fence())
//
// Waiters are granted the lock in the order of their requests. The client renews a lock while the process
// runs; the locks of a killed process are free when their lease ends, by default after 10 s. [Hold.Context] ends when
// the lock is lost. A process that was paused may continue before it notices the loss: whatever the lock guards should
// refuse a [Hold.Fence] that is smaller than one it has seen.
package holdfast

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Lock waits for the lock. Its error matches [ErrNotAcquired] if ctx or [Wait] ends first; the client then withdraws
// the request in the background.
func (c *Client) Lock(ctx context.Context, name string, options ...Option) (*Hold, error) {
	return c.acquire(ctx, []string{name}, endless, options)
}

// TryLock acquires the lock if it is free. Its error matches [ErrNotAcquired] if it is not.
func (c *Client) TryLock(ctx context.Context, name string, options ...Option) (*Hold, error) {
	return c.acquire(ctx, []string{name}, 0, options)
}

// LockAll waits until several locks are free and acquires them together: it holds none while it waits. In a cluster,
// their keys must be in one slot. They are renewed, lost and released together.
func (c *Client) LockAll(ctx context.Context, names []string, options ...Option) (*Hold, error) {
	return c.acquire(ctx, names, endless, options)
}

// TryLockAll acquires several locks if all are free.
func (c *Client) TryLockAll(ctx context.Context, names []string, options ...Option) (*Hold, error) {
	return c.acquire(ctx, names, 0, options)
}

// Do runs fn while it holds the lock. The context of fn ends with ctx, or when the lock is lost. Do returns the error
// of fn, joined with that of the release: a [*LostError] if the lock was lost meanwhile.
func (c *Client) Do(ctx context.Context, name string, fn func(context.Context) error, options ...Option) error {
	hold, err := c.Lock(ctx, name, options...)
	if err != nil {
		return err
	}
	return hold.run(ctx, fn)
}

// run runs fn and releases the lock, also if fn panics.
func (h *Hold) run(ctx context.Context, fn func(context.Context) error) (err error) {
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(h.ctx, func() { cancel(context.Cause(h.ctx)) })
	defer func() {
		stop()
		if failed := h.Release(ctx); failed != nil {
			err = errors.Join(err, failed)
		}
	}()
	return fn(inner)
}

// An RWLock is a lock for many readers or one writer. A reader that comes after a waiting writer waits behind it.
type RWLock struct {
	client *Client
	name   string
}

// RWLock returns the reader-writer lock of this name.
func (c *Client) RWLock(name string) *RWLock { return &RWLock{c, name} }

// Lock waits for the lock as a writer.
func (l *RWLock) Lock(ctx context.Context, options ...Option) (*Hold, error) {
	return l.client.Lock(ctx, l.name, options...)
}

// RLock waits for the lock as a reader.
func (l *RWLock) RLock(ctx context.Context, options ...Option) (*Hold, error) {
	return l.client.Lock(ctx, l.name, slices.Concat(options, []Option{Shared()})...)
}

// TryLock acquires the lock as a writer if it is free.
func (l *RWLock) TryLock(ctx context.Context, options ...Option) (*Hold, error) {
	return l.client.TryLock(ctx, l.name, options...)
}

// TryRLock acquires the lock as a reader if no writer holds it or waits for it.
func (l *RWLock) TryRLock(ctx context.Context, options ...Option) (*Hold, error) {
	return l.client.TryLock(ctx, l.name, slices.Concat(options, []Option{Shared()})...)
}

// A Semaphore is a lock that several owners hold at once.
type Semaphore struct {
	client *Client
	name   string
	limit  int
}

// Semaphore returns the semaphore of this name. All its users must name the same limit.
func (c *Client) Semaphore(name string, limit int) *Semaphore { return &Semaphore{c, name, limit} }

// Acquire waits until fewer than limit owners hold the semaphore.
func (s *Semaphore) Acquire(ctx context.Context, options ...Option) (*Hold, error) {
	return s.client.Lock(ctx, s.name, slices.Concat(options, []Option{Limit(s.limit)})...)
}

// TryAcquire acquires the semaphore if fewer than limit owners hold it.
func (s *Semaphore) TryAcquire(ctx context.Context, options ...Option) (*Hold, error) {
	return s.client.TryLock(ctx, s.name, slices.Concat(options, []Option{Limit(s.limit)})...)
}

// A Leader is the current leader, as [Client.Leader] reports it.
type Leader struct {
	Value string // as passed to Elect
	Term  int64  // the leader's fencing token; 0: there is no leader
}

// electionLease is how long a killed leader blocks the next one.
const electionLease = 5 * time.Second

// Elect waits until this process leads and runs fn with the term, a fencing token. The context of fn ends when the
// lead is lost or ctx ends. If the lead is lost, Elect waits for fn to return and stands again. Otherwise, when fn
// returns, Elect releases the lead and returns. Other processes read the value with [Client.Leader].
func (c *Client) Elect(ctx context.Context, name, value string, fn func(ctx context.Context, term int64) error, options ...Option) error {
	options = append([]Option{Lease(electionLease), Value(value)}, options...)
	for {
		hold, err := c.Lock(ctx, name, options...)
		if err != nil {
			return err
		}
		err = hold.run(ctx, func(ctx context.Context) error { return fn(ctx, hold.Fence()) })
		select {
		case <-hold.Lost(): // err may report the loss of another lock, which fn returned
		default:
			return err
		}
		if sleep(ctx, time.Now().Add(minPause)) != nil {
			return err
		}
	}
}

// Leader returns the current leader, or the zero Leader if there is none.
func (c *Client) Leader(ctx context.Context, name string) (Leader, error) {
	info, err := c.Info(ctx, name)
	if err != nil || len(info.Holders) == 0 {
		return Leader{}, err
	}
	holder := info.Holders[0]
	value := ""
	if i := strings.LastIndexByte(holder.Owner, '#'); i >= 0 {
		value = unescaped.Replace(holder.Owner[:i])
	}
	return Leader{value, holder.Token}, nil
}

// Observe calls fn with the current leader and after every change, until ctx ends or a poll fails with an error that a
// repetition would not mend, such as NOPERM. It polls once per interval, which is at least 20 ms.
func (c *Client) Observe(ctx context.Context, name string, interval time.Duration, fn func(Leader)) error {
	for last := (Leader{Term: -1}); ; {
		leader, err := c.Leader(ctx, name)
		if err != nil && verdictOf(err) < passing {
			return err
		}
		if err == nil && leader != last {
			last = leader
			fn(leader)
		}
		if err := sleep(ctx, time.Now().Add(max(interval, minPause))); err != nil {
			return err
		}
	}
}

// An Info describes a lock.
type Info struct {
	Limit   int           // how many may hold it; 0: any number, or the lock is free
	Fence   int64         // the newest token; 0 if unknown
	TTL     time.Duration // until the last lease ends
	Holders []Holder
	Waiters int // requests at the server: of each client, only its oldest one for a mutex
}

// A Holder is one of the owners that hold a lock.
type Holder struct {
	Owner string
	Token int64
	TTL   time.Duration
}

// A Waiter is a request that waits for a lock.
type Waiter struct {
	Owner  string
	Waited time.Duration
	Limit  int
}

// shown is how many holders or waiters a request asks for.
const shown = 5000

// Info describes a lock, with at most 5,000 holders. Info is zero for a lock without holders and waiters.
func (c *Client) Info(ctx context.Context, name string) (Info, error) {
	a := c.call(ctx, anyTimes, name, "LOCK.INFO", name, "COUNT", strconv.Itoa(shown))
	f := fields(a.reply())
	info := Info{Limit: int(integer(f["limit"])), Fence: integer(f["fence"]), TTL: ms(f["ttl"]), Waiters: int(integer(f["waiters"]))}
	holders, _ := f["holders"].([]any)
	for _, item := range holders {
		f := fields(item)
		info.Holders = append(info.Holders, Holder{text(f["owner"]), integer(f["token"]), ms(f["ttl"])})
	}
	return info, a.err
}

// Waiters lists the requests that wait for a lock at the server, in order, at most 5,000: of each client, only its oldest
// one for a mutex. The others wait in their client.
func (c *Client) Waiters(ctx context.Context, name string) ([]Waiter, error) {
	a := c.call(ctx, anyTimes, name, "LOCK.WAITERS", name, "COUNT", strconv.Itoa(shown))
	items, _ := a.reply().([]any)
	var waiters []Waiter
	for _, item := range items {
		f := fields(item)
		waiters = append(waiters, Waiter{text(f["owner"]), ms(f["waited"]), int(integer(f["limit"]))})
	}
	return waiters, a.err
}

// Force releases the lock for all its holders, and reports whether it was held. The holders notice the loss. If the
// reply is lost, Force returns an error: a repetition could release the lock of the next holder.
func (c *Client) Force(ctx context.Context, name string) (bool, error) {
	a := c.call(ctx, once, name, "LOCK.FORCE", name)
	return integer(a.reply()) > 0, a.err
}

// ReleaseOwner releases the hold of an owner that was set by [Owner], and reports whether the owner held the lock. A
// token of 0 means any. Without a token, it returns an error if the reply is lost: a repetition could release a later
// hold of the same owner.
func (c *Client) ReleaseOwner(ctx context.Context, name, owner string, token int64) (bool, error) {
	command, again := []string{"LOCK.RELEASE", name, owner}, once
	if token != 0 {
		command, again = append(command, "TOKEN", strconv.FormatInt(token, 10)), anyTimes
	}
	a := c.call(ctx, again, name, command...)
	return a.err == nil && (a.reply() != nil || !a.lostAt.IsZero()), a.err // nil to a repetition: an earlier request released it
}

const (
	anyTimes = true  // a command may be executed again after its reply was lost
	once     = false // it may not
)

// call sends a command, and repeats it after passing errors for at most 5 s.
func (c *Client) call(ctx context.Context, again bool, name string, command ...string) answer {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	r := &request{client: c, addr: c.config.Addr, names: []string{name}, lease: defaultLease}
	return repeat(ctx, time.Now().Add(endless), again, func() answer { return r.do(ctx, forOther, command) })
}

// fields reads a map, which RESP2 sends as a flat array.
func fields(reply any) map[string]any {
	items, _ := reply.([]any)
	f := make(map[string]any, len(items)/2)
	for i := 0; i+1 < len(items); i += 2 {
		f[text(items[i])] = items[i+1]
	}
	return f
}

func text(reply any) string { s, _ := reply.(string); return s }

func integer(reply any) int64 { n, _ := reply.(int64); return n }

func ms(reply any) time.Duration { return time.Duration(integer(reply)) * time.Millisecond }
