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

// A hold is a lock that was granted. kept ends when its release begins, and ctx when it is released or lost.
type hold struct {
	*acquisition
	token    int64
	unwatch  func() // ends the watch of an ephemeral hold's connection
	acquired time.Time
	ctx      context.Context // ends when the lock is lost or released
	cancel   context.CancelCauseFunc
	kept     context.Context // ends when the release begins
	stop     context.CancelFunc
	detach   func() bool   // undoes the release at the end of the client
	lost     chan struct{} // closed if the lock is lost
	dropped  atomic.Bool   // the handle was garbage-collected

	busy   chan struct{} // full while a request about this lock is under way; tests with synctest can't wait for a Mutex
	former time.Duration // the last lease that the server accepted; Renew may ask for another
	due    time.Time     // when the lock is renewed next
	timer  *time.Timer

	releaseBy time.Time // when the release is no longer repeated
	lostAt    time.Time // when the first RELEASE was sent whose reply was lost

	mu      sync.Mutex
	certain time.Time // until then, no other client holds the lock
	woken   bool      // a renewal because of the wall clock was requested and has not succeeded yet
}

// A Hold is a lock that this process holds. Its methods are safe for concurrent use.
//
// The client renews it until it is released or lost, whether or not the application still refers to it: the garbage
// collector never releases a lock.
type Hold struct{ *hold }

func newHold(a *acquisition, token int64, certain time.Time) *hold {
	return &hold{acquisition: a, token: token, former: a.lease, certain: certain, acquired: time.Now(),
		lost: make(chan struct{}), busy: make(chan struct{}, 1), unwatch: func() {}}
}

// establish hands a hold to the application.
func (h *hold) establish(caller context.Context) *Hold {
	h.client.running.Add(1)
	h.due = h.certain.Add(h.interval() - sure(h.lease)) // counted from when the lease began, not from when the reply was read
	h.ctx, h.cancel = context.WithCancelCause(context.WithoutCancel(caller))
	h.kept, h.stop = context.WithCancel(context.Background())
	h.timer = time.AfterFunc(endless, func() { _ = h.inTurn(context.Background(), h.attend) })
	_ = h.inTurn(context.Background(), func() { // which sets the timer afterwards
		h.detach = context.AfterFunc(h.client.closing, func() { _ = (&Hold{h}).Release(context.Background()) })
	})
	handle := &Hold{h}
	runtime.AddCleanup(handle, func(dropped *atomic.Bool) { dropped.Store(true) }, &h.dropped)
	if hook := h.client.config.Hooks.Acquired; hook != nil {
		returned := false
		defer func() {
			if !returned { // it panicked
				_ = handle.Release(caller)
			}
		}()
		hook(h.name(), h.acquired.Sub(h.began))
		returned = true
	}
	return handle
}

// inTurn runs a task when no request about the lock is under way, and then sets the timer. It does nothing if the
// release has begun or the lock is lost. It returns the error of ctx if that ends before the turn.
func (h *hold) inTurn(ctx context.Context, task func()) error {
	if !h.beginTurn(ctx) {
		return endOf(ctx)
	}
	defer h.endTurn()
	if h.ended() != nil {
		return nil
	}
	if task(); h.ctx.Err() != nil {
		return nil
	}
	next := h.certain
	if !h.manual.Load() {
		next = earlier(next, h.due)
	}
	h.timer.Reset(time.Until(next))
	if h.conn != nil {
		h.unwatch = h.conn.watch(func() {
			_ = h.inTurn(context.Background(), func() { h.lose(ReasonDisconnected) })
		})
	}
	return nil
}

// beginTurn waits until no request about the lock is under way. It returns false if ctx ends first.
func (h *hold) beginTurn(ctx context.Context) bool {
	select {
	case h.busy <- struct{}{}:
		h.unwatch()
		return true
	case <-ctx.Done():
		return false
	}
}

func (h *hold) endTurn() { <-h.busy }

// attend is called by the timer. It renews the lock, or reports it as lost if it is no longer certain.
func (h *hold) attend() {
	if !time.Now().Before(h.certain) {
		h.lose(ReasonExpired)
		return
	}
	if h.manual.Load() { // Renew restarted the lease after the timer had fired
		return
	}
	if h.dropped.CompareAndSwap(true, false) {
		h.client.config.Logger.Warn("holdfast: a Hold was dropped without a release; it is renewed until the client closes", "name", h.name())
	}
	h.renew(forTimer, 0)
}

// renew sends a RENEW, with another lease if lease is not 0, and acts on the reply.
func (h *hold) renew(class priority, lease time.Duration) answer {
	if lease > 0 {
		h.lease = lease
		h.setCertain(earlier(h.certain, time.Now().Add(sure(lease))))
	}
	parent := h.kept
	if h.conn != nil { // the end of the request would end its connection, and the hold with it
		parent = context.Background()
	}
	ctx, cancel := context.WithDeadline(parent, h.certain)
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
		h.due = a.sent.Add(h.interval())
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

// interval returns how long after a renewal the timer renews the lock again.
func (h *hold) interval() time.Duration {
	if h.ephemeral {
		return min(h.lease/4, idle)
	}
	return h.lease / 4
}

// setCertain notes until when the hold is certain.
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

// endings returns the commands that release the lock or, if rest is positive, let it expire after that time.
func (h *hold) endings(rest time.Duration) (class priority, commands [][]string) {
	token := strconv.FormatInt(h.token, 10)
	if rest <= 0 {
		return forRelease, [][]string{h.command("RELEASE", "TOKEN", token)}
	}
	// FENCE raises the token, so that a late renewal does not match it. LOCK.MRENEW has no FENCE: one command for each name.
	terms := []string{h.owner, "TOKEN", token, "FENCE", strconv.FormatInt(h.token+1, 10), "LEASE", millis(rest)}
	if h.ephemeral {
		terms = append(terms, "UNBIND")
	}
	for _, name := range h.names {
		commands = append(commands, append([]string{"LOCK.RENEW", name}, terms...))
	}
	return forRenew, commands
}

// send sends commands about this hold. The answer is that of the first command whose reply is not positive. If a request
// may still be on its way to the server, RELEASE ALL follows a RELEASE.
func (h *hold) send(ctx context.Context, class priority, commands ...[]string) answer {
	decisive := len(commands)
	if class == forRelease && h.unread.Load() > 0 {
		commands = append(commands, h.command("RELEASE", "ALL"))
	}
	a := h.do(ctx, class, commands...)
	if a.lost() && !h.given {
		h.unread.Add(1)
	}
	for i := 0; a.err == nil && i < decisive; i++ {
		a.err = failure(a.replies[i])
		if a.confirmed = a.err == nil && positive(a.replies[i]); a.err != nil {
			a = h.assess(a)
		} else if !a.confirmed {
			break
		}
	}
	return a
}

// positive reports whether a reply, or each of its elements, is not nil.
func positive(reply any) bool {
	items, several := reply.([]any)
	return reply != nil && !(several && slices.Contains(items, nil))
}

// closeConn closes the connection of an ephemeral hold.
func (h *hold) closeConn() {
	if h.conn != nil {
		_ = h.conn.Close()
	}
}

// release releases the lock or, if rest is positive, lets it expire after that time. It returns false if ctx ends before
// that is decided; the next call then continues.
func (h *hold) release(ctx context.Context, rest time.Duration) bool {
	if !h.beginTurn(ctx) {
		return false
	}
	defer h.endTurn()
	if h.ctx.Err() != nil { // it is lost, but the server may still hold it
		class, commands := h.endings(0)
		h.send(ctx, class, commands...)
		return true
	}
	if h.releaseBy.IsZero() {
		h.releaseBy = time.Now().Add(h.lease)
	}
	class, commands := h.endings(rest)
	a := repeat(ctx, h.releaseBy, h.conn == nil, func() answer { return h.send(ctx, class, commands...) })
	if h.lostAt.IsZero() {
		h.lostAt = a.lostAt
	}
	disconnected := h.conn != nil && a.lost() // the server releases the lock when its connection ends
	if a.passing() && !disconnected && ctx.Err() != nil && h.client.ctx.Err() == nil {
		return false
	}
	gone := a.err == nil || a.verdict == overwritten
	released := rest <= 0 && (disconnected ||
		gone && h.lostAt.Before(h.certain) && !h.lostAt.IsZero()) // an earlier RELEASE, whose reply was lost, may have released it
	switch {
	case a.confirmed, released:
		h.end(fmt.Errorf("holdfast: lock %s %w", h.name(), errReleased))
	case !gone:
		h.end(fmt.Errorf("holdfast: cannot release lock %s: %w", h.name(), a.err))
	case a.err != nil:
		h.lose(ReasonChanged)
	default:
		h.lose(ReasonGone)
	}
	return true
}

// lose reports the lock as lost.
func (h *hold) lose(reason Reason) {
	h.end(&LostError{h.name(), reason})
	if len(h.names) > 1 { // the server may still hold the other names
		go h.release(h.client.ctx, 0)
	}
}

// errReleased is the cause with which the context of a hold ends that was released.
var errReleased = errors.New("was released")

// end ends the hold. The cause is errReleased, a LostError, or why the lock could not be released.
func (h *hold) end(cause error) {
	defer h.client.running.Done()
	h.detach()
	h.timer.Stop()
	h.closeConn()
	h.cancel(cause)
	hooks := &h.client.config.Hooks
	if loss := (*LostError)(nil); errors.As(cause, &loss) {
		close(h.lost)
		if hooks.Lost != nil {
			go hooks.Lost(h.name(), loss.Reason)
		}
	} else if hooks.Released != nil {
		go hooks.Released(h.name(), time.Since(h.acquired))
	}
}

// Fence returns the fencing token. It is greater than that of every earlier hold of this lock: whatever the lock
// guards should refuse a smaller one.
func (h *Hold) Fence() int64 { return h.token }

// Name returns the lock's name; several names are joined by commas.
func (h *Hold) Name() string { return h.name() }

// Owner returns the owner that the server knows this hold by.
func (h *Hold) Owner() string { return h.owner }

// Context returns a context that ends when the lock is lost or released. If it is lost, [context.Cause] is a
// [*LostError]. It carries the values of the context that was passed to the acquisition, but does not end with it.
func (h *Hold) Context() context.Context { return h.ctx }

// Lost returns a channel that is closed if the lock is lost.
func (h *Hold) Lost() <-chan struct{} { return h.hold.lost }

// Remaining returns for how long the lock is certainly held without another renewal; 0 if it is not held.
func (h *Hold) Remaining() time.Duration {
	if h.ended() != nil {
		return 0
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	left := min(h.certain.Sub(now), h.certain.Round(0).Sub(now.Round(0))) // Round: by the wall clock, which advances during suspend
	if left <= 0 && now.Before(h.certain) && !h.manual.Load() && !h.woken {
		h.woken = true
		h.timer.Reset(0)
	}
	return max(left, 0)
}

// Held reports whether the lock is certainly held, without asking the server.
func (h *Hold) Held() bool { return h.Remaining() > 0 }

// ended returns why the lock is no longer held: it is being released, was released, or is lost. It returns nil otherwise.
func (h *hold) ended() error {
	if h.ctx.Err() == nil && h.kept.Err() != nil {
		return fmt.Errorf("holdfast: lock %s is being released", h.name())
	}
	return context.Cause(h.ctx)
}

// Check asks the server whether this owner still holds the lock. It does not renew the lease, and returns a [*LostError]
// if the lock is lost. It finds no loss if the lock has 5,000 other holders.
func (h *Hold) Check(ctx context.Context) error {
	if err := h.ended(); err != nil {
		return err
	}
	for _, name := range h.names {
		info, err := h.client.Info(ctx, name)
		held := func(holder Holder) bool { return holder.Owner == h.owner && holder.Token == h.token }
		reason := ReasonGone
		switch {
		case err != nil && verdictOf(err) == overwritten:
			reason = ReasonChanged
		case err != nil:
			return err
		case slices.ContainsFunc(info.Holders, held), len(info.Holders) >= shown: // this holder may not be among those shown
			continue
		}
		if err := h.inTurn(ctx, func() { h.lose(reason) }); err != nil {
			return err
		}
	}
	return h.ended()
}

// Renew restarts the lease, with another duration if lease is not 0. It returns a [*LostError] if the lock is lost. If
// the server refuses the duration, the former one stays. Without [NoRenew], the client renews by itself.
func (h *Hold) Renew(ctx context.Context, lease time.Duration) error {
	if lease < 0 {
		return fmt.Errorf("holdfast: lease must not be negative, got %v", lease)
	}
	if lease > 0 {
		lease = max(lease, time.Millisecond)
	}
	extended, cancel := extend(ctx)
	defer cancel()
	var a answer
	done := make(chan struct{})
	go func() { // a request that is interrupted would end its connection, and an ephemeral hold with it
		defer close(done)
		a = repeat(ctx, time.Now().Add(endless), anyTimes, func() (a answer) {
			_ = h.inTurn(context.Background(), func() { a = h.renew(forRenew, lease) })
			return a
		})
	}()
	select {
	case <-done:
	case <-extended.Done():
		return context.Cause(extended)
	}
	if err := h.ended(); err != nil {
		return err
	}
	return a.err
}

// StopRenewing leaves renewal to [Hold.Renew] from now on, as [NoRenew] does.
func (h *Hold) StopRenewing() { h.manual.Store(true) }

// Release releases the lock, also if ctx has ended. It returns a [*LostError] if the lock had been lost. If the release
// takes until 250 ms after the end of ctx, Release returns the error of ctx, and the release continues in the background. A
// second release has no effect and returns the same outcome.
func (h *Hold) Release(ctx context.Context) error { return h.ReleaseAfter(ctx, 0) }

// ReleaseAfter stops the renewal and lets the lock expire after d: for jobs that must not run twice within that time.
func (h *Hold) ReleaseAfter(ctx context.Context, d time.Duration) error {
	ctx, cancel := extend(ctx) // first: it panics if ctx is nil, and the hold must then stay as it is
	defer cancel()
	h.mu.Lock()
	first := h.kept.Err() == nil
	h.stop()
	h.mu.Unlock()
	if first && (h.ctx.Err() != nil || !h.release(ctx, d)) {
		go h.release(h.client.ctx, d)
	}
	select {
	case <-h.ctx.Done():
	case <-ctx.Done():
		return fmt.Errorf("holdfast: lock %s is being released in the background: %w", h.name(), context.Cause(ctx))
	}
	if cause := context.Cause(h.ctx); !errors.Is(cause, errReleased) {
		return cause
	}
	return nil
}
