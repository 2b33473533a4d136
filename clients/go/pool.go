package holdfast

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

const (
	protocol       = 4 // the protocol that this client speaks
	minPause       = 20 * time.Millisecond
	maxPause       = time.Second
	connectTimeout = 2 * time.Second // for a connection with its handshake
	reserved       = 2               // connections that waits leave free
)

var (
	errNoConnection = errors.New("holdfast: no free connection")
	errInterrupted  = errors.New("interrupted by the caller") // says nothing about the server
)

// priority orders the requests that wait for a connection; each class is first come, first served.
type priority int

const (
	forRenew priority = iota
	forRelease
	forOther
	priorities
)

// A pool holds the connections to one node, and the pause that the node's failures impose on all requests to it.
type pool struct {
	client *Client
	addr   string

	mu       sync.Mutex
	closed   bool
	idle     []*conn // used last in, first out
	open     map[*conn]bool
	opening  int
	waits    int // acquisitions that may wait at the server
	queues   [priorities][]*waiter
	proven   bool // the server has answered since a connection broke or could not be opened: until then, one attempt at a time
	failedAt time.Time
	pause    time.Duration
	timer    *time.Timer // opens connections when the pause is over
	confirm  time.Duration
}

// A waiter is a request that waits for a connection.
type waiter struct {
	lease time.Duration
	ready chan connected
}

type connected struct {
	conn *conn
	err  error
}

// get returns a connection. It fails with errNoConnection, or the cause of ctx, if there is none in time, and with
// the outcome of the attempt if connecting fails.
func (p *pool) get(ctx context.Context, class priority, lease time.Duration, deadline time.Time) (*conn, error) {
	p.mu.Lock()
	if c := p.pop(); c != nil || p.closed {
		p.mu.Unlock()
		if c == nil {
			return nil, ErrClosed
		}
		return c, nil
	}
	w := &waiter{lease, make(chan connected, 1)}
	p.queues[class] = append(p.queues[class], w)
	p.serve()
	p.mu.Unlock()
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	var err error
	select {
	case r := <-w.ready:
		return r.conn, r.err
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-timer.C:
		err = errNoConnection
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.queues[class], w); i >= 0 {
		p.queues[class] = slices.Delete(p.queues[class], i, i+1)
	} else if r := <-w.ready; r.conn != nil { // served in the same moment
		p.idle = append(p.idle, r.conn)
		p.serve()
	}
	return nil, err
}

// pop takes an idle connection that is alive.
func (p *pool) pop() *conn {
	for n := len(p.idle); n > 0; n = len(p.idle) {
		c := p.idle[n-1]
		p.idle = p.idle[:n-1]
		if !c.dead() {
			return c
		}
		p.drop(c)
	}
	return nil
}

// drop closes a connection, or forgets one that an ephemeral hold has taken.
func (p *pool) drop(c *conn) {
	delete(p.open, c)
	p.proven = p.proven && len(p.open) > 0
	_ = c.Close()
}

// serve hands idle connections to the requests that wait, and opens as many as are missing.
func (p *pool) serve() {
	missing := 0
	soon := time.Time{}
	for class := range p.queues {
		for len(p.queues[class]) > 0 {
			c := p.pop()
			if c == nil {
				break
			}
			p.queues[class][0].ready <- connected{conn: c}
			p.queues[class] = p.queues[class][1:]
		}
		missing += len(p.queues[class])
		for _, w := range p.queues[class] {
			if at := p.resumeAt(w.lease); soon.IsZero() || at.Before(soon) {
				soon = at
			}
		}
	}
	for p.opening < missing && len(p.open)+p.opening < p.client.config.MaxConnections && (p.proven || p.opening == 0) {
		if wait := time.Until(soon); !p.proven && wait > 0 {
			if p.timer != nil {
				p.timer.Stop()
			}
			p.timer = time.AfterFunc(wait, func() { p.mu.Lock(); defer p.mu.Unlock(); p.serve() })
			return
		}
		p.opening++
		p.client.background(p.connect)
	}
}

// connect opens a connection. All requests that wait for one share its failure.
func (p *pool) connect() {
	ctx, cancel := context.WithTimeout(p.client.ctx, connectTimeout)
	defer cancel()
	began := time.Now()
	result := make(chan connected)
	go func() { // the dialer may ignore ctx
		c, err := p.dial(ctx)
		select {
		case result <- connected{c, err}:
		case <-ctx.Done():
			if c != nil {
				_ = c.Close()
			}
		}
	}()
	var r connected
	select {
	case r = <-result:
	case <-ctx.Done():
		r.err = fmt.Errorf("holdfast: connect to %s: %w", p.addr, ctx.Err())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.opening--
	if p.closed && r.conn != nil {
		_ = r.conn.Close()
		r = connected{nil, ErrClosed}
	}
	if r.err != nil {
		p.proven = false
		p.fail(began)
		for class, queue := range p.queues {
			for _, w := range queue {
				w.ready <- connected{err: r.err}
			}
			p.queues[class] = nil
		}
		return
	}
	p.open[r.conn] = true
	p.idle = append(p.idle, r.conn)
	p.serve()
}

// dial opens a connection and prepares it.
func (p *pool) dial(ctx context.Context) (*conn, error) {
	commands, err := p.client.config.Setup(ctx)
	if err != nil {
		return nil, err
	}
	socket, err := p.client.config.Dial(ctx, p.addr)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: socket}
	if err := p.prepare(ctx, c, commands); err != nil {
		_ = c.Close()
		return nil, err
	}
	c.used = false
	return c, nil
}

// prepare sends the commands of a new connection, and asks for the version of the module if the server has not proven
// that it answers: it may accept connections and no more, or be another one.
func (p *pool) prepare(ctx context.Context, c *conn, commands [][]string) error {
	p.mu.Lock()
	proven := p.proven
	p.mu.Unlock()
	setup := len(commands)
	if !proven {
		commands = append(slices.Clone(commands), []string{"LOCK.VERSION"})
	}
	deadline := time.Now().Add(connectTimeout)
	replies, err := c.exchange(ctx, deadline, commands...)
	if err != nil {
		return err
	}
	for i, reply := range replies[:setup] {
		if err, failed := reply.(ServerError); failed && commands[i][0] != "CLIENT" {
			return err
		}
	}
	if proven {
		return nil
	}
	if err, failed := replies[setup].(ServerError); failed {
		if !err.unknownCommand() {
			return err
		}
		if replies, _ = c.exchange(ctx, deadline, []string{"LOCK.ACQUIRE"}); len(replies) == 1 {
			if err, failed := replies[0].(ServerError); failed && err.unknownCommand() {
				return ErrModuleNotLoaded
			}
		}
		return fmt.Errorf("%w: it does not know LOCK.VERSION, this client speaks protocol %d", ErrServerTooOld, protocol)
	}
	version := fields(replies[setup])
	speaks, _ := version["protocol"].([]any)
	if len(speaks) < 2 || integer(speaks[1]) < protocol {
		return fmt.Errorf("%w: module %v speaks protocols %v, this client %d", ErrServerTooOld, version["version"], speaks, protocol)
	}
	if integer(speaks[0]) > protocol {
		return fmt.Errorf("%w: module %v speaks protocols %v, this client %d", ErrClientTooOld, version["version"], speaks, protocol)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.proven, p.confirm = true, time.Duration(integer(version["replicas-timeout"]))*time.Millisecond
	return nil
}

// put returns a connection after a pipeline. A broken one is closed.
func (p *pool) put(c *conn, err error, replies ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil || p.closed {
		p.drop(c)
		p.proven = p.proven && (err == nil || errors.Is(err, errInterrupted))
	} else {
		if !slices.ContainsFunc(replies, isError) {
			p.pause, p.failedAt = 0, time.Time{}
		}
		p.idle = append(p.idle, c)
	}
	p.serve()
}

func isError(reply any) bool {
	_, failed := reply.(ServerError)
	return failed
}

// fail notes that an attempt that began at this time failed. The pause doubles once for each outage, however many
// requests fail in it.
func (p *pool) fail(began time.Time) {
	if began.After(p.failedAt) {
		p.pause = min(max(2*p.pause, minPause), maxPause)
		p.failedAt = time.Now()
	}
}

// failed notes a failure, and returns when a request with this lease may be sent again.
func (p *pool) failed(began time.Time, lease time.Duration) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !began.IsZero() {
		p.fail(began)
	}
	return p.resumeAt(lease)
}

// resumeAt returns when the pause is over for a request with this lease.
func (p *pool) resumeAt(lease time.Duration) time.Time {
	pause := max(min(p.pause, lease/16), minPause/20)
	return p.failedAt.Add(pause - rand.N(pause/4+1)) //nolint:gosec // jitter needs no secrecy
}

// do sends commands in one pipeline and reads their replies, all within timeout. Without a connection, sent is zero.
func (p *pool) do(ctx context.Context, class priority, lease, timeout time.Duration, commands ...[]string) (replies []any, sent time.Time, err error) {
	deadline := time.Now().Add(timeout)
	c, err := p.get(ctx, class, lease, deadline)
	if err != nil {
		return nil, time.Time{}, err
	}
	sent = time.Now()
	replies, err = c.exchange(ctx, deadline, commands...)
	if err != nil && ctx.Err() != nil {
		p.put(c, errInterrupted)
		return nil, sent, context.Cause(ctx)
	}
	p.put(c, err, replies...)
	return replies, sent, err
}

// takeWait reserves a connection for a wait, if enough are left for other requests.
func (p *pool) takeWait() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waits >= p.client.config.MaxConnections-reserved {
		return false
	}
	p.waits++
	return true
}

func (p *pool) freeWait() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waits--
}

// take removes a connection from the pool's account: an ephemeral hold keeps it.
func (p *pool) take(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.open, c)
	p.serve()
}

// closeIdle closes idle connections, or all if the client closes.
func (p *pool) closeIdle(all bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.idle {
		p.drop(c)
	}
	p.idle = nil
	if p.closed = p.closed || all; all {
		for c := range p.open {
			p.drop(c)
		}
		if p.timer != nil {
			p.timer.Stop()
		}
		for class, queue := range p.queues {
			for _, w := range queue {
				w.ready <- connected{err: ErrClosed}
			}
			p.queues[class] = nil
		}
	}
}
