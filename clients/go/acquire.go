package holdfast

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"
)

const (
	askAgain = 2 * time.Second        // after so long without a reply, a wait is requested again over another connection
	late     = 250 * time.Millisecond // how long after the caller's time its call may end
	forever  = time.Hour              // the longest WAIT that is sent; an endless wait repeats it
	endless  = 100 * 365 * 24 * time.Hour
	pollEach = time.Second
	idle     = 2 * time.Second // the longest that an ephemeral hold leaves its connection idle: a server may have the setting timeout 3
)

// An acquisition is one call that requests a lock, with everything that follows until the lock is released or lost.
type acquisition struct {
	*request
	began    time.Time
	until    time.Time    // when the caller's time ends
	asked    time.Time    // when the last ACQUIRE was sent
	repeated bool         // the next ACQUIRE names WAITED: it is not the first one, or waited for its turn in this client
	unread   atomic.Int32 // how many requests may be at the server without a reply that was read
	place    *pool        // the pool that counts this acquisition as a wait at its server
	current  *attempt     // the newest request, until its reply is read
	resume   time.Time    // when the next request may be sent
	last     error        // of the last request; nil if it was granted or refused
}

// An attempt is an ACQUIRE that was sent, or could not be sent.
type attempt struct {
	answer
	conn    *conn // nil if it was not sent
	command []string
	wait    time.Duration
	end     func() // ends the turn of a request that polls
}

// granted reports whether a reply is a token and the time that the request waited. Further elements are ignored.
func granted(reply any) bool {
	items, _ := reply.([]any)
	if len(items) < 2 {
		return false
	}
	_, token := items[0].(int64)
	_, waited := items[1].(int64)
	return token && waited
}

func (c *Client) acquire(caller context.Context, names []string, wait time.Duration, options []Option) (*Hold, error) {
	r, err := c.request(names, wait, options)
	if err != nil {
		return nil, err
	}
	if !c.enter() {
		return nil, ErrClosed
	}
	defer c.running.Done()
	ctx, cancel := context.WithCancelCause(caller)
	defer cancel(nil)
	defer context.AfterFunc(c.closing, func() { cancel(ErrClosed) })()

	a := &acquisition{request: r, began: time.Now()}
	if a.until = a.began.Add(r.wait); r.wait == 0 {
		a.until = a.began.Add(a.silence())
	} else if deadline, ok := ctx.Deadline(); ok {
		a.until = earlier(a.until, deadline)
	}
	if r.wait != 0 && r.mutex() { // only this client's oldest wait for the mutex is at the server
		end, waited := c.takeTurn(ctx, names[0], a.until)
		if end == nil {
			return nil, a.notAcquired(ctx)
		}
		defer end()
		a.repeated = waited
	}
	defer a.waitAt(nil)
	h, err := a.run(ctx)
	if err != nil {
		return nil, a.giveUp(ctx, err)
	}
	if handle := h.establish(caller); c.closing.Err() == nil {
		return handle, nil
	}
	return nil, ErrClosed
}

// run requests the lock until it is granted or refused, or the caller's time is over. Each iteration pauses, sends a
// request, and reads the reply to the newest request.
func (a *acquisition) run(ctx context.Context) (*hold, error) {
	for {
		if sleep(ctx, earlier(a.resume, a.until)) != nil || !time.Now().Before(a.until) {
			return nil, a.notAcquired(ctx)
		}
		if t, former := a.ask(ctx), a.current; former == nil {
			a.current = t
		} else if t.err == nil { // the server moves the acquisition's place in the queue to t
			a.current = t
			superseded := time.Now().Add(time.Second + a.confirmation())
			a.client.background(func() { a.finish(former, superseded) })
		}
		if a.current.err == nil {
			if replied, err := a.await(ctx); err != nil {
				return nil, err
			} else if !replied {
				continue
			}
		}
		if h, err := a.decide(ctx); h != nil || err != nil {
			return h, err
		}
	}
}

// ask sends an ACQUIRE.
func (a *acquisition) ask(ctx context.Context) *attempt {
	t := &attempt{end: func() {}}
	if t.conn, t.err = a.connect(ctx, t); t.err == nil {
		now := time.Now()
		var waited time.Duration
		if a.repeated {
			waited = max(now.Sub(a.began), 1)
		}
		t.wait = min(t.wait, a.until.Sub(now))
		t.command = a.request.acquire(t.wait, waited)
		t.sent, a.asked, a.repeated = now, now, true
		a.unread.Add(1)
		_ = t.conn.SetWriteDeadline(now.Add(askAgain))
		if t.err = t.conn.send(t.command); t.err != nil { // part of it may have arrived
			a.settle(t, false)
		}
	}
	if t.err != nil {
		t.answer = a.assess(t.answer)
	}
	return t
}

// connect gets a connection for a request, and decides how long the request may wait at the server.
func (a *acquisition) connect(ctx context.Context, t *attempt) (*conn, error) {
	limit := earlier(time.Now().Add(askAgain), a.until)
	p, redirected, err := a.locate(ctx, limit)
	if t.pool = p; err != nil {
		return nil, err
	}
	if a.wait != 0 {
		t.wait = forever
		if !a.waitAt(p) { // waits have all connections that they may have: poll over the others, one request at a time
			if t.wait = 0; !a.asked.IsZero() {
				end, _ := a.client.takeTurn(ctx, polls{}, limit)
				if end == nil {
					return nil, errNoConnection
				}
				t.end, t.wait = end, a.client.pollWait()
			}
		}
	}
	c, err := p.get(ctx, forOther, a.lease, limit)
	if err == nil && (redirected || a.given) {
		first := "PING" // such a request can't be repeated: it is sent only over a connection that has just replied
		if redirected {
			first = "ASKING"
		}
		if reply := c.exchange(ctx, limit, []string{first}); reply.err != nil {
			p.put(c, reply)
			err = reply.err
		}
	}
	if err == nil && (ctx.Err() != nil || !time.Now().Before(a.until)) {
		p.put(c, answer{})
		err = errNoConnection
	}
	if err != nil {
		t.end()
	}
	return c, err
}

// await waits for the reply to the current request. It returns false if another request must take over its place in the
// queue.
func (a *acquisition) await(ctx context.Context) (replied bool, err error) {
	t := a.current
	end, repeats := a.until.Add(late), false
	if a.wait == 0 { // not a.until: the time for replicas is known only after the first connection
		end = a.began.Add(a.silence())
	} else if again := time.Now().Add(askAgain + a.confirmation()); again.Before(a.until) {
		end, repeats = again, true
	}
	if !t.conn.arrives(ctx, end) {
		switch {
		case ctx.Err() != nil:
			return false, a.notAcquired(ctx)
		case !repeats:
			a.last = errSilent
			return false, a.notAcquired(ctx)
		case a.place != nil:
			return false, nil
		}
		t.err = errSilent // a poll has no place in the queue: it failed
	}
	a.settle(t, a.ephemeral)
	t.answer = a.assess(t.answer)
	return true, nil
}

// waitAt counts this acquisition among the waits at a node, and no longer at another. It returns false if too few
// connections would be left for other requests. With nil, the acquisition is counted nowhere.
func (a *acquisition) waitAt(p *pool) bool {
	if a.place == p {
		return p != nil
	}
	if a.place != nil {
		a.place.addWaits(-1)
		a.place = nil
	}
	if p != nil && p.addWaits(1) {
		a.place = p
	}
	return a.place != nil
}

// settle reads the reply to a request, which has arrived unless the request has an error, and returns its connection to the
// pool. A request that keeps its connection takes it out of the pool if it is granted.
func (a *acquisition) settle(t *attempt, keeps bool) {
	if t.err == nil {
		t.replies, t.err = t.conn.receive(t.command)
	}
	if t.err == nil {
		a.unread.Add(-1)
	}
	t.end()
	if keeps && granted(t.reply()) {
		t.pool.give(t.conn)
	} else {
		t.pool.put(t.conn, t.answer)
	}
}

// finish waits for a reply that the acquisition does not act on. It reports whether that is a grant.
func (a *acquisition) finish(t *attempt, deadline time.Time) bool {
	if !t.conn.arrives(context.Background(), deadline) {
		t.err = errSilent
	}
	a.settle(t, false)
	return granted(t.reply())
}

// decide returns the hold, the error with which the acquisition ends, or neither if it may ask again at a.resume.
func (a *acquisition) decide(ctx context.Context) (*hold, error) {
	t := a.current
	a.current = nil
	a.last, a.resume = t.err, t.at
	now := time.Now()
	var reply ServerError
	switch {
	case granted(t.reply()):
		return a.granted(ctx, t)
	case t.err == nil && a.wait != 0 && t.wait < a.until.Sub(t.sent) && !now.Before(t.sent.Add(t.wait-late)): // nil before that is by CLIENT UNBLOCK
		if a.resume = now; a.place == nil {
			a.resume = now.Add(pollEach)
		}
		return nil, nil
	case t.err == nil, ctx.Err() != nil:
		return nil, a.notAcquired(ctx)
	case t.passing() && (a.wait != 0 || !t.at.After(now)) && !(a.given && t.lost()):
		return nil, nil
	case errors.As(t.err, &reply):
		return nil, fmt.Errorf("holdfast: lock %s: %w", a.name(), t.err)
	}
	return nil, t.err
}

// notAcquired returns the error of an acquisition that ends without the lock. It wraps the last error of the server or
// the network. A try whose last request failed was not refused: it returns that error alone.
func (a *acquisition) notAcquired(ctx context.Context) error {
	cause := endOf(ctx)
	switch deadline, ok := ctx.Deadline(); {
	case errors.Is(cause, ErrClosed):
		return ErrClosed
	case cause != nil:
	case a.wait == 0 && a.last != nil:
		return a.last
	case ok && time.Until(deadline) < 5*time.Millisecond:
		cause = context.DeadlineExceeded // the server's timer was a little faster than that of ctx
	}
	if last := errors.Join(cause, a.last); last != nil {
		return fmt.Errorf("%w: %w", ErrNotAcquired, last)
	}
	return ErrNotAcquired
}

// granted makes a hold of a token. If less than half the lease is certain, a RENEW decides first. If that fails, a try
// is not acquired; a wait gets neither a hold nor an error, and requests the lock again.
func (a *acquisition) granted(ctx context.Context, t *attempt) (*hold, error) {
	items := t.reply().([]any)
	h := newHold(a, integer(items[0]), t.sent.Add(ms(items[1])+sure(a.lease)))
	if a.ephemeral {
		a.conn = t.conn
	}
	if time.Until(h.certain) >= a.lease/2 {
		return h, nil
	}
	renewed := h.send(ctx, forRenew, h.renewal())
	if renewed.confirmed {
		if h.certain = renewed.sent.Add(sure(a.lease)); time.Until(h.certain) >= a.lease/2 {
			return h, nil
		}
	}
	h.closeConn()
	a.conn = nil
	if a.given {
		a.client.background(func() { a.discard(t) })
	} else {
		a.unread.Add(1) // the lock may be held
	}
	if a.wait == 0 {
		return nil, errors.Join(ErrNotAcquired, renewed.err)
	}
	a.resume = time.Now().Add(minPause)
	return nil, nil
}

// giveUp ends an acquisition without the lock, and withdraws requests that may still be at the server.
func (a *acquisition) giveUp(ctx context.Context, err error) error {
	if a.given && a.unread.Load() > 0 { // must not match ErrNotAcquired
		if ctx.Err() != nil {
			err = endOf(ctx)
		}
		err = fmt.Errorf("holdfast: the reply for owner %q was lost, and its lease may be left at the server: %w", a.owner, err)
	}
	if a.current != nil || a.unread.Load() > 0 {
		a.client.background(a.withdraw)
	}
	return err
}

// withdraw makes sure that the owner neither waits for the lock nor holds it.
func (a *acquisition) withdraw() {
	grantedLate := func() bool { // reads the reply to the current request
		t := a.current
		a.current = nil
		end := earlier(a.asked.Add(a.lease), time.Now().Add(askAgain+a.confirmation()))
		return t != nil && a.finish(t, end)
	}
	if t := a.current; a.given { // RELEASE ALL could release a later hold of the same owner
		if grantedLate() {
			a.discard(t)
		}
		return
	}
	for answers := 1; a.repeatRelease("ALL"); answers++ {
		if grantedLate() { // RELEASE ALL had overtaken the ACQUIRE
			answers = 0
			continue
		}
		end := a.asked.Add(a.lease)
		if a.unread.Load() == 0 || answers == 2 || time.Until(end) < time.Second || sleep(a.client.ctx, time.Now().Add(time.Second)) != nil {
			return
		}
	}
	grantedLate()
}

// discard releases a grant that the application does not get, by its token: a later hold has another one.
func (a *acquisition) discard(t *attempt) {
	a.repeatRelease("TOKEN", strconv.FormatInt(integer(t.reply().([]any)[0]), 10))
}

// repeatRelease sends a RELEASE, and repeats it until it is answered, for at most one lease after the last ACQUIRE.
func (a *acquisition) repeatRelease(terms ...string) bool {
	command := a.command("RELEASE", terms...)
	r := repeat(a.client.ctx, a.asked.Add(a.lease), anyTimes, func() answer { return a.do(a.client.ctx, forRelease, command) })
	if r.err != nil && !r.passing() {
		a.client.config.Logger.Error("holdfast: cannot withdraw a request", "name", a.name(), "error", r.err)
	}
	return r.err == nil
}
