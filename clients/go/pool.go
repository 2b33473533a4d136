package holdfast

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	protocol       = 4 // the version of the protocol that this client speaks
	minPause       = 20 * time.Millisecond
	maxPause       = time.Second
	connectTimeout = 2 * time.Second      // includes Setup and LOCK.VERSION
	reserved       = 2                    // connections that waits leave free
	gather         = 5 * time.Millisecond // how long a renewal waits for others that share its pipeline
)

// priority orders the requests that wait for a connection. Requests of one priority are served in order of arrival.
type priority int

const (
	forTimer priority = iota // renewals of the timer, which share pipelines
	forRenew
	forRelease
	forOther
)

// A pool holds the connections to one node, and the pause after the node's failures, which all requests share.
type pool struct {
	client *Client
	addr   string

	mu       sync.Mutex
	conns    map[*conn]bool // idle and busy; an ephemeral hold keeps its own
	idle     []*conn        // used last in, first out
	opening  int
	waits    int            // acquisitions that may wait at the server
	queue    []*waiter      // by priority
	proven   bool           // no connection has failed since one was opened; otherwise, one attempt to connect at a time
	failedAt time.Time      // when the last failure was noted
	pause    time.Duration  // how long it lasts after failedAt
	timer    *time.Timer    // opens a connection after the pause
	confirm  time.Duration  // the server's replicas-timeout
	renewals []timedRenewal // gathered for the next pipeline
}

// A waiter is a request that waits for a connection.
type waiter struct {
	class priority
	lease time.Duration
	ready chan struct{} // closed when conn or err is set
	conn  *conn
	err   error
}

// An answer is the outcome of a request.
type answer struct {
	pool      *pool
	sent      time.Time // zero: nothing was written
	replies   []any     // to all commands; none if one is missing
	err       error     // of the connection, or an error reply
	verdict   verdict   // of err
	at        time.Time // when the request may be repeated, if the verdict allows that
	confirmed bool      // of a request about a hold: the reply is positive for every name
	lostAt    time.Time // when the first request was sent whose reply was lost; zero if there was none
}

// reply returns the reply to the first command, or nil.
func (a answer) reply() any {
	if len(a.replies) == 0 {
		return nil
	}
	return a.replies[0]
}

// passing reports whether the request failed and may be repeated.
func (a answer) passing() bool { return a.err != nil && a.verdict >= passing }

// lost reports whether the request was written, and its reply was not read.
func (a answer) lost() bool { return !a.sent.IsZero() && len(a.replies) == 0 }

// get returns a connection. It fails with errNoConnection if none is free in time, and with the error of the attempt if
// connecting fails.
func (p *pool) get(ctx context.Context, class priority, lease time.Duration, deadline time.Time) (*conn, error) {
	p.mu.Lock()
	if c := p.pop(); c != nil || p.closed() {
		p.mu.Unlock()
		if c == nil {
			return nil, ErrClosed
		}
		return c, nil
	}
	w := &waiter{class: class, lease: lease, ready: make(chan struct{})}
	i := len(p.queue)
	for i > 0 && p.queue[i-1].class > class {
		i--
	}
	p.queue = slices.Insert(p.queue, i, w)
	p.serve()
	p.mu.Unlock()
	if wait(ctx, deadline, w.ready) {
		return w.conn, w.err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.queue, w); i >= 0 {
		p.queue = slices.Delete(p.queue, i, i+1)
		return nil, errNoConnection
	}
	return w.conn, w.err // served at the same moment
}

// pop takes an idle connection that is not dead, or returns nil.
func (p *pool) pop() *conn {
	for n := len(p.idle); n > 0; n = len(p.idle) {
		c := p.idle[n-1]
		p.idle = p.idle[:n-1]
		if !c.dead() {
			return c
		}
		p.proven = false
		p.drop(c)
	}
	return nil
}

func (p *pool) drop(c *conn) {
	delete(p.conns, c)
	_ = c.Close()
}

// serve hands idle connections to waiting requests, and opens as many as are missing.
func (p *pool) serve() {
	for len(p.queue) > 0 {
		w := p.queue[0]
		if w.conn = p.pop(); w.conn == nil {
			break
		}
		close(w.ready)
		p.queue = p.queue[1:]
	}
	lease := p.client.config.Lease
	for _, w := range p.queue {
		lease = min(lease, w.lease)
	}
	for p.opening < len(p.queue) && len(p.conns)+p.opening < p.client.config.MaxConnections && (p.proven || p.opening == 0) {
		if wait := time.Until(p.resumeAt(lease)); !p.proven && wait > 0 {
			if p.timer != nil {
				p.timer.Stop()
			}
			p.timer = time.AfterFunc(wait, func() { p.mu.Lock(); defer p.mu.Unlock(); p.serve() })
			return
		}
		p.opening++
		go p.connect()
	}
}

// connect opens a connection. All requests that wait for one share the attempt's failure.
func (p *pool) connect() {
	p.client.closeDead()
	ctx, cancel := context.WithTimeout(p.client.ctx, connectTimeout)
	defer cancel()
	began := time.Now()
	var ended atomic.Bool
	done := func(c *conn, err error) {
		if ended.CompareAndSwap(false, true) {
			p.connected(c, began, err)
		} else if c != nil {
			_ = c.Close()
		}
	}
	defer context.AfterFunc(ctx, func() { // Dial and Setup may ignore ctx
		done(nil, fmt.Errorf("holdfast: connect to %s: %w", p.addr, os.ErrDeadlineExceeded))
	})()
	done(p.dial(ctx))
}

func (p *pool) connected(c *conn, began time.Time, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.opening--
	if err != nil {
		p.proven = false
		p.fail(began)
		p.refuse(err)
		return
	}
	if p.closed() {
		_ = c.Close()
		return
	}
	p.conns[c] = true
	p.proven = true
	p.idle = append(p.idle, c)
	p.serve()
}

// refuse fails all requests that wait for a connection.
func (p *pool) refuse(err error) {
	for _, w := range p.queue {
		w.err = err
		close(w.ready)
	}
	p.queue = nil
}

// dial opens a connection, sends its first commands, and asks for the module's version: a server may accept connections
// without replying, and each connection may reach another server.
func (p *pool) dial(ctx context.Context) (*conn, error) {
	socket, err := p.client.config.Dial(ctx, p.addr)
	if err != nil {
		return nil, err
	}
	c := newConn(socket, p)
	if err = p.prepare(ctx, c); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

func (p *pool) prepare(ctx context.Context, c *conn) error {
	setup, err := p.client.config.Setup(ctx, c.RemoteAddr())
	if err != nil {
		return err
	}
	a := c.exchange(ctx, time.Now().Add(connectTimeout), append(slices.Clone(setup), []string{"LOCK.VERSION"})...)
	if a.err != nil {
		return a.err
	}
	for i, command := range setup {
		if err := failure(a.replies[i]); err != nil && command[0] != "CLIENT" {
			return err
		}
	}
	reply := a.replies[len(setup)]
	var refusal ServerError
	if err := failure(reply); errors.As(err, &refusal) && refusal.Code() == "NOPERM" {
		return nil // a user with few rights may call LOCK.INFO, for example
	} else if errors.Is(err, ErrModuleNotLoaded) {
		known := c.exchange(ctx, time.Now().Add(connectTimeout), []string{"LOCK.ACQUIRE"})
		if errors.Is(failure(known.reply()), ErrModuleNotLoaded) {
			return err
		}
		return fmt.Errorf("%w: it does not know LOCK.VERSION, this client speaks protocol %d", ErrServerTooOld, protocol)
	} else if err != nil {
		return err
	}
	version := fields(reply)
	speaks, _ := version["protocol"].([]any)
	switch {
	case len(speaks) < 2 || integer(speaks[1]) < protocol:
		err = ErrServerTooOld
	case integer(speaks[0]) > protocol:
		err = ErrClientTooOld
	default:
		p.mu.Lock()
		defer p.mu.Unlock()
		p.confirm = ms(version["replicas-timeout"])
		return nil
	}
	return fmt.Errorf("%w: module %v speaks protocols %v, this client %d", err, version["version"], speaks, protocol)
}

// put returns a connection to the pool after a request, or closes it if the answer has an error of the connection. The
// answer is zero if nothing was sent.
func (p *pool) put(c *conn, a answer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed():
		p.drop(c)
	case a.err != nil:
		p.drop(c)
		if verdictOf(a.err) == broken {
			p.proven = false
			if !c.used || errors.Is(a.err, os.ErrDeadlineExceeded) { // otherwise the connection may have ended while it was idle
				p.fail(a.sent)
			}
		}
	default:
		c.used = c.used || len(a.replies) > 0
		if len(a.replies) > 0 && !slices.ContainsFunc(a.replies, func(reply any) bool { return failure(reply) != nil }) {
			p.pause, p.failedAt = 0, time.Time{}
		}
		if p.conns[c] {
			p.idle = append(p.idle, c)
		}
	}
	p.serve()
}

// give hands a connection over to an ephemeral hold.
func (p *pool) give(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
	p.serve()
}

// fail notes that an attempt that began at this time failed. The pause doubles once for each outage, however many
// requests fail in it.
func (p *pool) fail(began time.Time) {
	if began.After(p.failedAt) {
		p.pause = min(max(2*p.pause, minPause), maxPause)
		p.failedAt = time.Now()
	}
}

// resumeAt returns when the pause is over for a request with this lease.
func (p *pool) resumeAt(lease time.Duration) time.Time {
	pause := min(p.pause, max(lease/16, time.Millisecond))
	return p.failedAt.Add(pause - rand.N(pause/4+1)) //nolint:gosec // jitter needs no secrecy
}

// A timedRenewal is a RENEW that waits for the next pipeline.
type timedRenewal struct {
	ctx      context.Context
	lease    time.Duration
	deadline time.Time
	command  []string
	answer   chan answer
}

// renew sends a RENEW in one pipeline with others that are due within a few milliseconds.
func (p *pool) renew(ctx context.Context, lease time.Duration, deadline time.Time, command []string) answer {
	r := timedRenewal{ctx, lease, deadline, command, make(chan answer, 1)}
	p.mu.Lock()
	p.renewals = append(p.renewals, r)
	if len(p.renewals) == 1 {
		time.AfterFunc(gather, p.sendRenewals)
	}
	p.mu.Unlock()
	select {
	case a := <-r.answer:
		return a
	case <-ctx.Done():
		return answer{pool: p, err: errNoConnection}
	}
}

// sendRenewals sends the renewals that were gathered. After a failure of the connection, only those are repeated whose
// replies were not read: a reply that makes no sense does not end the renewal of other holds.
func (p *pool) sendRenewals() {
	p.mu.Lock()
	due := p.renewals
	p.renewals = nil
	p.mu.Unlock()
	for batch := range slices.Chunk(due, pipeline) {
		go func() {
			lease, deadline := batch[0].lease, batch[0].deadline
			for _, r := range batch {
				lease, deadline = min(lease, r.lease), earlier(deadline, r.deadline)
			}
			c, err := p.get(p.client.ctx, forTimer, lease, deadline)
			// No RENEW is sent once the release has begun.
			batch = slices.DeleteFunc(batch, func(r timedRenewal) bool { return r.ctx.Err() != nil })
			a := answer{pool: p, err: err}
			if err == nil && len(batch) == 0 {
				p.put(c, answer{})
			} else if err == nil {
				commands := make([][]string, len(batch))
				for i, r := range batch {
					commands[i] = r.command
				}
				a = c.exchange(p.client.ctx, deadline, commands...)
				p.put(c, a)
			}
			for i, r := range batch {
				own := a
				own.replies = nil
				if i < len(a.replies) { // read before the failure, if there was one
					own.replies, own.err = a.replies[i:i+1], nil
				}
				r.answer <- own
			}
		}()
	}
}

// addWaits changes the number of waits at this node, unless too few connections are left for other requests.
func (p *pool) addWaits(n int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waits+n > p.client.config.MaxConnections-reserved {
		return false
	}
	p.waits += n
	return true
}

// closeIdle closes the idle connections that satisfy a condition.
func (p *pool) closeIdle(condition func(*conn) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = slices.DeleteFunc(p.idle, func(c *conn) bool {
		closes := condition(c)
		if closes {
			p.drop(c)
		}
		return closes
	})
}

func (p *pool) closed() bool { return p.client.ctx.Err() != nil }

// close closes all connections, busy ones too. The client's context must have ended.
func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = nil
	for c := range p.conns {
		p.drop(c)
	}
	p.refuse(ErrClosed)
}
