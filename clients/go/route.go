package holdfast

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"time"
)

// locate returns the pool of the node for the next request, and whether it was redirected there by -ASK. If a look-up takes
// more than a quarter of the time, the last known address is used.
func (r *request) locate(ctx context.Context, deadline time.Time) (p *pool, redirected bool, err error) {
	if r.conn != nil {
		return r.conn.pool, false, nil
	}
	if addr := r.asking; addr != "" {
		r.asking = ""
		return r.client.pool(addr), true, nil
	}
	if locate := r.client.config.Locate; locate != nil && (r.addr == "" || r.stale) {
		if r.looking == nil {
			found, stale := &located{done: make(chan struct{})}, r.client.moved.Swap(false) || r.stale
			r.looking = found
			go func() {
				ctx, cancel := context.WithTimeout(r.client.ctx, connectTimeout)
				defer cancel()
				found.addr, found.err = locate(ctx, r.names[0], stale)
				close(found.done)
			}()
		}
		if r.addr != "" {
			deadline = time.Now().Add(time.Until(deadline) / 4)
		}
		if found := r.looking; wait(ctx, deadline, found.done) {
			if r.looking, err = nil, found.err; err == nil {
				r.addr, r.stale = found.addr, false
			}
		}
	}
	if r.addr == "" {
		return nil, false, errors.Join(errNoConnection, err)
	}
	return r.client.pool(r.addr), false, nil
}

// silence is the reply timeout of a request that does not wait.
func (r *request) silence() time.Duration {
	return min(max(r.lease/8, 50*time.Millisecond), time.Second) + r.confirmation()
}

// confirmation is how much longer than others a request with REPLICAS may take.
func (r *request) confirmation() time.Duration {
	if r.replicas == 0 || r.addr == "" {
		return 0
	}
	p := r.client.pool(r.addr)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.confirm
}

// do sends commands to the node of the names in one pipeline and reads their replies.
func (r *request) do(ctx context.Context, class priority, commands ...[]string) answer {
	deadline := time.Now().Add(r.silence())
	p, redirected, err := r.locate(ctx, deadline)
	c := r.conn
	if err == nil && c == nil {
		if class == forTimer && !redirected && r.replicas == 0 {
			return r.assess(p.renew(ctx, r.lease, deadline, commands[0]))
		}
		c, err = p.get(ctx, class, r.lease, deadline)
	}
	if err == nil && ctx.Err() != nil {
		p.put(c, answer{})
		err = errNoConnection
	}
	if err != nil {
		return r.assess(answer{pool: p, err: err})
	}
	a := c.exchange(ctx, deadline, pipelined(redirected, commands...)...)
	p.put(c, a)
	if a.err != nil {
		a.replies = nil // the pipeline is repeated as a whole
	}
	return r.assess(a)
}

// pipelined returns the commands of a pipeline: after -ASK, ASKING goes before each.
func pipelined(redirected bool, commands ...[]string) [][]string {
	if !redirected {
		return commands
	}
	var all [][]string
	for _, command := range commands {
		all = append(all, []string{"ASKING"}, command)
	}
	return all
}

// assess decides whether and when a failed request may be repeated. At least every second repetition has a pause.
func (r *request) assess(a answer) answer {
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
func (r *request) follow(a answer) {
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

// repeat sends a request until it succeeds, fails for good, or the time is over. If it may not be sent again after its
// reply was lost, that is a failure for good.
func repeat(ctx context.Context, until time.Time, again bool, ask func() answer) answer {
	var lostAt time.Time
	for {
		a := ask()
		if a.lost() && lostAt.IsZero() {
			lostAt = a.sent
		}
		a.lostAt = lostAt
		if a.passing() && (again || !a.lost()) && !a.at.After(until) && time.Now().Before(until) && sleep(ctx, a.at) == nil {
			continue
		}
		if end := endOf(ctx); end != nil && a.passing() {
			a.err = errors.Join(end, a.err)
		}
		return a
	}
}
