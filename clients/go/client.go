package holdfast

import (
	"container/heap"
	"context"
	"crypto/rand"
	"encoding/hex"
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
	shortLease   = 300 * time.Millisecond // below it, there is no time to repeat a renewal
	forever      = time.Hour              // the longest WAIT that is sent; an endless wait repeats it
	closeTimeout = 2 * time.Second
)

// Config says how a [Client] reaches its servers. Adapters fill it from a Redis library's client.
type Config struct {
	// Addr is the address of the only server, host:port or the path of a unix socket. Not used with Locate.
	Addr string
	// Dial opens a connection to a server. It sets no read timeout. Default: TCP, or a unix socket if addr begins with "/".
	Dial func(ctx context.Context, addr string) (net.Conn, error)
	// Setup returns the commands that each new connection sends first: AUTH, SELECT. They must succeed, except CLIENT.
	Setup func(ctx context.Context) ([][]string, error)
	// Locate returns the address of the node that serves a key; stale means that the last answer was wrong.
	// Default: Addr.
	Locate func(ctx context.Context, key string, stale bool) (addr string, err error)
	// MaxConnections bounds the connections to each node. Default 32, at least 4.
	MaxConnections int
	// Lease is the lease of locks that name none. Default 10 s.
	Lease time.Duration
	// Logger receives what has no caller to return to. Default: [slog.Default].
	Logger *slog.Logger
	// Hooks are called when locks change hands.
	Hooks Hooks
}

// Hooks are functions for metrics and logs. Each may be nil, is called from several goroutines, and must not block;
// Lost runs in a goroutine of its own.
type Hooks struct {
	Acquired func(name string, waited time.Duration)
	Lost     func(name string, reason Reason)
	Released func(name string, held time.Duration)
}

// A Client acquires locks over a pool of connections of its own. It is safe for concurrent use.
type Client struct {
	config Config
	ctx    context.Context // ends when the client has closed
	cancel context.CancelFunc
	// closing ends when Close begins: waits end, and what is held is released.
	closing      context.Context
	beginClosing context.CancelCauseFunc
	poll         chan struct{} // taken by the one request that polls, because waits have used up the connections

	mu    sync.Mutex
	pools map[string]*pool
	turns map[string][]chan struct{} // acquisitions of one mutex by this client; the first is at the server
	holds schedule
	timer *time.Timer

	running atomic.Int64  // tasks in the background
	rested  chan struct{} // receives when there is none
}

// New returns a client. It connects when a lock is first used.
func New(config Config) (*Client, error) {
	if config.Addr == "" && config.Locate == nil {
		return nil, errors.New("holdfast: Config needs Addr or Locate")
	}
	if config.Dial == nil {
		config.Dial = dial
	}
	if config.Setup == nil {
		config.Setup = func(context.Context) ([][]string, error) { return nil, nil }
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
	c := &Client{config: config, poll: make(chan struct{}, 1), rested: make(chan struct{}, 1), pools: map[string]*pool{}, turns: map[string][]chan struct{}{}}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.closing, c.beginClosing = context.WithCancelCause(context.Background())
	c.timer = time.AfterFunc(forever, c.tick)
	c.timer.Stop()
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

// Close ends waits with [ErrClosed], releases what is held, and closes the connections. It returns within 3 s.
func (c *Client) Close() error {
	c.mu.Lock()
	first := c.closing.Err() == nil
	c.beginClosing(ErrClosed)
	holds := slices.Clone(c.holds)
	c.mu.Unlock()
	if first {
		for _, h := range holds {
			c.background(func() { _ = h.end(c.ctx, 0) })
		}
	}
	c.rest(closeTimeout)
	c.cancel()
	c.mu.Lock()
	c.timer.Stop()
	for _, p := range c.pools {
		p.closeIdle(true)
	}
	c.mu.Unlock()
	c.rest(closeTimeout / 2)
	return nil
}

// background runs what must be finished before the client closes.
func (c *Client) background(task func()) {
	c.running.Add(1)
	go func() {
		defer func() {
			if c.running.Add(-1) == 0 {
				select {
				case c.rested <- struct{}{}:
				default:
				}
			}
		}()
		task()
	}()
}

// rest waits until no task runs.
func (c *Client) rest(atMost time.Duration) {
	for timeout := time.After(atMost); c.running.Load() > 0; {
		select {
		case <-c.rested:
		case <-timeout:
			return
		}
	}
}

func (c *Client) pool(addr string) *pool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.pools[addr]
	if p == nil {
		p = &pool{client: c, addr: addr, open: map[*conn]bool{}, closed: c.ctx.Err() != nil}
		c.pools[addr] = p
	}
	return p
}

// A request is what is asked for: names and terms.
type request struct {
	names                     []string
	lease, wait               time.Duration // wait < 0: no limit; 0: do not wait
	manual, ephemeral, shared bool
	replicas, limit           int
	value, owner              string
}

// An Option is a term of an acquisition.
type Option func(*request)

// Lease sets for how long a lock is held without a renewal; others wait that long after its holder was killed.
func Lease(d time.Duration) Option { return func(r *request) { r.lease = d } }

// NoRenew leaves renewal to [Hold.Renew]. By default the client renews a lock until it is released or lost.
func NoRenew() Option { return func(r *request) { r.manual = true } }

// Wait bounds the wait, as a deadline of the context does, but lets the server end it.
func Wait(d time.Duration) Option { return func(r *request) { r.wait = max(d, 0) } }

// Ephemeral releases the lock as soon as the server sees its connection end. The server may see that before this
// client does: what the lock guards should check [Hold.Fence].
func Ephemeral() Option { return func(r *request) { r.ephemeral = true } }

// Replicas requires that n replicas confirm the lock and each renewal.
func Replicas(n int) Option { return func(r *request) { r.replicas = n } }

// Limit lets n owners hold the lock at once. All must name the same limit.
func Limit(n int) Option { return func(r *request) { r.limit = n } }

// Shared lets any number of shared owners hold the lock at once.
func Shared() Option { return func(r *request) { r.shared = true } }

// Value puts a readable value before the owner's random part: "value#…", where "%" and "#" in the value are "%25" and "%23".
func Value(v string) Option { return func(r *request) { r.value = v } }

// Owner sets the whole owner, for interfaces that dictate it. The lock is refused if this owner holds it already, and
// a request whose reply was lost is not repeated: its error says that a lease may be left.
func Owner(owner string) Option { return func(r *request) { r.owner = owner } }

func (c *Client) request(names []string, wait time.Duration, options []Option) (*request, error) {
	r := &request{names: names, lease: c.config.Lease, wait: wait}
	for _, option := range options {
		option(r)
	}
	switch {
	case len(names) == 0 || slices.Contains(names, ""):
		return nil, errors.New("holdfast: a lock needs a name")
	case r.lease <= 0:
		return nil, fmt.Errorf("holdfast: lease must be positive, got %v", r.lease)
	case r.limit < 0 || r.replicas < 0 || r.shared && r.limit > 0:
		return nil, errors.New("holdfast: Limit and Replicas must be positive, and Limit and Shared exclude each other")
	case len(names) > 1 && (r.shared || r.limit > 0):
		return nil, errors.New("holdfast: several names are locked exclusively")
	case r.owner != "" && wait != 0:
		return nil, errors.New("holdfast: Owner is for TryLock only: a wait could not be repeated safely")
	}
	if r.lease < shortLease && !r.manual {
		c.config.Logger.Warn("holdfast: the lease is too short to repeat a renewal", "name", r.name(), "lease", r.lease)
	}
	return r, nil
}

func (r *request) name() string { return strings.Join(r.names, ",") }

// command returns LOCK.<verb> or LOCK.M<verb> for these names and this owner.
func (r *request) command(verb, owner string, terms ...string) []string {
	if len(r.names) == 1 {
		return append([]string{"LOCK." + verb, r.names[0], owner}, terms...)
	}
	command := append([]string{"LOCK.M" + verb, strconv.Itoa(len(r.names))}, r.names...)
	return append(append(command, owner), terms...)
}

// escaped and unescaped translate the value of an owner, which contains no "#".
var (
	escaped   = strings.NewReplacer("%", "%25", "#", "%23")
	unescaped = strings.NewReplacer("%25", "%", "%23", "#")
)

// newOwner draws an owner that no other acquisition has.
func (r *request) newOwner() string {
	if r.owner != "" {
		return r.owner
	}
	var random [16]byte
	_, _ = rand.Read(random[:]) // it never fails
	if r.value != "" {
		return escaped.Replace(r.value) + "#" + hex.EncodeToString(random[:])
	}
	return hex.EncodeToString(random[:])
}

// millis rounds up to whole milliseconds, at least 1.
func millis(d time.Duration) string {
	return strconv.FormatInt(max(1, int64((d+time.Millisecond-1)/time.Millisecond)), 10)
}

// silence is how long a RENEW or RELEASE may stay unanswered.
func silence(lease time.Duration) time.Duration {
	return min(max(lease/8, 50*time.Millisecond), time.Second)
}

// sleep waits for a time, or returns why ctx ended.
func sleep(ctx context.Context, until time.Time) error {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// takeTurn waits until no older acquisition of this mutex by this client waits at the server.
func (c *Client) takeTurn(ctx context.Context, name string) (done func(), queued bool, err error) {
	turn := make(chan struct{})
	c.mu.Lock()
	c.turns[name] = append(c.turns[name], turn)
	if queued = len(c.turns[name]) > 1; !queued {
		close(turn)
	}
	c.mu.Unlock()
	done = func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		queue := c.turns[name]
		i := slices.Index(queue, turn)
		queue = slices.Delete(queue, i, i+1)
		if c.turns[name] = queue; len(queue) == 0 {
			delete(c.turns, name)
		} else if i == 0 {
			close(queue[0])
		}
	}
	select {
	case <-turn:
		return done, queued, nil
	case <-ctx.Done():
		done()
		return nil, queued, context.Cause(ctx)
	}
}

// schedule is a heap of all holds, ordered by when each next needs attention.
type schedule []*hold

func (s schedule) Len() int           { return len(s) }
func (s schedule) Less(i, j int) bool { return s[i].due.Before(s[j].due) }
func (s schedule) Swap(i, j int)      { s[i], s[j] = s[j], s[i]; s[i].index, s[j].index = i, j }
func (s *schedule) Push(h any)        { h.(*hold).index = len(*s); *s = append(*s, h.(*hold)) }
func (s *schedule) Pop() any {
	last := (*s)[len(*s)-1]
	last.index = -1
	*s = (*s)[:len(*s)-1]
	return last
}

// attend says when the timer looks at a hold next. A regular renewal may come earlier by slack, to share a pipeline.
// The caller holds c.mu.
func (c *Client) attend(h *hold, due time.Time, slack time.Duration) {
	h.due, h.slack = due, slack
	if h.index >= 0 {
		heap.Fix(&c.holds, h.index)
	} else {
		heap.Push(&c.holds, h)
	}
	if c.holds[0] == h {
		c.timer.Reset(time.Until(due))
	}
}

// tick attends to all holds that are due. Renewals at one node go in pipelines, which no other node delays.
func (c *Client) tick() {
	now := time.Now()
	batches := map[string][]*hold{}
	var expired []*hold
	c.mu.Lock()
	for len(c.holds) > 0 && !c.holds[0].due.After(now.Add(c.holds[0].slack)) {
		h := c.holds[0]
		switch {
		case !now.Before(h.certain):
			heap.Pop(&c.holds)
			expired = append(expired, h)
			continue
		case !h.manual && !h.renewing:
			h.renewing = true
			addr := h.route.current()
			if h.conn != nil || h.replicas > 0 || h.route.wanders() { // these do not share a pipeline
				c.background(func() { c.renew(addr, h) })
			} else {
				batches[addr] = append(batches[addr], h)
			}
		}
		c.attend(h, h.certain, 0)
	}
	if len(c.holds) > 0 {
		c.timer.Reset(time.Until(c.holds[0].due))
	}
	c.mu.Unlock()
	for _, h := range expired {
		h.lose(ReasonExpired)
	}
	for addr, batch := range batches {
		for part := range slices.Chunk(batch, 256) {
			c.background(func() { c.renew(addr, part...) })
		}
	}
}
