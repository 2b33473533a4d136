package holdfast

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"time"
)

// A route finds the node that serves a key, and follows it when it moves.
type route struct {
	client *Client
	key    string

	mu       sync.Mutex
	addr     string
	asking   string // a node to ask once, after -ASK
	stale    bool   // the address must be looked up again
	looking  chan struct{}
	lookErr  error
	hops     int  // redirects in a row
	replaced bool // a dead idle connection was replaced
}

// current returns the last known address.
func (r *route) current() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.addr
}

// wanders reports whether the next request must find its node first.
func (r *route) wanders() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asking != "" || r.stale && r.client.config.Locate != nil
}

// locate returns the pool of the node to ask, and whether ASKING goes first. The last known address is used while a
// look-up hangs.
func (r *route) locate(ctx context.Context, deadline time.Time) (p *pool, asking bool, err error) {
	r.mu.Lock()
	if addr := r.asking; addr != "" {
		r.asking = ""
		r.mu.Unlock()
		return r.client.pool(addr), true, nil // not under r.mu: the timer takes it under the client's mu
	}
	if r.addr == "" && r.client.config.Locate == nil {
		r.addr = r.client.config.Addr
	}
	if known := r.addr; known == "" || r.stale && r.client.config.Locate != nil {
		if r.looking == nil {
			r.looking = make(chan struct{})
			go r.look(r.looking, r.stale)
		}
		looking := r.looking
		r.mu.Unlock()
		if known != "" {
			deadline = time.Now().Add(time.Until(deadline) / 4)
		}
		timer := time.NewTimer(time.Until(deadline))
		defer timer.Stop()
		select {
		case <-looking:
		case <-timer.C:
		case <-ctx.Done():
		}
		r.mu.Lock()
	}
	addr, err := r.addr, r.lookErr
	r.mu.Unlock()
	if addr == "" {
		return nil, false, errors.Join(errNoConnection, err, context.Cause(ctx))
	}
	return r.client.pool(addr), false, nil
}

func (r *route) look(done chan struct{}, stale bool) {
	ctx, cancel := context.WithTimeout(r.client.ctx, connectTimeout)
	defer cancel()
	addr, err := r.client.config.Locate(ctx, r.key, stale)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.lookErr = err; err == nil {
		r.addr, r.stale = addr, false
	}
	r.looking = nil
	close(done)
}

// do sends commands to the node of the key in one pipeline. An error reply to the first is its error.
func (r *route) do(ctx context.Context, class priority, lease, timeout time.Duration, commands ...[]string) (p *pool, replies []any, sent time.Time, err error) {
	began := time.Now()
	p, asking, err := r.locate(ctx, began.Add(timeout))
	if err != nil {
		return nil, nil, time.Time{}, err
	}
	if asking {
		commands = append([][]string{{"ASKING"}}, commands...)
	}
	replies, sent, err = p.do(ctx, class, lease, timeout-time.Since(began), commands...)
	if err == nil && asking {
		replies = replies[1:]
	}
	if err == nil {
		if failure, failed := replies[0].(ServerError); failed {
			err = failure
		}
	}
	return p, replies, sent, err
}

// answered notes that the node serves the key.
func (r *route) answered() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hops, r.replaced = 0, false
}

// retryAt says when a request that failed may be sent again, and whether it may at all. It never allows a loop
// without a pause.
func (r *route) retryAt(p *pool, err error, sent time.Time, lease time.Duration) (at time.Time, again bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var reply ServerError
	var idle errDeadIdle
	switch {
	case errors.As(err, &reply):
		switch reply.Code() {
		case "MOVED", "ASK", "SUPERSEDED":
			if words := strings.Fields(string(reply)); reply.Code() != "SUPERSEDED" && len(words) > 2 {
				addr := words[2]
				if strings.HasPrefix(addr, ":") { // the same host
					host, _, _ := net.SplitHostPort(p.addr)
					addr = host + addr
				}
				if reply.Code() == "ASK" {
					r.asking = addr
				} else {
					r.addr = addr
				}
			}
			if r.hops++; r.hops == 1 {
				return time.Now(), true
			}
		case "READONLY", "UNBLOCKED":
			p.closeIdle(false)
			r.stale = true
		default:
			if !reply.passing() {
				return time.Time{}, false
			}
		}
	case errors.Is(err, ErrModuleNotLoaded), errors.Is(err, ErrServerTooOld), errors.Is(err, ErrClientTooOld), errors.Is(err, ErrClosed):
		return time.Time{}, false
	case errors.As(err, &idle) && !r.replaced:
		r.replaced = true
		return time.Now(), true
	case !errors.Is(err, errNoConnection):
		if r.stale = true; p != nil && isTimeout(err) { // idle connections would be silent, too
			p.closeIdle(false)
		}
	}
	if p == nil { // the look-up failed
		return time.Now().Add(min(maxPause, lease/16)), true
	}
	return p.failed(sent, lease), true
}
