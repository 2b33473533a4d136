package holdfast

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// A hold is a lock that was granted. It is held until its release begins, when kept ends, and over when ctx ends.
type hold struct {
	*acquisition
	token    int64
	conn     *conn  // of an ephemeral hold
	unwatch  func() // ends the watch over that connection, so that a request can read it
	acquired time.Time
	ctx      context.Context // ends when the lock is lost or released
	cancel   context.CancelCauseFunc
	kept     context.Context // ends when the release begins
	stop     context.CancelFunc
	detach   func() bool   // the end of the client does not release it any more
	lost     chan struct{} // closed if the lock is lost
	renews   atomic.Bool   // by the timer
	dropped  atomic.Bool   // the application can no longer reach it

	busy   chan struct{} // full while a request about this lock is under way
	former time.Duration // the lease that the server has accepted last; Renew may change that of the request
	due    time.Time     // when the lock is renewed next
	timer  *time.Timer

	mu      sync.Mutex
	certain time.Time // no other client holds the lock before
	woken   bool      // it is renewed because of the wall clock, and that has not succeeded yet
	outcome error     // what Release returns
}

// A Hold is a lock that this process holds. Its methods are safe for concurrent use.
//
// The client renews it until it is released or lost, whether or not the application still refers to it: a Hold is
// never released by the garbage collector.
type Hold struct{ *hold }

func newHold(a *acquisition, token int64, certain time.Time) *hold {
	h := &hold{acquisition: a, token: token, former: a.lease, certain: certain, acquired: time.Now(),
		lost: make(chan struct{}), busy: make(chan struct{}, 1), unwatch: func() {}}
	h.renews.Store(!a.manual)
	return h
}

// establish hands a hold to the application.
func (h *hold) establish(caller context.Context) *Hold {
	h.client.running.Add(1)
	h.due = h.certain.Add(h.lease/4 - sure(h.lease)) // since the lease began, not since the reply was read
	h.ctx, h.cancel = context.WithCancelCause(context.WithoutCancel(caller))
	h.kept, h.stop = context.WithCancel(context.Background())
	h.timer = time.AfterFunc(endless, func() { h.inTurn(h.attend) })
	h.inTurn(func() { // sets the timer, too
		h.detach = context.AfterFunc(h.client.closing, func() { _ = (&Hold{h}).Release(context.Background()) })
	})
	if hook := h.client.config.Hooks.Acquired; hook != nil {
		hook(h.name(), h.acquired.Sub(h.began))
	}
	handle := &Hold{h}
	runtime.AddCleanup(handle, func(dropped *atomic.Bool) { dropped.Store(true) }, &h.dropped)
	return handle
}

// inTurn runs a task when no request about the lock is under way, unless its release has begun or it is lost.
func (h *hold) inTurn(task func()) {
	h.beginTurn()
	defer h.endTurn()
	if h.failure() != nil {
		return
	}
	if task(); h.ctx.Err() != nil {
		return
	}
	next := h.certain
	if h.renews.Load() {
		next = earlier(next, h.due)
	}
	h.timer.Reset(time.Until(next))
	if h.conn != nil {
		h.unwatch = h.conn.watch(func() { h.inTurn(func() { h.lose(ReasonDisconnected) }) })
	}
}

// beginTurn waits until no request about the lock is under way.
func (h *hold) beginTurn() {
	h.busy <- struct{}{}
	h.unwatch()
}

func (h *hold) endTurn() { <-h.busy }

// attend renews the hold when that is due, and gives it up when it is no longer certain.
func (h *hold) attend() {
	if !time.Now().Before(h.certain) {
		h.lose(ReasonExpired)
		return
	}
	if !h.renews.Load() { // Renew has lengthened it since the timer fired
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
		h.lease = lease
		h.setCertain(earlier(h.certain, time.Now().Add(sure(lease))))
	}
	ctx, cancel := context.WithDeadline(h.kept, h.certain)
	defer cancel()
	a := h.send(ctx, class, h.renewal())
	switch {
	case a.confirmed:
		certain := a.sent.Add(sure(h.lease))
		if certain.Before(h.certain) {
			certain = h.certain
		}
		h.setCertain(certain)
		h.former = h.lease
		h.due = a.sent.Add(h.lease / 4)
	case a.err == nil:
		h.lose(ReasonGone)
	case a.verdict == overwritten:
		h.lose(ReasonChanged)
	case a.passing():
		h.due = a.at
	default:
		h.lease = h.former
		h.due = time.Now().Add(min(maxPause, h.lease/16))
	}
	return a
}

// setCertain notes until when the hold is certain, by a renewal or because the lease gets shorter.
func (h *hold) setCertain(certain time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.certain, h.woken = certain, false
}

// renewal returns the command that restarts the lease.
func (h *hold) renewal() []string {
	terms := []string{"TOKEN", strconv.FormatInt(h.token, 10), "LEASE", millis(h.lease)}
	if h.replicas > 0 {
		terms = append(terms, "REPLICAS", strconv.Itoa(h.replicas))
	}
	return h.command("RENEW", terms...)
}

// endings returns the commands that release the lock, or let it expire after a rest.
func (h *hold) endings(rest time.Duration) (class priority, commands [][]string) {
	token := strconv.FormatInt(h.token, 10)
	if rest <= 0 {
		return forRelease, [][]string{h.command("RELEASE", "TOKEN", token)}
	}
	// A late renewal finds another token. There is no LOCK.MRENEW with FENCE: each name has a command of its own.
	terms := []string{h.owner, "TOKEN", token, "FENCE", strconv.FormatInt(h.token+1, 10), "LEASE", millis(rest)}
	if h.ephemeral {
		terms = append(terms, "UNBIND")
	}
	for _, name := range h.names {
		commands = append(commands, append([]string{"LOCK.RENEW", name}, terms...))
	}
	return forRenew, commands
}

// send sends commands about this hold, over its own connection if it is ephemeral, and compares their replies. If a
// request may still be on its way to the server, RELEASE ALL follows a RELEASE.
func (h *hold) send(ctx context.Context, class priority, commands ...[]string) answer {
	decisive := len(commands)
	if class == forRelease && h.unread.Load() > 0 {
		commands = append(commands, h.command("RELEASE", "ALL"))
	}
	var a answer
	if h.conn == nil {
		a = h.route.do(ctx, class, commands...)
	} else {
		a = answer{pool: h.client.pool(h.route.addr), sent: time.Now()}
		deadline := a.sent.Add(h.route.silence())
		if end, ok := ctx.Deadline(); ok {
			deadline = earlier(deadline, end)
		}
		_ = h.conn.SetDeadline(deadline)
		if a.replies, a.err = h.conn.exchange(commands...); a.err != nil {
			h.disown() // a late reply must not be read as that to another request
		}
		a = h.route.judged(a)
	}
	if a.lost() && !h.given {
		h.unread.Add(1)
	}
	for i := 0; a.err == nil && i < decisive; i++ {
		a.err = failure(a.replies[i])
		if a.confirmed = a.err == nil && positive(a.replies[i]); a.err != nil {
			a = h.route.judged(a)
		} else if !a.confirmed {
			break
		}
	}
	return a
}

// positive reports whether no name has nil for a reply.
func positive(reply any) bool {
	items, several := reply.([]any)
	return reply != nil && !(several && slices.Contains(items, nil))
}

// disown closes the connection of an ephemeral hold.
func (h *hold) disown() {
	if h.conn != nil {
		_ = h.conn.Close()
	}
}

// letGo releases the lock, or lets it expire after a rest, unless it is lost.
func (h *hold) letGo(rest time.Duration) {
	h.beginTurn()
	defer h.endTurn()
	if h.ctx.Err() != nil {
		return
	}
	class, commands := h.endings(rest)
	a := repeat(h.client.ctx, time.Now().Add(h.lease), func() answer {
		a := h.send(h.client.ctx, class, commands...)
		if a.lost() && h.conn != nil {
			a.verdict = fatal
		}
		return a
	})
	gone := a.err == nil || a.verdict == overwritten
	released := rest <= 0 && (h.conn != nil && a.lost() || // the server releases it when its connection ends
		gone && a.lostAt.Before(h.certain) && !a.lostAt.IsZero()) // the reply that was lost may have confirmed it
	switch {
	case a.confirmed, released:
		h.end(nil)
	case !gone:
		h.end(fmt.Errorf("holdfast: cannot release lock %s: %w", h.name(), a.err))
	case a.err != nil:
		h.lose(ReasonChanged)
	default:
		h.lose(ReasonGone)
	}
}

// lose ends a hold that the server no longer has. The application is notified once.
func (h *hold) lose(reason Reason) {
	h.end(&LostError{h.name(), reason})
	if len(h.names) > 1 { // the others may still be held
		go h.forsake()
	}
}

// forsake sends a RELEASE of a lock that is lost: should the server still hold it, it does not any more.
func (h *hold) forsake() {
	h.beginTurn()
	defer h.endTurn()
	class, commands := h.endings(0)
	h.send(h.client.ctx, class, commands...)
}

// end sets the outcome of the hold.
func (h *hold) end(outcome error) {
	defer h.client.running.Done()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.outcome = outcome
	h.detach()
	h.timer.Stop()
	h.disown()
	hooks := &h.client.config.Hooks
	var loss *LostError
	if errors.As(outcome, &loss) {
		h.cancel(loss)
		close(h.lost)
		if hooks.Lost != nil {
			go hooks.Lost(h.name(), loss.Reason)
		}
	} else {
		h.cancel(fmt.Errorf("holdfast: lock %s was released", h.name()))
		if hooks.Released != nil {
			go hooks.Released(h.name(), time.Since(h.acquired))
		}
	}
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
	defer h.mu.Unlock()
	now := time.Now()
	left := min(h.certain.Sub(now), h.certain.Round(0).Sub(now.Round(0))) // the wall clock advances during suspend
	if left <= 0 && now.Before(h.certain) && h.renews.Load() && !h.woken {
		h.woken = true
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
		a := await(ctx, func() (a answer) {
			h.inTurn(func() { h.lose(reason) })
			return a
		})
		if a.err != nil {
			return a.err
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
	if lease > 0 {
		lease = max(lease, time.Millisecond)
	}
	a := repeat(ctx, time.Now().Add(endless), func() answer {
		return await(ctx, func() (a answer) {
			h.inTurn(func() { a = h.renew(forRenew, lease) })
			return a
		})
	})
	if lost := h.failure(); lost != nil {
		return lost
	}
	return a.err
}

// StopRenewing leaves renewal to [Hold.Renew] from now on, as [NoRenew] does: without it, the lock ends after its lease.
func (h *Hold) StopRenewing() { h.renews.Store(false) }

// Release releases the lock. It returns a [*LostError] if the lock had been lost. If ctx ends first, it returns the
// cause, and the release continues in the background. A second release has no effect, and the same outcome.
func (h *Hold) Release(ctx context.Context) error { return h.ReleaseAfter(ctx, 0) }

// ReleaseAfter stops renewing and lets the lock expire after d: for jobs that must not run twice in that time.
func (h *Hold) ReleaseAfter(ctx context.Context, d time.Duration) error {
	h.mu.Lock()
	first := h.kept.Err() == nil
	h.stop()
	h.mu.Unlock()
	switch {
	case !first:
	case h.ctx.Err() != nil:
		go h.forsake()
	case ctx.Done() == nil: // the caller cannot leave before it ends
		h.letGo(d)
	default:
		go h.letGo(d)
	}
	select {
	case <-h.ctx.Done():
	case <-ctx.Done():
		if h.ctx.Err() == nil {
			return fmt.Errorf("holdfast: lock %s is being released in the background: %w", h.name(), context.Cause(ctx))
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.outcome
}
