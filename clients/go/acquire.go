package holdfast

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync/atomic"
	"time"
)

const (
	askAgain = 2 * time.Second        // a wait without a reply is repeated over another connection
	late     = 250 * time.Millisecond // how long a reply is awaited after the caller's timeout
	forever  = time.Hour              // the longest WAIT that is sent; an endless wait repeats it
	endless  = 100 * 365 * 24 * time.Hour
	pollWait = 100 * time.Millisecond // the WAIT of requests that poll
	pollEach = time.Second
)

// An acquisition is one call that requests a lock, with everything that follows until it is released or lost.
type acquisition struct {
	*request
	client   *Client
	route    *route
	began    time.Time
	until    time.Time    // the caller's time
	asked    time.Time    // when the last ACQUIRE was sent
	repeated bool         // this is not the first request, or it was queued in this client
	stale    atomic.Int32 // requests that may be at the server and whose replies were not read
	place    *pool        // the pool that counts this acquisition as a wait at its server
}

// An attempt is an ACQUIRE.
type attempt struct {
	answer
	conn  *conn
	wait  time.Duration
	short bool   // it does not wait for all of the caller's time
	ended func() // lets the next request of this client poll
}

// settle returns the connection, or closes it if no reply came. An ephemeral hold keeps the connection.
func (t *attempt) settle(reply any, err error, ephemeral bool) {
	if t.err = err; err == nil {
		t.replies = []any{reply}
	}
	if t.ended(); ephemeral && granted(reply) {
		t.pool.give()
	} else {
		t.pool.put(t.conn, t.sent, err, reply)
	}
}

// finish reads the reply that the acquisition no longer waits for. It reports whether it may have left something.
func (t *attempt) finish(deadline time.Time) bool {
	reply, err := t.conn.receive(t.pool.client.ctx, deadline)
	t.settle(reply, err, false)
	return err != nil || granted(reply)
}

func granted(reply any) bool {
	items, ok := reply.([]any)
	return ok && len(items) >= 2
}

func (c *Client) acquire(caller context.Context, names []string, wait time.Duration, options []Option) (*Hold, error) {
	r, err := c.request(names, wait, options)
	if err != nil {
		return nil, err
	}
	if caller.Err() != nil {
		return nil, notAcquired(caller, nil)
	}
	if !c.enter() {
		return nil, ErrClosed
	}
	defer c.running.Done()
	ctx, cancel := context.WithCancelCause(caller)
	defer cancel(nil)
	defer context.AfterFunc(c.closing, func() { cancel(ErrClosed) })()

	a := &acquisition{request: r, client: c, route: c.route(names[0], r.lease), began: time.Now()}
	a.route.replicas = r.replicas > 0
	if a.until = a.began.Add(r.wait); r.wait == 0 {
		a.until = a.began.Add(a.route.silence())
	} else if deadline, ok := ctx.Deadline(); ok {
		a.until = earlier(a.until, deadline)
	}
	if r.wait != 0 && r.mutex() { // only the oldest wait is at the server
		end, waited := c.takeTurn(ctx, names[0], a.until)
		if end == nil {
			return nil, notAcquired(ctx, nil)
		}
		defer end()
		a.repeated = waited
	}
	defer a.waitAt(nil)
	h, err := a.run(ctx)
	if err != nil {
		return nil, err
	}
	if handle := h.establish(caller); c.closing.Err() == nil {
		return handle, nil
	}
	return nil, ErrClosed
}

// run repeats the request until the lock is granted, refused, or the request is cancelled.
func (a *acquisition) run(ctx context.Context) (*hold, error) {
	var current *attempt // the request under way
	var last error       // why none is
	resume := a.began    // when the next may be sent
	for {
		if current == nil {
			if sleep(ctx, earlier(resume, a.until)) != nil || !time.Now().Before(a.until) {
				return nil, a.giveUp(nil, a.timeOver(ctx, last))
			}
		}
		if t := a.ask(ctx); t.err == nil {
			if current != nil { // the server moves its place in the queue to t
				a.supersede(current)
			}
			current, resume = t, t.sent.Add(askAgain+a.route.confirmation())
		} else if err := a.failed(ctx, &t.answer); err == nil {
			last, resume = t.err, t.at
		} else if current == nil {
			return nil, a.giveUp(nil, err)
		} else {
			resume = time.Now().Add(askAgain)
		}
		if current == nil {
			continue
		}

		deadline, again := a.until.Add(late), a.wait != 0 && resume.Before(a.until)
		switch {
		case a.wait == 0: // with the time that replicas have, which the first greeting tells
			deadline = a.began.Add(a.route.silence())
		case again:
			deadline = resume
		}
		reply, err := current.conn.receive(ctx, deadline)
		silent := errors.Is(err, os.ErrDeadlineExceeded)
		switch {
		case silent && again && a.place != nil:
			continue
		case silent && again: // a poll has no place in the queue that another request could take over
		case silent:
			return nil, a.giveUp(current, a.lostReply(err, a.timeOver(ctx, err)))
		case errors.Is(err, errInterrupted):
			return nil, a.giveUp(current, a.lostReply(context.Cause(ctx), notAcquired(ctx, last)))
		}
		if err == nil && reply != nil && !granted(reply) && failure(reply) == nil {
			err = fmt.Errorf("holdfast: the server answered neither a token nor nil: %v", reply)
		}
		t := current
		current = nil
		if t.settle(reply, err, a.ephemeral); err != nil {
			a.stale.Add(1)
		}
		t.answer = a.route.judged(t.answer)
		switch {
		case t.err != nil:
			if err := a.failed(ctx, &t.answer); err != nil {
				return nil, a.giveUp(nil, err)
			}
			last, resume = t.err, t.at
		case granted(reply):
			h, err := a.granted(ctx, t)
			if h != nil || err != nil {
				return h, err
			}
			resume = t.at
		case t.short && !time.Now().Before(t.sent.Add(t.wait-late)): // earlier, it was CLIENT UNBLOCK
			if resume = time.Now(); a.place == nil {
				resume = resume.Add(pollEach)
			}
		default:
			return nil, a.giveUp(nil, notAcquired(ctx, nil))
		}
	}
}

// ask sends an ACQUIRE.
func (a *acquisition) ask(ctx context.Context) *attempt {
	limit := earlier(time.Now().Add(askAgain), a.until)
	t := &attempt{ended: func() {}}
	p, asking, err := a.route.locate(ctx, limit)
	if t.pool, t.err = p, err; err != nil {
		t.answer = a.route.judged(t.answer)
		return t
	}
	if a.wait != 0 {
		t.wait = min(time.Until(a.until), forever)
		if !a.waitAt(p) { // all connections are taken by waits: poll over the others, one request at a time
			if t.wait = min(t.wait, pollWait); a.asked.IsZero() {
				t.wait = 0
			} else if t.ended, _ = a.client.takeTurn(ctx, "", limit); t.ended == nil {
				t.answer = a.route.judged(answer{pool: p, err: errNoConnection})
				return t
			}
		}
	}
	t.conn, err = p.get(ctx, forOther, a.lease, limit)
	if err == nil && (asking || a.given) {
		first := "PING" // an owner that the application chose is sent only over a connection that has just replied
		if asking {
			first = "ASKING"
		}
		began := time.Now()
		if _, err = t.conn.exchange(ctx, limit, []string{first}); err != nil {
			p.put(t.conn, began, err)
			t.conn = nil
		}
	}
	now := time.Now()
	if err == nil && !now.Before(a.until) {
		p.put(t.conn, now, nil)
		t.conn, err = nil, errNoConnection
	}
	if err == nil {
		waited := time.Duration(-1)
		if a.repeated {
			waited = now.Sub(a.began)
		}
		t.sent, a.asked, a.repeated = now, now, true
		t.short = a.wait != 0 && t.wait < a.until.Sub(now)
		if err = t.conn.send(now.Add(askAgain), a.request.acquire(t.wait, waited)); err != nil { // part of it may have arrived
			a.stale.Add(1)
		}
	}
	if err != nil {
		if t.err = err; t.conn != nil {
			t.settle(nil, err, false)
		} else {
			t.ended()
		}
		t.answer = a.route.judged(t.answer)
	}
	return t
}

// waitAt counts this acquisition among the waits at a node, if enough connections are left for other requests.
func (a *acquisition) waitAt(p *pool) bool {
	if a.place != p {
		if a.place != nil {
			a.place.freeWait()
		}
		if a.place = nil; p != nil && p.takeWait() {
			a.place = p
		}
	}
	return a.place != nil
}

// supersede lets go of a request whose place in the queue another one takes over.
func (a *acquisition) supersede(t *attempt) {
	a.stale.Add(1)
	deadline := time.Now().Add(time.Second + a.route.confirmation())
	a.client.background(func() {
		if !t.finish(deadline) {
			a.stale.Add(-1)
		}
	})
}

// failed returns the error with which the acquisition ends after a failure, or nil if it may ask again.
func (a *acquisition) failed(ctx context.Context, f *answer) error {
	switch {
	case a.given && f.lost():
		return a.lostReply(f.err, nil)
	case ctx.Err() != nil:
		return notAcquired(ctx, f.err)
	case f.passing && (a.wait != 0 || !f.at.After(time.Now())):
		return nil
	}
	var reply ServerError
	if errors.As(f.err, &reply) {
		return fmt.Errorf("holdfast: lock %s: %w", a.name(), f.err)
	}
	return f.err
}

// notAcquired is the error of an acquisition whose time is over, after the last error that it met.
func notAcquired(ctx context.Context, last error) error {
	cause := context.Cause(ctx)
	if deadline, ok := ctx.Deadline(); ok && cause == nil && time.Until(deadline) < 5*time.Millisecond {
		cause = context.DeadlineExceeded // the server's reply was a little faster than the timer of ctx
	}
	if errors.Is(cause, ErrClosed) {
		return ErrClosed
	}
	if last = errors.Join(cause, last); last == nil {
		return ErrNotAcquired
	}
	return fmt.Errorf("%w: %w", ErrNotAcquired, last)
}

// timeOver is the error of an acquisition that timed out. An attempt counts as refused only if it had a reply.
func (a *acquisition) timeOver(ctx context.Context, last error) error {
	if a.wait == 0 && last != nil && ctx.Err() == nil {
		return last
	}
	return notAcquired(ctx, last)
}

// lostReply returns err, but for an owner that the application chose, the error that its request may have been granted:
// the request is not repeated, because nil would hide that. That error does not match ErrNotAcquired.
func (a *acquisition) lostReply(cause, err error) error {
	if !a.given {
		return err
	}
	return fmt.Errorf("holdfast: the reply for owner %q was lost, and its lease may be left at the server: %w", a.owner, cause)
}

// granted makes a hold of a token. If less than half the lease is certain, a RENEW decides first; if that fails,
// granted returns nothing, and the acquisition sends another request.
func (a *acquisition) granted(ctx context.Context, t *attempt) (*hold, error) {
	items := t.replies[0].([]any)
	h := newHold(a, integer(items[0]), t.sent.Add(ms(items[1])+sure(a.lease)))
	if a.ephemeral {
		h.conn = t.conn
		h.conn.watch()
	}
	if time.Until(h.certain) >= a.lease/2 {
		return h, nil
	}
	renewed := h.send(ctx, forRenew, h.renewal())
	if renewed.err == nil && confirmed(renewed.replies[0]) {
		if h.certain = renewed.sent.Add(sure(a.lease)); time.Until(h.certain) >= a.lease/2 {
			return h, nil
		}
	}
	h.disown()
	a.stale.Add(1)
	if a.given {
		a.client.background(func() { a.discard(t) })
	}
	if a.wait == 0 {
		return nil, a.giveUp(nil, notAcquired(ctx, renewed.err))
	}
	if t.at = renewed.at; !renewed.passing { // also if it succeeded and too little is certain
		t.at = time.Now().Add(minPause)
	}
	return nil, nil
}

// giveUp ends an acquisition without the lock, and withdraws what may be left at the server.
func (a *acquisition) giveUp(current *attempt, err error) error {
	if a.given { // RELEASE ALL could release a later hold of the same owner
		if current != nil {
			a.client.background(func() {
				if current.finish(a.replyTime()); current.err == nil && granted(current.replies[0]) {
					a.discard(current)
				}
			})
		}
	} else if current != nil || a.stale.Load() > 0 {
		a.client.background(func() { a.withdraw(current) })
	}
	return err
}

// replyTime returns how long the reply to a request that was given up is awaited.
func (a *acquisition) replyTime() time.Time {
	return earlier(a.asked.Add(a.lease), time.Now().Add(askAgain+a.route.confirmation()))
}

// discard releases a grant that the application does not get. It names the token, and so meets no later hold.
func (a *acquisition) discard(t *attempt) {
	release := a.command("RELEASE", "TOKEN", strconv.FormatInt(integer(t.replies[0].([]any)[0]), 10))
	repeat(a.client.ctx, a.asked.Add(a.lease), func() answer { return a.route.do(a.client.ctx, forRelease, release) })
}

// withdraw makes sure that the owner neither waits nor holds.
func (a *acquisition) withdraw(current *attempt) {
	ctx, end := a.client.ctx, a.asked.Add(a.lease)
	defer func() {
		if current != nil {
			current.finish(time.Now())
		}
	}()
	for answers := 1; ; answers++ {
		reply := repeat(ctx, end, func() answer { return a.route.do(ctx, forRelease, a.command("RELEASE", "ALL")) })
		if reply.err != nil {
			if !reply.passing {
				a.client.config.Logger.Error("holdfast: cannot withdraw a request", "name", a.name(), "error", reply.err)
			}
			return
		}
		if t := current; t != nil {
			current = nil
			if t.finish(a.replyTime()) {
				a.stale.Add(1)
			}
			if t.err == nil && granted(t.replies[0]) { // RELEASE had overtaken the ACQUIRE
				a.stale.Add(-1)
				answers = 0
				continue
			}
		}
		if a.stale.Load() == 0 || answers == 2 || time.Until(end) < time.Second || sleep(ctx, time.Now().Add(time.Second)) != nil {
			return
		}
	}
}
