package holdfast

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"time"
)

// A route sends requests to the node that serves a key, and follows the key when it moves. One goroutine at a time
// uses it.
type route struct {
	*request // names, lease and replicas
	client   *Client

	addr    string       // the node that serves the key, as far as is known
	asking  string       // the node of the next request only, after -ASK
	stale   bool         // addr must be looked up again
	looking chan located // the outcome of a look-up that has begun
	hops    int          // redirects, and SUPERSEDED, in a row
}

type located struct {
	addr string
	err  error
}

func (c *Client) route(q *request) *route {
	r := &route{request: q, client: c}
	if c.config.Locate == nil {
		r.addr = c.config.Addr
	}
	return r
}

// locate returns the pool of the node for the next request, and whether ASKING must go first. If a look-up takes more
// than a quarter of the time, the last known address is used.
func (r *route) locate(ctx context.Context, deadline time.Time) (p *pool, asking bool, err error) {
	if addr := r.asking; addr != "" {
		r.asking = ""
		return r.client.pool(addr), true, nil
	}
	if locate := r.client.config.Locate; locate != nil && (r.addr == "" || r.stale) {
		if r.looking == nil {
			looking, stale := make(chan located, 1), r.client.moved.Swap(false) || r.stale
			r.looking = looking
			go func() {
				ctx, cancel := context.WithTimeout(r.client.ctx, connectTimeout)
				defer cancel()
				addr, err := locate(ctx, r.names[0], stale)
				looking <- located{addr, err}
			}()
		}
		if r.addr != "" {
			deadline = time.Now().Add(time.Until(deadline) / 4)
		}
		timer := time.NewTimer(time.Until(deadline))
		defer timer.Stop()
		select {
		case found := <-r.looking:
			if r.looking, err = nil, found.err; err == nil {
				r.addr, r.stale = found.addr, false
			}
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	if r.addr == "" {
		return nil, false, errors.Join(errNoConnection, err)
	}
	return r.client.pool(r.addr), false, nil
}

// silence is the reply timeout of a request that does not wait.
func (r *route) silence() time.Duration {
	return min(max(r.lease/8, 50*time.Millisecond), time.Second) + r.confirmation()
}

// confirmation is how much longer than others a request with REPLICAS may take.
func (r *route) confirmation() time.Duration {
	if r.replicas == 0 || r.addr == "" {
		return 0
	}
	p := r.client.pool(r.addr)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.confirm
}

// do sends commands to the node of the key in one pipeline.
func (r *route) do(ctx context.Context, class priority, commands ...[]string) answer {
	deadline := time.Now().Add(r.silence())
	p, asking, err := r.locate(ctx, deadline)
	if err != nil {
		return r.assess(answer{err: err})
	}
	if class == forTimer && !asking && r.replicas == 0 {
		return r.assess(p.renew(ctx, r.lease, deadline, commands[0]))
	}
	if !asking {
		return r.assess(p.do(ctx, class, r.lease, deadline, commands...))
	}
	var asked [][]string
	for _, command := range commands { // ASKING is for one command only
		asked = append(asked, []string{"ASKING"}, command)
	}
	a := p.do(ctx, class, r.lease, deadline, asked...)
	var replies []any
	for i := 1; i < len(a.replies); i += 2 {
		replies = append(replies, a.replies[i])
	}
	a.replies = replies
	return r.assess(a)
}

// assess decides whether and when a failed request may be repeated. At least every second repetition has a pause.
func (r *route) assess(a answer) answer {
	if a.err == nil {
		a.err = failure(a.reply())
	}
	if a.err == nil {
		r.hops = 0
		return a
	}
	a.verdict = verdictOf(a.err)
	switch a.verdict {
	case fatal, overwritten:
		return a
	case atOnce:
		r.follow(a)
		if r.hops++; r.hops == 1 {
			return a
		}
	case demoted, broken:
		r.stale = true
		if a.verdict == demoted || a.pool != nil && errors.Is(a.err, os.ErrDeadlineExceeded) { // idle connections lead to the same server
			a.pool.closeIdle(func(*conn) bool { return true })
		}
	}
	if a.pool == nil { // the look-up failed
		a.at = time.Now().Add(min(maxPause, r.lease/16))
		return a
	}
	a.pool.mu.Lock()
	defer a.pool.mu.Unlock()
	if len(a.replies) > 0 { // an error reply; put and connected note failures of connections
		a.pool.fail(a.sent)
	}
	a.at = a.pool.resumeAt(r.lease)
	return a
}

// follow notes the node that a redirect names. SUPERSEDED names none.
func (r *route) follow(a answer) {
	words := strings.Fields(a.err.Error())
	if len(words) < 3 || words[0] == "SUPERSEDED" {
		return
	}
	colon := strings.LastIndexByte(words[2], ':')
	host := words[2][:max(colon, 0)] // an IPv6 address has no brackets here
	if host == "" {                  // the host of the node that replied
		host, _, _ = net.SplitHostPort(a.pool.addr)
	}
	addr := net.JoinHostPort(host, words[2][colon+1:])
	if words[0] == "ASK" {
		r.asking = addr
	} else {
		r.addr = addr
		r.client.moved.Store(true)
	}
}

// repeat sends a request until it succeeds, fails for good, or the time is over.
func repeat(ctx context.Context, until time.Time, ask func() answer) answer {
	var lostAt time.Time
	for {
		a := ask()
		if a.lost() && lostAt.IsZero() {
			lostAt = a.sent
		}
		a.lostAt = lostAt
		if !a.passing() || a.at.After(until) || !time.Now().Before(until) {
			return a
		}
		if end := sleep(ctx, a.at); end != nil {
			a.err = errors.Join(end, a.err)
			return a
		}
	}
}
