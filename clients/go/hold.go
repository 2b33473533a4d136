package holdfast

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// A hold is a lock that was granted.
type hold struct {
	*acquisition
	token    int64
	conn     *conn // of an ephemeral hold
	acquired time.Time
	ctx      context.Context // ends when the lock is lost or released
	cancel   context.CancelCauseFunc
	kept     context.Context // ends when the release begins, or the client's
	stop     context.CancelFunc
	unwatch  func() bool   // the end of kept does not release the lock any more
	lost     chan struct{} // closed if the lock is lost
	ended    chan struct{} // closed when outcome is set
	outcome  error         // what Release returns
	release  sync.Once
	dropped  atomic.Bool // the application can no longer reach it
	stopped  atomic.Bool // it is not renewed any more
	woken    atomic.Bool // it is renewed because of the wall clock, and that has not succeeded yet

	busy   chan struct{} // full while a request about this lock is under way
	lease  time.Duration // which Renew may change
	former time.Duration // the lease that the server has accepted last
	due    time.Time     // when the lock is renewed next
	timer  *time.Timer

	mu      sync.Mutex
	certain time.Time     // no other client holds the lock before
	rest    time.Duration // for which the lock stays held after its release
}

// A Hold is a lock that this process holds. Its methods are safe for concurrent use.
//
// The client renews it until it is released or lost, whether or not the application still refers to it: a Hold is
// never released by the garbage collector.
type Hold struct{ *hold }

func newHold(a *acquisition, token int64, certain time.Time) *hold {
	return &hold{acquisition: a, token: token, lease: a.lease, former: a.lease, certain: certain, acquired: time.Now(),
		lost: make(chan struct{}), ended: make(chan struct{}), busy: make(chan struct{}, 1)}
}

// establish hands a hold to the application.
func (h *hold) establish(caller context.Context) *Hold {
	h.client.running.Add(1)
	h.due = h.certain.Add(h.lease/4 - sure(h.lease)) // since the lease began, not since the reply was read
	h.busy <- struct{}{}                             // the client may close meanwhile
	h.ctx, h.cancel = context.WithCancelCause(context.WithoutCancel(caller))
	h.kept, h.stop = context.WithCancel(h.client.closing)
	h.timer = time.AfterFunc(endless, func() { h.inTurn(h.attend) })
	h.unwatch = context.AfterFunc(h.kept, h.letGo)
	<-h.busy
	h.inTurn(func() {}) // sets the timer
	if h.conn != nil {
		go func() {
			<-h.conn.gone
			h.inTurn(func() { h.lose(ReasonDisconnected) })
		}()
	}
	if hook := h.client.config.Hooks.Acquired; hook != nil {
		hook(h.name(), h.acquired.Sub(h.began))
	}
	handle := &Hold{h}
	runtime.AddCleanup(handle, func(dropped *atomic.Bool) { dropped.Store(true) }, &h.dropped)
	return handle
}

// inTurn runs a task when no request about the lock is under way, unless its release has begun or it is lost.
func (h *hold) inTurn(task func()) {
	h.busy <- struct{}{}
	defer func() { <-h.busy }()
	if h.failure() != nil {
		return
	}
	task()
	switch {
	case h.outcome != nil && len(h.names) > 1: // the others may still be held
		h.send(h.client.ctx, forRelease, h.releases(0)...)
	case h.outcome == nil && !h.renews():
		h.timer.Reset(time.Until(h.certain))
	case h.outcome == nil:
		h.timer.Reset(time.Until(earlier(h.due, h.certain)))
	}
}

// attend renews the hold when that is due, and gives it up when it is no longer certain.
func (h *hold) attend() {
	if !time.Now().Before(h.certain) {
		h.lose(ReasonExpired)
		return
	}
	if !h.renews() { // Renew has lengthened it since the timer fired
		return
	}
	if h.dropped.CompareAndSwap(true, false) {
		h.client.config.Logger.Warn("holdfast: a Hold was dropped without a release; it is renewed until the client closes", "name", h.name())
	}
	h.renew(forTimer, 0)
}

// renew sends a RENEW and judges its reply.
func (h *hold) renew(class priority, lease time.Duration) answer {
	if lease > 0 {
		lease = max(lease, time.Millisecond)
		h.lease, h.route.lease = lease, lease
		h.setCertain(earlier(h.certain, time.Now().Add(sure(lease))))
	}
	ctx, cancel := context.WithDeadline(h.kept, h.certain)
	defer cancel()
	if h.conn != nil {
		ctx = h.client.ctx // its connection is not given up
	}
	a := h.send(ctx, class, h.renewal())
	switch {
	case a.err == nil && !confirmed(a.replies[0]):
		h.lose(ReasonGone)
	case a.err == nil:
		certain := a.sent.Add(sure(h.lease))
		if certain.Before(h.certain) {
			certain = h.certain
		}
		h.setCertain(certain)
		h.former = h.lease
		h.woken.Store(false)
		h.due = a.sent.Add(h.lease / 4)
	case judge(a.err) == overwritten:
		h.lose(ReasonChanged)
	default:
		h.noteLost(a)
		if h.due = a.at; !a.passing {
			h.lease, h.route.lease = h.former, h.former
			h.due = time.Now().Add(min(maxPause, h.lease/16))
		}
	}
	return a
}

// noteLost remembers that a stale request may be at the server.
func (h *hold) noteLost(a answer) {
	if a.lost() && judge(a.err) == broken {
		h.stale.Add(1)
	}
}

func (h *hold) setCertain(certain time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.certain = certain
}

// renewal returns the command that restarts the lease.
func (h *hold) renewal() []string {
	terms := []string{"TOKEN", strconv.FormatInt(h.token, 10), "LEASE", millis(h.lease)}
	if h.replicas > 0 {
		terms = append(terms, "REPLICAS", strconv.Itoa(h.replicas))
	}
	return h.command("RENEW", terms...)
}

// releases returns the commands that release the lock. The reply to the first is the verdict, or with a rest, that to
// each: there is no LOCK.MRENEW with FENCE, so each name has a command of its own.
func (h *hold) releases(rest time.Duration) [][]string {
	token := strconv.FormatInt(h.token, 10)
	if rest > 0 { // a late renewal finds another token
		terms := []string{h.owner, "TOKEN", token, "FENCE", strconv.FormatInt(h.token+1, 10), "LEASE", millis(rest)}
		if h.ephemeral {
			terms = append(terms, "UNBIND")
		}
		commands := make([][]string, len(h.names))
		for i, name := range h.names {
			commands[i] = append([]string{"LOCK.RENEW", name}, terms...)
		}
		return commands
	}
	commands := [][]string{h.command("RELEASE", "TOKEN", token)}
	if h.stale.Load() > 0 && !h.given {
		commands = append(commands, h.command("RELEASE", "ALL"))
	}
	return commands
}

// confirmed reports whether a reply to RENEW or RELEASE is positive for every name.
func confirmed(reply any) bool {
	items, several := reply.([]any)
	return several && !slices.Contains(items, nil) || !several && reply != nil
}

// send sends commands about this hold, over its own connection if it is ephemeral.
func (h *hold) send(ctx context.Context, class priority, commands ...[]string) answer {
	if h.conn == nil {
		return h.route.do(ctx, class, commands...)
	}
	a := answer{pool: h.client.pool(h.route.addr), sent: time.Now()}
	if a.replies, a.err = h.conn.exchange(ctx, a.sent.Add(h.route.silence()), commands...); a.err != nil {
		h.disown() // a late reply must not be read as that to another request
	}
	return h.route.judged(a)
}

// disown closes the connection of an ephemeral hold.
func (h *hold) disown() {
	if h.conn != nil {
		_ = h.conn.Close()
	}
}

// letGo releases the lock, unless it is lost.
func (h *hold) letGo() {
	h.busy <- struct{}{}
	defer func() { <-h.busy }()
	if h.outcome != nil {
		return
	}
	tried, wasCertain := false, false // a request was sent whose reply was lost; the lock was certain when the first was
	h.mu.Lock()
	rest := h.rest
	h.mu.Unlock()
	a := repeat(h.client.ctx, time.Now().Add(h.lease), func() answer {
		certain := time.Now().Before(h.certain)
		a := h.send(h.client.ctx, forRelease, h.releases(rest)...)
		if a.err == nil && rest > 0 {
			refused := func(reply any) bool { return reply == nil || failure(reply) != nil }
			a.replies = a.replies[max(0, slices.IndexFunc(a.replies, refused)):]
			a = h.route.judged(a)
		}
		h.noteLost(a)
		if a.lost() && !tried {
			tried, wasCertain = true, certain
		}
		a.passing = a.passing && (h.conn == nil || !a.lost())
		return a
	})
	verdict := passing
	if a.err != nil {
		verdict = judge(a.err)
	}
	switch {
	case a.err == nil && confirmed(a.replies[0]):
		h.end(nil, "")
	case h.conn != nil && a.lost() && rest == 0: // the server releases it when its connection ends
		h.end(nil, "")
	case a.err != nil && verdict != overwritten:
		h.end(fmt.Errorf("holdfast: cannot release lock %s: %w", h.name(), a.err), "")
	case tried && wasCertain && rest == 0:
		h.end(nil, "")
	case verdict == overwritten:
		h.lose(ReasonChanged)
	default:
		h.lose(ReasonGone)
	}
}

// lose ends a hold that the server no longer has. The application is notified once.
func (h *hold) lose(reason Reason) { h.end(&LostError{h.name(), reason}, reason) }

// end sets the outcome of the hold.
func (h *hold) end(outcome error, reason Reason) {
	h.outcome = outcome
	h.unwatch()
	h.stop()
	h.timer.Stop()
	h.disown()
	defer h.client.running.Done()
	hooks := &h.client.config.Hooks
	if reason != "" {
		h.cancel(outcome)
		close(h.lost)
		if hooks.Lost != nil {
			go hooks.Lost(h.name(), reason)
		}
	} else {
		h.cancel(fmt.Errorf("holdfast: lock %s was released", h.name()))
		if hooks.Released != nil {
			go hooks.Released(h.name(), time.Since(h.acquired))
		}
	}
	close(h.ended)
}

// Fence returns the fencing token. It is greater than that of every earlier hold of this lock: whatever the lock
// guards can refuse a smaller one.
func (h *Hold) Fence() int64 { return h.token }

// Name returns the lock's name; several names are joined by commas.
func (h *Hold) Name() string { return h.name() }

// Owner returns what identifies this acquisition at the server.
func (h *Hold) Owner() string { return h.owner }

// Context returns a context that ends when the lock is lost or released. If it is lost, [context.Cause] is a
// [*LostError]. It carries the values of the context that the lock was acquired with, but not its end.
func (h *Hold) Context() context.Context { return h.ctx }

// Lost returns a channel that is closed if the lock is lost.
func (h *Hold) Lost() <-chan struct{} { return h.hold.lost }

// Remaining returns for how long the lock is certainly held without another renewal; 0 if it is not held.
func (h *Hold) Remaining() time.Duration {
	if h.failure() != nil {
		return 0
	}
	h.mu.Lock()
	certain := h.certain
	h.mu.Unlock()
	now := time.Now()
	left := min(certain.Sub(now), certain.Round(0).Sub(now.Round(0))) // the wall clock advances during suspend
	if left <= 0 && now.Before(certain) && h.renews() && h.woken.CompareAndSwap(false, true) {
		h.timer.Reset(0)
	}
	return max(left, 0)
}

// Held reports whether the lock is certainly held, without asking the server.
func (h *Hold) Held() bool { return h.Remaining() > 0 }

// failure is nil while the lock is held.
func (h *hold) failure() error {
	if h.ctx.Err() == nil && h.kept.Err() != nil {
		return fmt.Errorf("holdfast: lock %s is being released", h.name())
	}
	return context.Cause(h.ctx)
}

// Check asks the server whether it still holds the lock for this owner. It does not renew the lease, and returns a
// [*LostError] if the lock is lost. It cannot tell if the lock has 5,000 other holders.
func (h *Hold) Check(ctx context.Context) error {
	if err := h.failure(); err != nil {
		return err
	}
	for _, name := range h.names {
		info, err := h.client.Info(ctx, name)
		held := func(holder Holder) bool { return holder.Owner == h.owner && holder.Token == h.token }
		reason := ReasonGone
		switch {
		case err != nil && judge(err) == overwritten:
			reason = ReasonChanged
		case err != nil:
			return err
		case slices.ContainsFunc(info.Holders, held), len(info.Holders) >= shown: // it may be one that is not shown
			continue
		}
		if err := h.do(ctx, func() { h.lose(reason) }); err != nil {
			return err
		}
	}
	return h.failure()
}

// Renew restarts the lease, with another duration if lease is not 0. It returns a [*LostError] if the lock is lost. A
// duration that the server refuses changes nothing. Without [NoRenew], the client renews by itself.
func (h *Hold) Renew(ctx context.Context, lease time.Duration) error {
	if lease < 0 {
		return fmt.Errorf("holdfast: lease must not be negative, got %v", lease)
	}
	a := repeat(ctx, time.Now().Add(endless), func() answer {
		reply := make(chan answer, 1)
		if err := h.do(ctx, func() { reply <- h.renew(forRenew, lease) }); err != nil {
			return answer{err: err}
		}
		return <-reply
	})
	if lost := h.failure(); lost != nil {
		return lost
	}
	return a.err
}

// do runs a task when the earlier ones have ended. It fails if ctx ends or the lock is released or lost first.
func (h *hold) do(ctx context.Context, task func()) error {
	done, ran := make(chan struct{}), false
	go func() {
		defer close(done)
		h.inTurn(func() { task(); ran = true })
	}()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-done:
	}
	if !ran {
		return h.failure()
	}
	return nil
}

// StopRenewing leaves renewal to [Hold.Renew] from now on, as [NoRenew] does: without it, the lock ends after its lease.
func (h *Hold) StopRenewing() { h.stopped.Store(true) }

func (h *hold) renews() bool { return !h.manual && !h.stopped.Load() }

// Release releases the lock. It returns a [*LostError] if the lock had been lost. If ctx ends first, it returns the
// cause, and the release continues in the background. A second release has no effect, and the same outcome.
func (h *Hold) Release(ctx context.Context) error { return h.ReleaseAfter(ctx, 0) }

// ReleaseAfter stops renewing and lets the lock expire after d: for jobs that must not run twice in that time.
func (h *Hold) ReleaseAfter(ctx context.Context, d time.Duration) error {
	here := false
	h.release.Do(func() { // only decides: a concurrent call waits with its own ctx
		select {
		case <-h.ended: // lost; should the server still hold it, it does not any more
			go h.client.route(h.names[0], h.lease).do(h.client.ctx, forRelease, h.releases(0)...)
		default:
			h.mu.Lock()
			h.rest = d
			h.mu.Unlock()
			here = ctx.Done() == nil && h.unwatch() // since the caller cannot leave before it ends
			h.stop()
		}
	})
	if here {
		h.letGo()
	}
	select {
	case <-h.ended:
		return h.outcome
	default:
	}
	select {
	case <-h.ended:
		return h.outcome
	case <-ctx.Done():
		return fmt.Errorf("holdfast: lock %s is being released in the background: %w", h.name(), context.Cause(ctx))
	}
}
