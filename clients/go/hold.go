package holdfast

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"sync/atomic"
	"time"
)

// A hold is a lock that was granted. Its mutable fields are guarded by the client's mu.
type hold struct {
	*request
	client   *Client
	route    *route
	owner    string
	token    int64
	broke    atomic.Bool  // a connection broke under one of its commands: a stale ACQUIRE may take the lock again
	length   atomic.Int64 // the lease, which Renew may change
	acquired time.Time
	waited   time.Duration
	ctx      context.Context
	cancel   context.CancelCauseFunc
	lost     chan struct{}
	ended    chan struct{} // closed when the release has its outcome
	outcome  error
	dropped  atomic.Bool   // the application can no longer reach it
	conn     *conn         // of an ephemeral hold
	replies  chan any      // that arrive on conn
	broken   chan struct{} // closed when conn has ended
	using    chan struct{} // taken by the request under way on conn

	state    state
	reason   Reason
	certain  time.Time // no other client holds the lock before
	renewing bool
	due      time.Time
	slack    time.Duration
	index    int // in the schedule
}

type state int

const (
	held state = iota
	releasing
	gone
)

// A Hold is a lock that this process holds. Its methods are safe for concurrent use.
//
// The client renews it until it is released or lost, whether or not the application still refers to it: a Hold is
// never released by the garbage collector.
type Hold struct{ *hold }

// sure is the part of a lease that clocks of different speeds leave.
func sure(lease time.Duration) time.Duration { return lease / 100 * 99 }

// establish hands a hold to the application.
func (h *hold) establish(ctx context.Context) (*Hold, error) {
	h.ctx, h.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	c := h.client
	c.mu.Lock()
	closing := c.closing.Err() != nil
	if due, slack := h.renewAt(time.Now()); !closing {
		c.attend(h, due, slack)
	}
	c.mu.Unlock()
	if closing {
		c.background(func() { _ = h.end(c.ctx, 0) })
		return nil, ErrClosed
	}
	if hook := c.config.Hooks.Acquired; hook != nil {
		hook(h.name(), h.waited)
	}
	if h.conn != nil {
		c.background(func() {
			select {
			case <-h.broken:
				h.lose(ReasonDisconnected)
			case <-h.ctx.Done():
			}
		})
	}
	handle := &Hold{h}
	runtime.AddCleanup(handle, func(dropped *atomic.Bool) { dropped.Store(true) }, &h.dropped)
	return handle, nil
}

// renewAt says when a hold that was confirmed at this time needs attention.
func (h *hold) renewAt(sent time.Time) (due time.Time, slack time.Duration) {
	if at := sent.Add(h.leased() / 4); !h.manual && at.Before(h.certain) {
		return at, h.leased() / 64
	}
	return h.certain, 0
}

// Fence returns the fencing token. It is greater than that of every earlier hold of this lock: whatever the lock
// guards can refuse a smaller one.
func (h *Hold) Fence() int64 { return h.token }

// Name returns the lock's name; several names are joined by commas.
func (h *Hold) Name() string { return h.name() }

// Owner returns what identifies this acquisition at the server.
func (h *Hold) Owner() string { return h.owner }

// Context returns a context that ends when the lock is lost or released. If it is lost, [context.Cause] is a
// [*LostError]. It carries the values of the context that the lock was acquired with, but not its end.
func (h *Hold) Context() context.Context { return h.ctx }

// Lost returns a channel that is closed if the lock is lost.
func (h *Hold) Lost() <-chan struct{} { return h.lost }

// Remaining returns for how long the lock is certainly held without another renewal; 0 if it is not held.
func (h *Hold) Remaining() time.Duration {
	h.client.mu.Lock()
	defer h.client.mu.Unlock()
	if h.state != held {
		return 0
	}
	now := time.Now()
	left := min(h.certain.Sub(now), h.certain.Round(0).Sub(now.Round(0))) // the wall clock goes on during suspend
	if left <= 0 && now.Before(h.certain) && !h.manual {
		h.client.attend(h.hold, now, 0)
	}
	return max(left, 0)
}

// Held reports whether the lock is certainly held, without asking the server.
func (h *Hold) Held() bool { return h.Remaining() > 0 }

// Check asks the server whether it still holds the lock for this owner. It lengthens nothing, and returns a
// [*LostError] if the lock is lost.
func (h *Hold) Check(ctx context.Context) error {
	if err := h.failure(); err != nil {
		return err
	}
	for _, name := range h.names {
		info, err := h.client.Info(ctx, name)
		if err != nil {
			return err
		}
		held := false
		for _, holder := range info.Holders {
			held = held || holder.Owner == h.owner && holder.Token == h.token
		}
		if !held && h.failure() == nil {
			h.lose(ReasonGone)
		}
	}
	return h.failure()
}

// failure is nil while the lock is held.
func (h *hold) failure() error {
	h.client.mu.Lock()
	defer h.client.mu.Unlock()
	switch {
	case h.reason != "":
		return &LostError{h.name(), h.reason}
	case h.state != held:
		return fmt.Errorf("holdfast: lock %s was released", h.name())
	}
	return nil
}

// lose ends a hold that the server no longer has. The application is told once.
func (h *hold) lose(reason Reason) {
	c := h.client
	c.mu.Lock()
	if h.state != held {
		c.mu.Unlock()
		return
	}
	h.state, h.reason = gone, reason
	c.forget(h)
	c.mu.Unlock()
	h.cancel(&LostError{h.name(), reason})
	close(h.lost)
	h.disown()
	if hook := c.config.Hooks.Lost; hook != nil {
		go hook(h.name(), reason)
	}
	if len(h.names) > 1 { // the others are still held
		c.background(func() { _, _, _, _ = h.send(c.ctx, forRelease, h.release()...) })
	}
}

// forget takes a hold out of the schedule. The caller holds c.mu.
func (c *Client) forget(h *hold) {
	if h.index >= 0 {
		heap.Remove(&c.holds, h.index)
	}
}

func (h *hold) leased() time.Duration { return time.Duration(h.length.Load()) }

// renewal returns the command that begins the lease anew.
func (h *hold) renewal() []string {
	terms := []string{"TOKEN", strconv.FormatInt(h.token, 10), "LEASE", millis(h.leased())}
	if h.replicas > 0 {
		terms = append(terms, "REPLICAS", strconv.Itoa(h.replicas))
	}
	return h.command("RENEW", h.owner, terms...)
}

// release returns the commands that release the lock. The reply to the first is the verdict.
func (h *hold) release() [][]string {
	commands := [][]string{h.command("RELEASE", h.owner, "TOKEN", strconv.FormatInt(h.token, 10))}
	if h.broke.Load() && h.request.owner == "" {
		commands = append(commands, h.command("RELEASE", h.owner, "ALL"))
	}
	return commands
}

// confirmed reports whether a reply to RENEW or RELEASE is positive for every name.
func (h *hold) confirmed(reply any) bool {
	items, several := reply.([]any)
	if !several {
		return reply != nil
	}
	for _, item := range items {
		if item == nil {
			return false
		}
	}
	return true
}

// silence is how long a request about this hold may stay unanswered.
func (h *hold) silence() time.Duration {
	timeout := silence(h.leased())
	if h.replicas > 0 {
		p := h.client.pool(h.route.current())
		p.mu.Lock()
		defer p.mu.Unlock()
		timeout += p.confirm
	}
	return timeout
}

// send sends commands about this hold, over its own connection if it is ephemeral.
func (h *hold) send(ctx context.Context, class priority, commands ...[]string) (p *pool, replies []any, sent time.Time, err error) {
	if h.conn == nil {
		return h.route.do(ctx, class, h.leased(), h.silence(), commands...)
	}
	p, sent = h.client.pool(h.route.current()), time.Now()
	deadline := time.NewTimer(h.silence())
	defer deadline.Stop()
	select {
	case h.using <- struct{}{}:
		defer func() { <-h.using }()
	case <-deadline.C:
		return p, nil, time.Time{}, errNoConnection
	}
	if err = h.conn.send(sent.Add(h.silence()), commands...); err != nil {
		return p, nil, sent, err
	}
	for range commands {
		select {
		case reply := <-h.replies:
			replies = append(replies, reply)
		case <-h.broken:
			return p, nil, sent, errors.New("holdfast: the lock's connection broke")
		case <-deadline.C: // its reply must not be read as that of another command
			h.disown()
			return p, nil, sent, context.DeadlineExceeded
		}
	}
	if failure, failed := replies[0].(ServerError); failed {
		err = failure
	}
	return p, replies, sent, err
}

// own makes c the connection of an ephemeral hold, and reads its replies.
func (h *hold) own(c *conn) {
	h.conn, h.replies, h.broken, h.using = c, make(chan any, 4), make(chan struct{}), make(chan struct{}, 1)
	_ = c.SetReadDeadline(time.Time{})
	h.client.background(func() {
		defer close(h.broken)
		for {
			reply, err := c.receive()
			if err != nil {
				return
			}
			h.replies <- reply
		}
	})
}

// disown closes the connection of an ephemeral hold.
func (h *hold) disown() {
	if h.conn != nil {
		_ = h.conn.Close()
	}
}

// renew sends the renewals of holds at one node in one pipeline.
func (c *Client) renew(addr string, holds ...*hold) {
	commands := make([][]string, len(holds))
	lease := holds[0].lease
	for i, h := range holds {
		commands[i] = h.renewal()
		if lease = min(lease, h.leased()); h.dropped.CompareAndSwap(true, false) {
			c.config.Logger.Warn("holdfast: a Hold was dropped without a release; it is renewed until the client closes", "name", h.name())
		}
	}
	var p *pool
	var replies []any
	var sent time.Time
	var err error
	if h := holds[0]; len(holds) == 1 {
		p, replies, sent, err = h.send(c.ctx, forRenew, commands...)
		if len(replies) > 0 { // an error reply is judged below, and leaves the connection good
			err = nil
		}
	} else {
		p = c.pool(addr)
		replies, sent, err = p.do(c.ctx, forRenew, lease, silence(lease), commands...)
	}
	for i, h := range holds {
		var reply any
		if err == nil {
			reply = replies[i]
		}
		h.renewed(p, reply, sent, err)
	}
}

// renewed judges the reply to a RENEW of the timer.
func (h *hold) renewed(p *pool, reply any, sent time.Time, err error) {
	failure, failed := reply.(ServerError)
	if failed {
		err = failure
	}
	lost := err == nil && !h.confirmed(reply)
	var at time.Time
	if err == nil {
		h.route.answered()
	} else {
		if !failed && !sent.IsZero() {
			h.broke.Store(true)
		}
		if at, _ = h.route.retryAt(p, err, sent, h.leased()); at.IsZero() {
			at = time.Now().Add(min(maxPause, h.leased()/16))
		}
	}
	c := h.client
	c.mu.Lock()
	h.renewing = false
	if h.state == held && !lost {
		if err == nil {
			h.certain = later(h.certain, sent.Add(sure(h.leased())))
			due, slack := h.renewAt(sent)
			c.attend(h, due, slack)
		} else if at.Before(h.certain) {
			c.attend(h, at, 0)
		}
	}
	c.mu.Unlock()
	if lost {
		h.lose(ReasonGone)
	} else if failed && failure.Code() == "WRONGTYPE" {
		h.lose(ReasonChanged)
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// Renew begins the lease anew, with another length if lease is not 0. It returns a [*LostError] if the lock is lost.
// Without [NoRenew], the client renews by itself.
func (h *Hold) Renew(ctx context.Context, lease time.Duration) error {
	c := h.client
	for {
		c.mu.Lock()
		busy := h.renewing // replies of two renewals with different leases could arrive in the wrong order
		if !busy && h.state == held {
			h.renewing = true
			if lease > 0 {
				h.length.Store(int64(lease))
			}
			if short := time.Now().Add(sure(h.leased())); short.Before(h.certain) {
				h.certain = short
			}
			c.attend(h.hold, h.certain, 0)
		}
		c.mu.Unlock()
		if err := h.failure(); err != nil {
			return err
		}
		if busy {
			if err := sleep(ctx, time.Now().Add(time.Millisecond)); err != nil {
				return err
			}
			continue
		}
		p, replies, sent, err := h.send(ctx, forRenew, h.renewal())
		var reply any
		if len(replies) > 0 {
			reply = replies[0]
		}
		h.renewed(p, reply, sent, err)
		if lost := h.failure(); err == nil || lost != nil {
			return lost
		}
		at, again := h.route.retryAt(p, err, time.Time{}, h.leased())
		if !again {
			return err
		}
		if end := sleep(ctx, at); end != nil {
			return errors.Join(end, err)
		}
	}
}

// Release releases the lock. It returns a [*LostError] if the lock had been lost. If ctx ends first, it returns the
// cause, and the release goes on in the background. To release twice is harmless: the outcome is the same.
func (h *Hold) Release(ctx context.Context) error { return h.end(ctx, 0) }

// ReleaseAfter stops renewing and lets the lock expire after d: for jobs that must not run twice in that time.
func (h *Hold) ReleaseAfter(ctx context.Context, d time.Duration) error { return h.end(ctx, d) }

// end releases the hold, or lets it expire after rest.
func (h *hold) end(ctx context.Context, rest time.Duration) error {
	c := h.client
	c.mu.Lock()
	first, lost := h.state == held, h.reason != ""
	if h.state != gone {
		h.state = releasing
	} else if lost && h.outcome == nil {
		first = true
	}
	begun := h.outcome
	if lost && first {
		h.outcome = &LostError{h.name(), h.reason}
	}
	c.forget(h)
	c.mu.Unlock()
	if lost {
		if first && begun == nil {
			c.background(func() { _, _, _, _ = h.send(c.ctx, forRelease, h.release()...) })
		}
		return h.outcome
	}
	if first {
		r := &releaser{hold: h, until: time.Now().Add(h.leased()), commands: h.release()}
		if rest > 0 {
			token := strconv.FormatInt(h.token, 10)
			fence := strconv.FormatInt(h.token+1, 10) // a late renewal finds another token
			terms := []string{"TOKEN", token, "FENCE", fence, "LEASE", millis(rest)}
			if h.ephemeral {
				terms = append(terms, "UNBIND")
			}
			r.keeps, r.commands = true, [][]string{h.command("RENEW", h.owner, terms...)}
		}
		if ctx.Err() != nil || !r.run(ctx) {
			c.background(func() { r.run(c.ctx) })
		}
	}
	select {
	case <-h.ended:
		return h.outcome
	default:
	}
	select {
	case <-h.ended:
		return h.outcome
	case <-ctx.Done():
		return fmt.Errorf("holdfast: lock %s is being released in the background: %w", h.name(), context.Cause(ctx))
	}
}

// A releaser repeats a release it has an outcome.
type releaser struct {
	*hold
	commands [][]string
	keeps    bool // the lock stays until its lease ends
	until    time.Time
	tried    bool // a request was sent whose reply was lost
	certain  bool // the lock was certainly held when the first of them was sent
}

// run repeats the release until it has an outcome. It returns false if ctx ends first.
func (r *releaser) run(ctx context.Context) bool {
	c := r.client
	for {
		c.mu.Lock()
		certain := time.Now().Before(r.hold.certain)
		c.mu.Unlock()
		p, replies, sent, err := r.send(ctx, forRelease, r.commands...)
		reason := ReasonGone
		if failure := ServerError(""); errors.As(err, &failure) && failure.Code() == "WRONGTYPE" {
			reason = ReasonChanged
		}
		if err == nil || reason == ReasonChanged {
			r.route.answered()
			if err == nil && r.confirmed(replies[0]) || r.tried && r.certain && !r.keeps {
				r.finish(nil, "")
			} else {
				r.finish(&LostError{r.name(), reason}, reason)
			}
			return true
		}
		answered := len(replies) > 0 // with an error reply
		if !answered && !sent.IsZero() {
			if !r.tried {
				r.tried, r.certain = true, certain
			}
			if r.broke.Store(true); !r.keeps {
				r.commands = r.release()
			}
		}
		if ctx.Err() != nil && c.ctx.Err() == nil {
			return false
		}
		at, again := r.route.retryAt(p, err, sent, r.leased())
		if r.conn != nil && !answered { // the server releases it when it sees the connection end
			r.disown()
			again = false
		}
		if !again || at.After(r.until) || c.ctx.Err() != nil {
			r.finish(fmt.Errorf("holdfast: cannot release lock %s: %w", r.name(), err), "")
			return true
		}
		if sleep(ctx, at) != nil && c.ctx.Err() == nil {
			return false
		}
	}
}

func (r *releaser) finish(err error, reason Reason) {
	c := r.client
	c.mu.Lock()
	r.state, r.outcome, r.reason = gone, err, reason
	c.mu.Unlock()
	if reason == "" {
		r.cancel(nil)
		if hook := c.config.Hooks.Released; hook != nil {
			hook(r.name(), time.Since(r.acquired))
		}
	} else {
		r.cancel(err)
		close(r.lost)
		if hook := c.config.Hooks.Lost; hook != nil {
			go hook(r.name(), reason)
		}
	}
	close(r.ended)
	r.disown()
}
