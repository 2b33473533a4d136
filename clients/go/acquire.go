package holdfast

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"
)

const (
	askAgain = 2 * time.Second        // an unanswered wait is sent again over another connection
	late     = 250 * time.Millisecond // how long an answer is awaited when the caller's time is over
	pollWait = 100 * time.Millisecond // the WAIT of requests that poll
	pollEach = time.Second
)

// An acquisition is one call that asks for a lock, until it is granted or given up.
type acquisition struct {
	*request
	client *Client
	route  *route
	owner  string
	began  time.Time
	until  time.Time // the caller's time; zero: no end
	sent   time.Time // when the last ACQUIRE was sent
	broke  bool      // a request may be at the server whose reply will not be read
	older  []*attempt
	slot   *pool // the pool in which this acquisition may wait
	polled bool
	// repeated is true if this is not the first request, or if it waited for its turn in this client.
	repeated bool
}

// An attempt is an ACQUIRE that was sent and not yet answered.
type attempt struct {
	pool    *pool
	conn    *conn
	sent    time.Time
	ends    time.Time // when the server answers nil
	final   bool      // nil is the answer; otherwise more requests follow
	polls   bool
	asking  bool // the reply to ASKING comes first
	done    chan struct{}
	reply   any
	failure error
}

// read waits for the reply until the deadline. After a timeout it may be called again.
func (t *attempt) read(ctx context.Context, deadline time.Time) (any, error) {
	defer t.conn.interrupt(ctx, deadline)()
	if t.asking {
		if _, err := t.conn.receive(); err != nil {
			return nil, err
		}
		t.asking = false
	}
	return t.conn.receive()
}

// settle returns the connection, or closes it if no reply came. An ephemeral hold keeps the connection.
func (t *attempt) settle(reply any, err error, keep bool) {
	if t.reply, t.failure = reply, err; keep {
		t.pool.take(t.conn)
	} else {
		t.pool.put(t.conn, err, reply)
	}
	if t.polls {
		<-t.pool.client.poll
	}
	close(t.done)
}

// finish reads the reply in the background.
func (t *attempt) finish(timeout time.Duration) {
	reply, err := t.read(t.pool.client.ctx, time.Now().Add(timeout))
	t.settle(reply, err, false)
}

func (c *Client) acquire(ctx context.Context, names []string, wait time.Duration, options []Option) (*Hold, error) {
	r, err := c.request(names, wait, options)
	if err != nil {
		return nil, err
	}
	a := &acquisition{request: r, client: c, route: &route{client: c, key: names[0]}, owner: r.newOwner(), began: time.Now()}
	if r.wait >= 0 {
		a.until = a.began.Add(r.wait)
	}
	if deadline, ok := ctx.Deadline(); ok && r.wait != 0 && (r.wait < 0 || deadline.Before(a.until)) {
		a.until = deadline
	}
	if c.closing.Err() != nil {
		return nil, ErrClosed
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotAcquired, context.Cause(ctx))
	}
	values := ctx
	if r.wait != 0 {
		var cancel context.CancelCauseFunc
		ctx, cancel = context.WithCancelCause(ctx)
		defer cancel(nil)
		defer context.AfterFunc(c.closing, func() { cancel(ErrClosed) })()
	}
	if r.wait != 0 && len(names) == 1 && !r.shared && r.limit == 0 {
		turn, stop := ctx, context.CancelFunc(func() {})
		if !a.until.IsZero() {
			turn, stop = context.WithDeadline(ctx, a.until)
		}
		done, queued, err := c.takeTurn(turn, names[0])
		stop()
		if err != nil {
			return nil, notAcquired(ctx, nil)
		}
		defer done()
		a.repeated = queued
	}
	h, err := a.run(ctx)
	if a.slot != nil {
		a.slot.freeWait()
	}
	if err != nil {
		return nil, err
	}
	return h.establish(values)
}

// notAcquired is the error of an acquisition whose time is over, after the last error that it met.
func notAcquired(ctx context.Context, last error) error {
	cause := context.Cause(ctx)
	if deadline, ok := ctx.Deadline(); ok && cause == nil && time.Until(deadline) < 5*time.Millisecond {
		cause = context.DeadlineExceeded // the server's answer was a little faster than the timer of ctx
	}
	if errors.Is(cause, ErrClosed) {
		return ErrClosed
	} else if cause != nil {
		last = errors.Join(cause, last)
	}
	if last == nil {
		return ErrNotAcquired
	}
	return fmt.Errorf("%w: %w", ErrNotAcquired, last)
}

// left is what remains of the caller's time.
func (a *acquisition) left() time.Duration {
	if a.until.IsZero() {
		return forever
	}
	return time.Until(a.until)
}

// run asks until the lock is granted, refused, or given up.
func (a *acquisition) run(ctx context.Context) (*hold, error) {
	var current *attempt // the request that is under way
	var last error
	var resume time.Time // when the next request may be sent
	for first := true; ; first = false {
		if current == nil && !first {
			if !a.until.IsZero() && a.wait != 0 && resume.After(a.until) {
				resume = a.until
			}
			if sleep(ctx, resume) != nil || a.wait != 0 && a.left() <= 0 {
				return nil, a.giveUp(nil, notAcquired(ctx, last))
			}
		}
		next := time.Now().Add(askAgain)
		if current == nil || !time.Now().Before(resume) && a.left() > 0 {
			before := a.sent
			p, t, err := a.ask(ctx)
			if err != nil {
				var sent time.Time
				if a.sent != before {
					if sent = a.sent; a.given() {
						return nil, a.leftBehind(err)
					}
				}
				at, again := a.route.retryAt(p, err, sent, a.lease)
				if current == nil && (!again || ctx.Err() != nil || a.wait == 0 && time.Until(at) > 0) {
					return nil, a.giveUp(nil, a.failure(ctx, err, again))
				}
				if !again { // the request that is under way may still be answered
					at = next
				}
				last, next, resume = err, at, at
			} else {
				if current != nil { // its place in the queue is taken over
					older := current
					a.older = append(a.older, older)
					a.client.background(func() { older.finish(time.Second + a.confirmation(older.pool)) })
				}
				current, next = t, t.sent.Add(askAgain+a.confirmation(p))
			}
		}
		if current == nil {
			continue
		}
		end := a.until.Add(late)
		bounded := a.wait != 0 && !a.until.IsZero()
		if bounded && next.After(end) {
			next = end
		}
		reply, err := current.read(ctx, next)
		switch {
		case err != nil && ctx.Err() != nil, isTimeout(err) && bounded && !time.Now().Before(end):
			return nil, a.giveUp(current, notAcquired(ctx, last))
		case isTimeout(err) && a.wait == 0:
			err = fmt.Errorf("holdfast: no answer from %s: %w", current.pool.addr, err)
			if a.given() {
				err = a.leftBehind(err)
			}
			return nil, a.giveUp(current, err)
		case isTimeout(err):
			continue
		}
		t := current
		current = nil
		t.settle(reply, err, granted(reply) && a.ephemeral)
		a.broke = a.broke || err != nil
		if failure, failed := reply.(ServerError); failed {
			err = failure
		} else if err != nil && a.given() {
			return nil, a.leftBehind(err)
		}
		if err != nil {
			at, again := a.route.retryAt(t.pool, err, t.sent, a.lease)
			if !again || a.wait == 0 && time.Until(at) > 0 {
				return nil, a.giveUp(nil, a.failure(ctx, err, again))
			}
			last, resume = err, at
			continue
		}
		a.route.answered()
		if resume = time.Now(); granted(reply) {
			if h, err := a.granted(ctx, t, reply); h != nil || err != nil {
				return h, err
			}
			continue
		}
		if t.final || a.wait != 0 && a.left() <= 0 {
			return nil, a.giveUp(nil, notAcquired(ctx, nil))
		}
		if a.slot == nil {
			resume = resume.Add(pollEach)
		} else if time.Until(t.ends) > late { // CLIENT UNBLOCK answers nil early
			return nil, a.giveUp(nil, notAcquired(ctx, nil))
		}
	}
}

// given reports whether the application chose the owner: then a request must not be repeated, because nil would hide
// a grant.
func (a *acquisition) given() bool { return a.request.owner != "" }

func (a *acquisition) leftBehind(err error) error {
	return fmt.Errorf("holdfast: the reply for owner %q was lost, and its lease may be left at the server: %w", a.owner, err)
}

// failure is the error of an acquisition that cannot ask again.
func (a *acquisition) failure(ctx context.Context, err error, again bool) error {
	if ctx.Err() != nil || again && a.wait != 0 {
		return notAcquired(ctx, err)
	}
	var reply ServerError
	if errors.As(err, &reply) && reply.unknownCommand() {
		return fmt.Errorf("%w: %w", ErrModuleNotLoaded, reply)
	}
	if errors.As(err, &reply) && again {
		return fmt.Errorf("%w: %w", ErrNotAcquired, err)
	}
	return err
}

// confirmation is how much longer a request with REPLICAS may take.
func (a *acquisition) confirmation(p *pool) time.Duration {
	if a.replicas == 0 {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.confirm
}

func granted(reply any) bool {
	items, ok := reply.([]any)
	return ok && len(items) >= 2
}

// ask sends an ACQUIRE.
func (a *acquisition) ask(ctx context.Context) (*pool, *attempt, error) {
	limit := time.Now().Add(askAgain)
	if a.wait != 0 && !a.until.IsZero() && limit.After(a.until) {
		limit = a.until
	}
	p, asking, err := a.route.locate(ctx, limit)
	if err != nil {
		return nil, nil, err
	}
	wait, polls, final := time.Duration(0), false, a.wait == 0
	if a.wait != 0 {
		if a.slot != nil && a.slot != p {
			a.slot.freeWait()
			a.slot = nil
		}
		if a.slot == nil && p.takeWait() {
			a.slot = p
		}
		final = a.slot != nil && a.left() < forever
		if wait = min(a.left(), forever); a.slot == nil {
			if polls = a.polled; polls {
				select {
				case a.client.poll <- struct{}{}:
				case <-ctx.Done():
					return p, nil, context.Cause(ctx)
				case <-time.After(time.Until(limit)):
					return p, nil, errNoConnection
				}
			}
			wait, a.polled = min(wait, pollWait), true
		}
	}
	c, err := p.get(ctx, forOther, a.lease, limit)
	if err == nil && a.given() { // only over a connection that has just answered
		if _, err = c.exchange(ctx, limit, []string{"PING"}); err != nil {
			p.put(c, err)
		}
	}
	if err == nil && a.wait != 0 && a.left() <= 0 {
		p.put(c, nil)
		err = errNoConnection
	}
	if err != nil {
		if polls {
			<-a.client.poll
		}
		return p, nil, err
	}
	t := &attempt{pool: p, conn: c, sent: time.Now(), final: final, polls: polls, asking: asking, done: make(chan struct{})}
	t.ends = t.sent.Add(wait)
	commands := [][]string{a.command("ACQUIRE", a.owner, a.terms(t.sent, wait, polls)...)}
	a.sent, a.repeated = t.sent, true
	if asking {
		commands = append([][]string{{"ASKING"}}, commands...)
	}
	if err = c.send(t.sent.Add(askAgain), commands...); err != nil { // part of it may have arrived
		a.broke = true
		t.settle(nil, err, false)
		return p, nil, err
	}
	return p, t, nil
}

// terms are the options of an ACQUIRE that is sent now.
func (a *acquisition) terms(now time.Time, wait time.Duration, polls bool) []string {
	terms := make([]string, 0, 16)
	if a.given() {
		terms = append(terms, "NEW")
	} else {
		terms = append(terms, "HOLDS", "1")
	}
	terms = append(terms, "LEASE", millis(a.lease))
	if wait > 0 && (a.slot != nil || polls) {
		terms = append(terms, "WAIT", millis(wait))
		if waited := now.Sub(a.began); a.repeated {
			terms = append(terms, "WAITED", millis(waited))
		}
	}
	return append(append(terms, a.options()...), "WITHWAITED")
}

func (r *request) options() (terms []string) {
	if r.limit > 0 {
		terms = append(terms, "LIMIT", strconv.Itoa(r.limit))
	}
	if r.shared {
		terms = append(terms, "SHARED")
	}
	if r.ephemeral {
		terms = append(terms, "EPHEMERAL")
	}
	if r.replicas > 0 {
		terms = append(terms, "REPLICAS", strconv.Itoa(r.replicas))
	}
	return terms
}

// granted makes a hold of a token. If less than half the lease is certain, a RENEW decides first; if that says that
// the lock is no longer held, granted returns nothing, and the acquisition asks again.
func (a *acquisition) granted(ctx context.Context, t *attempt, reply any) (*hold, error) {
	items := reply.([]any)
	h := &hold{request: a.request, client: a.client, route: a.route, owner: a.owner, token: integer(items[0]), index: -1,
		acquired: time.Now(), waited: time.Since(a.began), lost: make(chan struct{}), ended: make(chan struct{})}
	h.length.Store(int64(a.lease))
	h.broke.Store(a.broke)
	h.certain = t.sent.Add(time.Duration(integer(items[1]))*time.Millisecond + sure(a.lease))
	for _, older := range a.older {
		select {
		case <-older.done:
			if older.failure != nil {
				h.broke.Store(true)
			}
		default:
			h.broke.Store(true)
		}
	}
	if a.ephemeral {
		h.own(t.conn)
	}
	for asked := false; time.Until(h.certain) < a.lease/2; asked = true {
		over := a.wait == 0 && asked || a.wait != 0 && a.left() <= 0
		err := sleep(ctx, t.pool.failed(t.sent, a.lease))
		if err == nil && !over {
			p, replies, sent, failure := h.send(ctx, forRenew, h.renewal())
			if failure == nil && h.confirmed(replies[0]) {
				h.certain = sent.Add(sure(a.lease))
				continue
			}
			if failure == nil && a.wait != 0 {
				h.disown()
				return nil, nil
			}
			if err = failure; err != nil {
				if at, again := a.route.retryAt(p, err, sent, a.lease); again && a.wait != 0 && sleep(ctx, at) == nil {
					continue
				}
			}
		}
		h.disown()
		a.broke = h.broke.Load()
		a.withdraw(nil)
		return nil, notAcquired(ctx, err)
	}
	return h, nil
}

// giveUp ends an acquisition without the lock, and withdraws what may be left at the server.
func (a *acquisition) giveUp(current *attempt, err error) error {
	for _, older := range a.older {
		select {
		case <-older.done:
			a.broke = a.broke || older.failure != nil || granted(older.reply)
		default:
			a.broke = true
		}
	}
	if current != nil || a.broke {
		a.withdraw(current)
	}
	return err
}

// withdraw makes sure, in the background, that the owner neither waits nor holds.
func (a *acquisition) withdraw(current *attempt) {
	if a.given() { // ALL could release a later hold of the same owner
		if current != nil {
			a.client.background(func() { current.finish(a.lease) })
		}
		return
	}
	a.client.background(func() {
		ctx, end := a.client.ctx, a.sent.Add(a.lease)
		if current != nil {
			a.client.background(func() { current.finish(time.Until(end)) })
		}
		for answers := 0; ; {
			p, _, sent, err := a.route.do(ctx, forRelease, a.lease, silence(a.lease), a.command("RELEASE", a.owner, "ALL"))
			if err != nil {
				at, again := a.route.retryAt(p, err, sent, a.lease)
				if !again {
					a.client.config.Logger.Error("holdfast: cannot withdraw a request", "name", a.name(), "error", err)
				}
				if !again || at.After(end) || sleep(ctx, at) != nil {
					return
				}
				continue
			}
			a.route.answered()
			if current != nil {
				select {
				case <-current.done:
				case <-ctx.Done():
					return
				}
				if a.broke = a.broke || current.failure != nil; granted(current.reply) {
					current = nil // RELEASE had overtaken the ACQUIRE
					continue
				}
				current = nil
			}
			if answers++; !a.broke || answers == 2 || time.Until(end) < time.Second || sleep(ctx, time.Now().Add(time.Second)) != nil {
				return
			}
		}
	})
}
