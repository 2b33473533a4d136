package holdfast

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	defaultLease = 10 * time.Second
	closeTimeout = 2 * time.Second
)

// Config determines how a [Client] reaches its servers. Adapters fill it from a Redis library's client.
type Config struct {
	// Addr is the address of the only server, host:port or the path of a unix socket. Not used with Locate.
	Addr string
	// Dial opens a connection to a server, without a read timeout. Default: TCP, or a unix socket if addr begins with "/".
	Dial func(ctx context.Context, addr string) (net.Conn, error)
	// Setup returns the commands that each new connection sends first, such as AUTH and SELECT. If one of them fails, so
	// does the connection, except CLIENT. The server is at the address remote.
	Setup func(ctx context.Context, remote net.Addr) ([][]string, error)
	// Locate returns the address of the node that serves a key. With stale, an earlier result was wrong, for this key or
	// another: Locate must look the address up again. Default: Addr.
	Locate func(ctx context.Context, key string, stale bool) (addr string, err error)
	// MaxConnections bounds the connections to each node. Default 32; a value below 4 counts as 4.
	MaxConnections int
	// Lease is the lease of locks without the option Lease. Default 10 s.
	Lease time.Duration
	// Logger receives warnings, and errors of requests that no caller waits for. Default: [slog.Default].
	Logger *slog.Logger
	// Hooks are called when a lock is acquired, lost or released.
	Hooks Hooks
}

// Hooks are functions for metrics and logs. Each may be nil, and must be safe for concurrent use. Acquired must not
// block; Lost and Released run in goroutines of their own.
type Hooks struct {
	Acquired func(name string, waited time.Duration)
	Lost     func(name string, reason Reason)
	Released func(name string, held time.Duration)
}

// A Client acquires locks over a pool of connections of its own. It is safe for concurrent use.
type Client struct {
	config       Config
	closing      context.Context // ends when Close begins: waits end, and holds are released
	beginClosing context.CancelFunc
	ctx          context.Context // ends when Close closes the connections
	cancel       context.CancelFunc
	running      sync.WaitGroup // acquisitions, holds and withdrawals

	moved atomic.Bool // a node replied with MOVED: the next look-up must not use an old map

	mu    sync.Mutex
	pools map[string]*pool
	turns map[any][]chan struct{} // by key: the task that has the turn, and those that wait for it
}

// New returns a client. It connects when a lock is first used.
func New(config Config) (*Client, error) {
	if config.Addr == "" && config.Locate == nil {
		return nil, errors.New("holdfast: Config needs Addr or Locate")
	}
	if config.Locate != nil {
		config.Addr = ""
	}
	if config.Dial == nil {
		config.Dial = dial
	}
	if config.Setup == nil {
		config.Setup = func(context.Context, net.Addr) ([][]string, error) { return nil, nil }
	}
	if config.MaxConnections == 0 {
		config.MaxConnections = 32
	}
	config.MaxConnections = max(config.MaxConnections, 2*reserved)
	if config.Lease <= 0 {
		config.Lease = defaultLease
	}
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	c := &Client{config: config, pools: map[string]*pool{}, turns: map[any][]chan struct{}{}}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.closing, c.beginClosing = context.WithCancel(c.ctx)
	return c, nil
}

func dial(ctx context.Context, addr string) (net.Conn, error) {
	network := "tcp"
	if strings.HasPrefix(addr, "/") {
		network = "unix"
	}
	var d net.Dialer
	return d.DialContext(ctx, network, addr)
}

// Handshake returns commands for [Config.Setup]: AUTH, SELECT and CLIENT SETNAME, each only if its argument is given.
func Handshake(user, password string, db int, name string) (commands [][]string) {
	if user != "" {
		commands = append(commands, []string{"AUTH", user, password})
	} else if password != "" {
		commands = append(commands, []string{"AUTH", password})
	}
	if db > 0 {
		commands = append(commands, []string{"SELECT", strconv.Itoa(db)})
	}
	if name != "" {
		commands = append(commands, []string{"CLIENT", "SETNAME", name})
	}
	return commands
}

// Close ends waits with [ErrClosed], releases all holds, and closes the connections. It returns within 3 s.
func (c *Client) Close() error {
	c.mu.Lock()
	c.beginClosing()
	c.mu.Unlock()
	done := make(chan struct{})
	go func() { c.running.Wait(); close(done) }()
	wait(context.Background(), time.Now().Add(closeTimeout), done)
	c.mu.Lock()
	c.cancel()
	for _, p := range c.pools {
		p.close()
	}
	c.mu.Unlock()
	wait(context.Background(), time.Now().Add(closeTimeout/2), done)
	return nil
}

// enter counts an acquisition among those that Close waits for. It returns false if the client is closing.
func (c *Client) enter() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing.Err() != nil {
		return false
	}
	c.running.Add(1)
	return true
}

// background runs a task of an acquisition, which Close waits for, in a goroutine.
func (c *Client) background(task func()) {
	c.running.Add(1)
	go func() {
		defer c.running.Done()
		task()
	}()
}

func (c *Client) pool(addr string) *pool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pools[addr]
	if p == nil {
		p = &pool{client: c, addr: addr, conns: map[*conn]bool{}}
		c.pools[addr] = p
	}
	return p
}

// closeDead closes dead idle connections to all nodes. A node that has left its cluster gets no more requests that would
// find its connections dead.
func (c *Client) closeDead() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.pools {
		p.closeIdle((*conn).dead)
	}
}

// polls is the key of the turn that requests without a place at the server take to poll; those of mutexes are names.
type polls struct{}

// takeTurn waits for a turn: of a mutex by its name, or of polls. Turns of one key are taken in order. It returns the
// function that ends the turn, or nil if ctx or the time ends first, and whether another task had the turn.
func (c *Client) takeTurn(ctx context.Context, key any, until time.Time) (end func(), waited bool) {
	own := make(chan struct{}) // closed when the turn begins
	c.mu.Lock()
	waited = len(c.turns[key]) > 0
	c.turns[key] = append(c.turns[key], own)
	c.mu.Unlock()
	end = func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		i := slices.Index(c.turns[key], own)
		queue := slices.Delete(c.turns[key], i, i+1)
		if c.turns[key] = queue; len(queue) == 0 {
			delete(c.turns, key)
		} else if i == 0 {
			close(queue[0])
		}
	}
	if waited && !wait(ctx, until, own) {
		end()
		return nil, true
	}
	return end, waited
}

// pollWait returns the WAIT of the request that has the turn to poll. The more requests are due, the shorter it is, so that
// each of them is soon sent.
func (c *Client) pollWait() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(5*time.Millisecond, min(100*time.Millisecond, time.Second/time.Duration(len(c.turns[polls{}]))))
}

// extend returns a context that ends 250 ms after ctx, with the same error.
func extend(ctx context.Context) (context.Context, context.CancelFunc) {
	if ctx.Done() == nil {
		return ctx, func() {}
	}
	extended, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(late, func() { cancel(endOf(ctx)) }) })
	return extended, func() { stop(); cancel(nil) }
}

// endOf returns the error of ctx, and its cause if the application chose one. It returns nil if ctx has not ended.
func endOf(ctx context.Context) error {
	err := ctx.Err()
	if err == nil {
		return nil
	}
	cause := context.Cause(ctx)
	if errors.Is(cause, err) {
		return cause
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// wait waits until a channel is closed, and reports whether it is. It ends at a time, or with ctx.
func wait(ctx context.Context, until time.Time, done <-chan struct{}) bool {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// sleep waits until a time. If ctx ends first, sleep returns its error.
func sleep(ctx context.Context, until time.Time) error {
	if time.Now().Before(until) {
		wait(ctx, until, nil)
	}
	return endOf(ctx)
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
