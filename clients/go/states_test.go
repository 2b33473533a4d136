//go:build go1.25

package holdfast

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

type script = map[string][]any

// The tests of this file cover the cells of the table "states and inputs" in docs/client-protocol.md.

func TestAcquire(t *testing.T) {
	for name, test := range map[string]struct {
		script  script
		try     bool
		options []Option
		want    error
		asked   int // how many ACQUIREs
	}{
		"is held on a token":                    {script: script{"LOCK.ACQUIRE": {token}}, asked: 1},
		"is not acquired on nil":                {script: script{"LOCK.ACQUIRE": {null}}, options: []Option{Wait(time.Second)}, want: ErrNotAcquired, asked: 1},
		"try is not acquired on nil":            {script: script{"LOCK.ACQUIRE": {null}}, try: true, want: ErrNotAcquired, asked: 1},
		"asks again after a passing error":      {script: script{"LOCK.ACQUIRE": {"-LOADING x\r\n", "-OOM x\r\n", "-ERR too many waiters\r\n", token}}, asked: 4},
		"asks again after an end of file":       {script: script{"LOCK.ACQUIRE": {cut, cut, token}}, asked: 3},
		"asks again when superseded alone":      {script: script{"LOCK.ACQUIRE": {"-SUPERSEDED x\r\n", token}}, asked: 2},
		"asks again after an unexpected reply":  {script: script{"LOCK.ACQUIRE": {"*2\r\n+OK\r\n:0\r\n", "*2\r\n:6\r\n$-1\r\n", token}}, asked: 3},
		"ignores further elements":              {script: script{"LOCK.ACQUIRE": {"*3\r\n:7\r\n:0\r\n+new\r\n"}}, asked: 1},
		"fails on a deadlock":                   {script: script{"LOCK.ACQUIRE": {"-DEADLOCK a b\r\n"}}, want: ErrDeadlock, asked: 1},
		"fails on a wrong type":                 {script: script{"LOCK.ACQUIRE": {"-WRONGTYPE x\r\n"}}, want: ServerError("WRONGTYPE x"), asked: 1},
		"fails without permission":              {script: script{"LOCK.ACQUIRE": {"-NOPERM x\r\n"}}, want: ServerError("NOPERM x"), asked: 1},
		"fails on an unknown code":              {script: script{"LOCK.ACQUIRE": {"-NEWCODE x\r\n"}}, want: ServerError("NEWCODE x"), asked: 1},
		"fails on an unknown error":             {script: script{"LOCK.ACQUIRE": {"-ERR x\r\n"}}, want: ServerError("ERR x"), asked: 1},
		"fails if the module is not loaded":     {script: script{"LOCK.ACQUIRE": {"-ERR unknown command 'LOCK.ACQUIRE'\r\n"}}, want: ErrModuleNotLoaded, asked: 1},
		"fails if LOCK.VERSION is unknown, too": {script: script{"LOCK.VERSION": {"-ERR unknown command 'LOCK.VERSION'\r\n"}, "LOCK.ACQUIRE": {"-ERR unknown command 'LOCK.ACQUIRE'\r\n"}}, want: ErrModuleNotLoaded, asked: 1},
		"fails if the module is too old":        {script: script{"LOCK.VERSION": {"-ERR unknown command 'LOCK.VERSION'\r\n"}, "LOCK.ACQUIRE": {"-ERR wrong number of arguments\r\n"}}, want: ErrServerTooOld, asked: 1},
		"fails if the module's protocol is old": {script: script{"LOCK.VERSION": {"*2\r\n+protocol\r\n*2\r\n:1\r\n:3\r\n"}}, want: ErrServerTooOld},
		"fails if the module's protocol is new": {script: script{"LOCK.VERSION": {"*2\r\n+protocol\r\n*2\r\n:5\r\n:9\r\n"}}, want: ErrClientTooOld},
		"fails on a wrong password":             {script: script{"LOCK.VERSION": {"-NOAUTH x\r\n"}}, want: ServerError("NOAUTH x")},
		"try returns a passing error":           {script: script{"LOCK.ACQUIRE": {"-LOADING x\r\n"}}, try: true, want: ServerError("LOADING x"), asked: 1},
		"wraps the last error when time ends":   {script: script{"LOCK.ACQUIRE": {"-UNCONFIRMED x\r\n"}}, options: []Option{Wait(60 * time.Millisecond)}, want: ServerError("UNCONFIRMED x")},
		"is not acquired when time ends":        {script: script{"LOCK.ACQUIRE": {"-UNCONFIRMED x\r\n"}}, options: []Option{Wait(60 * time.Millisecond)}, want: ErrNotAcquired},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				test.script["LOCK.RELEASE"] = []any{one}
				f := newFake(t, test.script)
				c := f.client()
				lock := c.Lock
				if test.try {
					lock = c.TryLock
				}
				var h *Hold
				err := within(t, patience, func() (err error) {
					h, err = lock(context.Background(), "k", test.options...)
					return err
				})
				if test.want == nil && (err != nil || h.Fence() != 7 || !h.Held()) || test.want != nil && !errors.Is(err, test.want) {
					t.Errorf("got %v, want %v", err, test.want)
				}
				if asked := len(f.sent("LOCK.ACQUIRE")); test.asked > 0 && asked != test.asked {
					t.Errorf("%d ACQUIREs, want %d", asked, test.asked)
				}
			})
		})
	}
}

func TestAcquireNamesItsTerms(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.MACQUIRE": {token}, "LOCK.RELEASE": {one}, "LOCK.MRELEASE": {"*2\r\n:1\r\n:1\r\n"}})
		c := f.client()
		ctx := context.Background()
		for _, test := range []struct {
			lock func() (*Hold, error)
			want string
		}{
			{func() (*Hold, error) { return c.TryLock(ctx, "k") }, "LOCK.ACQUIRE k * HOLDS 1 LEASE 10000 WITHWAITED"},
			{func() (*Hold, error) { return c.TryLock(ctx, "k", Lease(1500*time.Microsecond)) }, "LOCK.ACQUIRE k * HOLDS 1 LEASE 2 WITHWAITED"},
			{func() (*Hold, error) { return c.Lock(ctx, "k") }, "LOCK.ACQUIRE k * HOLDS 1 LEASE 10000 WAIT 3600000 WITHWAITED"},
			{func() (*Hold, error) { return c.RWLock("k").RLock(ctx) }, "LOCK.ACQUIRE k * HOLDS 1 LEASE 10000 WAIT 3600000 SHARED WITHWAITED"},
			{func() (*Hold, error) { return c.Semaphore("k", 3).TryAcquire(ctx, Replicas(2)) }, "LOCK.ACQUIRE k * HOLDS 1 LEASE 10000 LIMIT 3 REPLICAS 2 WITHWAITED"},
			{func() (*Hold, error) { return c.TryLockAll(ctx, []string{"a", "b"}) }, "LOCK.MACQUIRE 2 a b * HOLDS 1 LEASE 10000 WITHWAITED"},
			{func() (*Hold, error) { return c.TryLock(ctx, "k", Ephemeral()) }, "LOCK.ACQUIRE k * HOLDS 1 LEASE 10000 EPHEMERAL WITHWAITED"},
		} {
			f.mu.Lock()
			f.log = nil
			f.mu.Unlock()
			h, err := test.lock()
			if err != nil {
				t.Fatal(err)
			}
			f.mu.Lock()
			got := strings.Replace(f.log[len(f.log)-1].String(), h.Owner(), "*", 1)
			f.mu.Unlock()
			if got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
			if len(h.Owner()) != 32 {
				t.Errorf("owner %q has not 128 bits", h.Owner())
			}
			if err := h.Release(ctx); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestAcquireAsksAgainOverAnotherConnectionWhenTheServerIsSilent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		again := make(chan struct{})
		f := newFake(t, script{
			"LOCK.ACQUIRE": {
				func(received) string { <-again; return "-SUPERSEDED x\r\n" },
				func(received) string { close(again); return token },
			},
			"LOCK.RELEASE": {one},
		})
		c := f.client()
		h := mustLock(t, c)
		asked := f.sent("LOCK.ACQUIRE")
		if len(asked) != 2 || asked[0].conn == asked[1].conn || asked[0].command[2] != asked[1].command[2] {
			t.Fatalf("asked %v", asked)
		}
		if asked[1].option("WAITED") == "" {
			t.Errorf("the second request has no WAITED: %v", asked[1])
		}
		if between := asked[1].at.Sub(asked[0].at); between < 1900*time.Millisecond {
			t.Errorf("asked again after %v", between)
		}
		_ = h.Release(context.Background())
		eventually(t, "the superseded connection is idle", func() bool {
			p := c.pool(f.addr)
			p.mu.Lock()
			defer p.mu.Unlock()
			return len(p.idle) == 2
		})
	})
}

func TestAcquireClosesASupersededConnectionThatStaysSilent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {silent, token}, "LOCK.RELEASE": {one}})
		c := f.client()
		h := mustLock(t, c)
		if err := h.Release(context.Background()); err != nil {
			t.Fatal(err)
		}
		released := f.await("LOCK.RELEASE", 2)
		if released[0].option("TOKEN") != "7" || released[1].command[3] != "ALL" || released[0].conn != released[1].conn {
			t.Errorf("a stale request may be queued, but the release is %v", released)
		}
		eventually(t, "the silent connection is closed", func() bool {
			p := c.pool(f.addr)
			p.mu.Lock()
			defer p.mu.Unlock()
			return len(p.conns) == 1
		})
	})
}

func TestAcquireWithdrawsWhenCancelled(t *testing.T) {
	for name, test := range map[string]struct {
		reply    string // to the ACQUIRE, after the first RELEASE ALL
		releases int
	}{
		"and keeps the connection":                 {null, 1},
		"again if RELEASE ALL overtook the grant":  {token, 2},
		"twice if the connection broke":            {cut, 2},
		"once if the answer is an error":           {"-UNBLOCKED x\r\n", 1},
		"once if replicas were awaited meanwhile":  {"-UNCONFIRMED x\r\n", 1},
		"once if another request took over before": {"-SUPERSEDED x\r\n", 1},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				withdrawn := make(chan struct{})
				f := newFake(t, script{
					"LOCK.ACQUIRE": {func(received) string { <-withdrawn; return test.reply }},
					"LOCK.RELEASE": {func(received) string { close(withdrawn); return one }, null},
				})
				c := f.client()
				ctx, cancel := context.WithCancel(context.Background())
				go func() { f.await("LOCK.ACQUIRE", 1); cancel() }()
				_, err := c.Lock(ctx, "k")
				if !errors.Is(err, ErrNotAcquired) || !errors.Is(err, context.Canceled) {
					t.Errorf("got %v", err)
				}
				released := f.await("LOCK.RELEASE", test.releases)
				asked := f.sent("LOCK.ACQUIRE")[0]
				for _, r := range released {
					if r.String() != fmt.Sprintf("LOCK.RELEASE k %s ALL", asked.command[2]) {
						t.Errorf("released by %v", r)
					}
				}
				if released[0].conn == asked.conn {
					t.Error("withdrawn over the connection that waits")
				}
				if test.reply == cut && released[1].at.Sub(released[0].at) < 900*time.Millisecond {
					t.Error("repeated within a second")
				}
				_ = c.Close()
				if n := len(f.sent("LOCK.RELEASE")); n != test.releases {
					t.Errorf("%d RELEASEs, want %d", n, test.releases)
				}
			})
		})
	}
}

func TestAcquireIsNotAcquiredWhenItsTimeIsOver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {silent}, "LOCK.RELEASE": {null}})
		c := f.client()
		began := time.Now()
		_, err := c.Lock(context.Background(), "k", Wait(100*time.Millisecond))
		if took := time.Since(began); !errors.Is(err, ErrNotAcquired) || took < 340*time.Millisecond || took > patience {
			t.Errorf("%v after %v", err, took)
		}
		f.await("LOCK.RELEASE", 1)
		if n := len(f.sent("LOCK.ACQUIRE")); n != 1 {
			t.Errorf("%d ACQUIREs", n)
		}
	})
}

func TestAcquireReturnsTheCauseOfItsContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		deadline, _ := ctx.Deadline()
		f := newFake(t, script{"LOCK.ACQUIRE": {func(received) string { time.Sleep(time.Until(deadline) - time.Millisecond); return null }}, "LOCK.RELEASE": {null}})
		if _, err := f.client().Lock(ctx, "k"); !errors.Is(err, ErrNotAcquired) || !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
}

func TestAcquireWithdrawsAfterABrokenConnection(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {cut, "-NOPERM x\r\n"}, "LOCK.RELEASE": {null}})
		c := f.client()
		_, err := c.Lock(context.Background(), "k")
		if !errors.Is(err, ServerError("NOPERM x")) {
			t.Errorf("got %v", err)
		}
		f.await("LOCK.RELEASE", 2)
	})
}

func TestAcquireFollowsRedirects(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for _, code := range []string{"MOVED", "ASK"} {
			second := newFake(t, script{"ASKING": {"+OK\r\n"}, "LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}, "LOCK.RENEW": {renewal}})
			first := newFake(t, script{"LOCK.ACQUIRE": {"-" + code + " 1 " + second.addr + "\r\n"}, "LOCK.RELEASE": {one}})
			h := mustLock(t, first.client())
			if got := second.sent("LOCK.ACQUIRE"); len(got) != 1 {
				t.Errorf("%s: asked %v", code, got)
			}
			if got := len(second.sent("ASKING")); (got == 1) != (code == "ASK") {
				t.Errorf("%s: %d ASKING", code, got)
			}
			if err := h.Release(context.Background()); err != nil {
				t.Error(err)
			}
			if at := map[string]*fake{"MOVED": second, "ASK": first}[code]; len(at.sent("LOCK.RELEASE")) != 1 {
				t.Errorf("%s: released elsewhere", code)
			}
		}
	})
}

func TestAcquireLooksUpThePrimaryAgainWhenItIsReadOnly(t *testing.T) {
	bubble(t, func(t *testing.T) {
		second := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}})
		first := newFake(t, script{"LOCK.ACQUIRE": {"-READONLY x\r\n"}})
		c := first.client(func(config *Config) {
			config.Locate = func(_ context.Context, _ string, stale bool) (string, error) {
				if stale {
					return second.addr, nil
				}
				return first.addr, nil
			}
		})
		mustLock(t, c)
		p := c.pool(first.addr)
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.conns) != 0 {
			t.Error("connections to the old primary are left")
		}
	})
}

func TestTryTimesOutAfterAnEighthOfItsLease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := newFake(t, script{"LOCK.ACQUIRE": {silent}, "LOCK.RELEASE": {one}}).client()
		began := time.Now()
		if _, err := c.TryLock(context.Background(), "k", Lease(4*time.Second)); err == nil {
			t.Error("held without a reply")
		}
		if took := time.Since(began); took != 500*time.Millisecond {
			t.Errorf("timed out after %v, want 500ms", took)
		}
	})
}

func TestLateGrantIsRenewedBeforeItCounts(t *testing.T) {
	// The reply arrives before the timeout of a try (50 ms), with less than half of the lease left.
	const lease = 80 * time.Millisecond
	late := func(received) string { time.Sleep(45 * time.Millisecond); return token }
	for name, test := range map[string]struct {
		renew string
		try   bool
		want  error
	}{
		"and held if confirmed":          {renewal, false, nil},
		"try is held if confirmed":       {renewal, true, nil},
		"try is not acquired on nil":     {null, true, ErrNotAcquired},
		"try is not acquired on silence": {cut, true, ErrNotAcquired},
		"and requested again on nil":     {null, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFake(t, script{"LOCK.ACQUIRE": {late, token}, "LOCK.RENEW": {test.renew, renewal}, "LOCK.RELEASE": {one}})
				c := f.client()
				var err error
				if test.try {
					_, err = c.TryLock(context.Background(), "k", Lease(lease))
				} else {
					_, err = c.Lock(context.Background(), "k", Lease(lease))
				}
				if !errors.Is(err, test.want) {
					t.Errorf("got %v, want %v", err, test.want)
				}
				if len(f.sent("LOCK.RENEW")) == 0 {
					t.Error("not renewed")
				}
				if test.want != nil && f.await("LOCK.RELEASE", 1)[0].command[3] != "ALL" {
					t.Error("not withdrawn")
				}
			})
		})
	}
}

func TestLateGrantIsRenewedAQuarterOfTheLeaseAfterItBegan(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.RENEW": {renewal}, "LOCK.RELEASE": {one}, "LOCK.ACQUIRE": {func(received) string {
			time.Sleep(1500 * time.Millisecond)
			return "*2\r\n:7\r\n:500\r\n" // it waited for half a second, so that the lease began a second ago
		}}})
		mustLock(t, f.client(), Lease(8*time.Second))
		if due := f.await("LOCK.RENEW", 1)[0].at.Sub(f.sent("LOCK.ACQUIRE")[0].at); due > 2500*time.Millisecond+gather {
			t.Errorf("renewed after %v", due)
		}
	})
}

func TestRenew(t *testing.T) {
	for name, test := range map[string]struct {
		renew   []any
		options []Option
		want    Reason
	}{
		"keeps the lock":                           {renew: []any{renewal}},
		"is repeated after an error":               {renew: []any{"-MISCONF x\r\n", "-NOPERM x\r\n", "-UNCONFIRMED x\r\n", "-ERR x\r\n", renewal}},
		"is repeated after an end of file":         {renew: []any{cut, cut, renewal}},
		"is repeated after silence":                {renew: []any{silent, renewal}},
		"loses the lock on nil":                    {renew: []any{renewal, null}, want: ReasonGone},
		"loses the lock on a wrong type":           {renew: []any{"-WRONGTYPE x\r\n"}, want: ReasonChanged},
		"loses the lock when no longer certain":    {renew: []any{"-MISCONF x\r\n"}, want: ReasonExpired},
		"loses the lock when the server is silent": {renew: []any{silent}, want: ReasonExpired},
		"is not sent without renewal":              {renew: []any{renewal}, options: []Option{NoRenew()}, want: ReasonExpired},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RENEW": test.renew, "LOCK.RELEASE": {null}})
				reported := make(chan Reason, 2)
				c := f.client(func(config *Config) {
					config.Hooks.Lost = func(_ string, reason Reason) { reported <- reason }
				})
				h := mustLock(t, c, append(test.options, Lease(time.Second))...)
				if test.want == "" {
					f.await("LOCK.RENEW", len(test.renew)+3)
					if h.Context().Err() != nil || !h.Held() {
						t.Error("lost")
					}
					for i, r := range f.sent("LOCK.RENEW") {
						if r.String() != fmt.Sprintf("LOCK.RENEW k %s TOKEN 7 LEASE 1000", h.Owner()) {
							t.Errorf("renewal %d: %v", i, r)
						}
					}
					return
				}
				within(t, patience, func() any { <-h.Lost(); return nil })
				<-h.Context().Done()
				if got := lossReason(context.Cause(h.Context())); got != test.want {
					t.Errorf("lost: %q, want %q", got, test.want)
				}
				if h.Held() || !errors.Is(h.Check(context.Background()), ErrLockLost) || !errors.Is(h.Renew(context.Background(), 0), ErrLockLost) {
					t.Error("a lost lock seems held")
				}
				for range 2 {
					if err := h.Release(context.Background()); lossReason(err) != test.want {
						t.Errorf("release: %v", err)
					}
				}
				f.await("LOCK.RELEASE", 1)
				if got := <-reported; got != test.want || len(reported) > 0 {
					t.Errorf("hook: %v, then %d more", got, len(reported))
				}
			})
		})
	}
}

func TestRelease(t *testing.T) {
	for name, test := range map[string]struct {
		replies []any
		want    error
		sent    int
	}{
		"is done on 1":                               {[]any{one}, nil, 1},
		"reports a loss on nil":                      {[]any{null}, ErrLockLost, 1},
		"is done on nil to a repetition":             {[]any{cut, null, null}, nil, 3},
		"is done on nil after silence":               {[]any{silent, null, null}, nil, 3},
		"reports a loss of an overwritten lock":      {[]any{"-WRONGTYPE x\r\n"}, ErrLockLost, 1},
		"is repeated after a passing error":          {[]any{"-LOADING x\r\n", "-BUSY x\r\n", one}, nil, 3},
		"reports a loss on nil after an error reply": {[]any{"-LOADING x\r\n", null}, ErrLockLost, 2},
		"returns a fatal error":                      {[]any{"-NOPERM x\r\n"}, ServerError("NOPERM x"), 1},
		"returns the error when the lease has ended": {[]any{"-OOM x\r\n"}, ServerError("OOM x"), 0},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": test.replies, "LOCK.RENEW": {renewal}})
				h := mustLock(t, f.client(), Lease(time.Second))
				err := within(t, patience, func() error { return h.Release(context.Background()) })
				if !errors.Is(err, test.want) {
					t.Errorf("got %v, want %v", err, test.want)
				}
				sent := f.sent("LOCK.RELEASE")
				if test.sent > 0 && len(sent) != test.sent {
					t.Errorf("%d RELEASEs, want %d", len(sent), test.sent)
				}
				for i, r := range sent {
					want := "TOKEN 7"
					if i == 2 && len(test.replies) == 3 && test.replies[1] == null { // beside the repetition, for a stale ACQUIRE (B18)
						want = "ALL"
					}
					if r.String() != fmt.Sprintf("LOCK.RELEASE k %s %s", h.Owner(), want) {
						t.Errorf("released by %v", r)
					}
				}
				if again := h.Release(context.Background()); !errors.Is(again, err) && (again == nil) != (err == nil) {
					t.Errorf("released again: %v", again)
				}
				<-h.Context().Done()
			})
		})
	}
}

func TestReplyForSeveralNamesNeedsOneElementForEach(t *testing.T) {
	for name, test := range map[string]struct{ command, wrong, right string }{
		"renewal, one number":      {"LOCK.MRENEW", ":7\r\n", "*2\r\n:7\r\n:7\r\n"},
		"renewal, three elements":  {"LOCK.MRENEW", "*3\r\n:7\r\n:7\r\n:7\r\n", "*2\r\n:7\r\n:7\r\n"},
		"release, one number":      {"LOCK.MRELEASE", ":1\r\n", "*2\r\n:1\r\n:1\r\n"},
		"release, one element":     {"LOCK.MRELEASE", "*1\r\n:1\r\n", "*2\r\n:1\r\n:1\r\n"},
		"release, a simple string": {"LOCK.MRELEASE", "*2\r\n:1\r\n+OK\r\n", "*2\r\n:1\r\n:1\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFake(t, script{"LOCK.MACQUIRE": {token}, "LOCK.MRELEASE": {"*2\r\n:1\r\n:1\r\n"}, test.command: {test.wrong, test.right}})
				h, err := f.client().LockAll(context.Background(), []string{"a", "b"})
				if err != nil {
					t.Fatal(err)
				}
				if test.command == "LOCK.MRENEW" {
					if err := h.Renew(context.Background(), 0); err != nil {
						t.Error(err)
					}
				}
				if err := h.Release(context.Background()); err != nil {
					t.Error(err)
				}
				if sent := f.sent(test.command); len(sent) < 2 { // the timer may renew as well
					t.Errorf("sent %v", sent)
				}
			})
		})
	}
}

func TestReleaseContinuesInTheBackgroundWhenItsContextEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for _, when := range []string{"before", "meanwhile"} {
			proceed := make(chan struct{})
			f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {func(received) string { <-proceed; return one }}})
			h := mustLock(t, f.client())
			ctx, cancel := context.WithCancel(context.Background())
			if when == "before" {
				cancel()
			} else {
				go func() { f.await("LOCK.RELEASE", 1); cancel() }()
			}
			if err := within(t, patience, func() error { return h.Release(ctx) }); !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", when, err)
			}
			f.await("LOCK.RELEASE", 1)
			close(proceed)
			if err := h.Release(context.Background()); err != nil {
				t.Errorf("%s: then %v", when, err)
			}
		}
	})
}

func TestReleaseEndsWithTheLeaseIfNoConnectionIsFree(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}})
		c := f.client(func(config *Config) { config.MaxConnections = 4 })
		h := mustLock(t, c, Lease(time.Second), NoRenew())
		p := c.pool(f.addr)
		for range 4 {
			busy, err := p.get(context.Background(), forOther, time.Second, time.Now().Add(time.Second))
			if err != nil {
				t.Fatal(err)
			}
			defer p.put(busy, answer{})
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		began := time.Now()
		if err := h.Release(ctx); !errors.Is(err, errNoConnection) || time.Since(began) > time.Second+h.silence() {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

func TestReleaseEndsTheRenewals(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RENEW": {silent}, "LOCK.RELEASE": {silent}})
		h := mustLock(t, f.client(), Lease(time.Second))
		f.await("LOCK.RENEW", 1)
		_ = h.Release(context.Background())
		released := f.sent("LOCK.RELEASE")[0].at
		for _, r := range f.sent("LOCK.RENEW") {
			if r.at.After(released) {
				t.Error("renewed after the release")
			}
		}
	})
}

func TestReleaseDropsARenewalThatWaitsForAConnection(t *testing.T) {
	bubble(t, func(t *testing.T) {
		proceed := make(chan struct{})
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RENEW": {renewal}, "LOCK.RELEASE": {one}, "LOCK.INFO": {func(received) string {
			<-proceed
			return "*0\r\n"
		}}})
		c := f.client(func(config *Config) { config.MaxConnections = 4 })
		h := mustLock(t, c, Lease(8*time.Second))
		time.Sleep(1900 * time.Millisecond)
		for range 4 {
			go func() { _, _ = c.Info(context.Background(), "k") }()
		}
		f.await("LOCK.INFO", 4)
		time.Sleep(200 * time.Millisecond) // the renewal is due
		go func() { time.Sleep(time.Millisecond); close(proceed) }()
		if err := h.Release(context.Background()); err != nil {
			t.Error(err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if sent := f.sent("LOCK.RENEW"); len(sent) > 0 {
			t.Errorf("sent %v", sent)
		}
	})
}

func TestReleaseAfterRaisesTheToken(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RENEW": {cut, ":8\r\n"}})
		h := mustLock(t, f.client())
		if err := h.ReleaseAfter(context.Background(), 1500*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		for _, r := range f.await("LOCK.RENEW", 2) {
			if r.String() != fmt.Sprintf("LOCK.RENEW k %s TOKEN 7 FENCE 8 LEASE 1500", h.Owner()) {
				t.Errorf("sent %v", r)
			}
		}
	})
}

func TestWithdrawalIsRepeatedUntilAnswered(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {silent}, "LOCK.RELEASE": {cut, "-LOADING x\r\n", silent, one}})
		c := f.client()
		ctx, cancel := context.WithCancel(context.Background())
		go func() { f.await("LOCK.ACQUIRE", 1); cancel() }()
		if _, err := c.Lock(ctx, "k", Lease(5*time.Second)); !errors.Is(err, ErrNotAcquired) {
			t.Error(err)
		}
		f.await("LOCK.RELEASE", 4)
	})
}

func TestWithdrawalIsRepeatedOverAnotherConnectionAfterAnUnexpectedReply(t *testing.T) {
	for names, wrong := range map[string]string{"a": "+OK\r\n", "a b": ":1\r\n"} {
		t.Run(names, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				release, right := "LOCK.RELEASE", one
				if len(names) > 1 {
					release, right = "LOCK.MRELEASE", "*2\r\n:1\r\n$-1\r\n"
				}
				f := newFake(t, script{"LOCK.ACQUIRE": {silent}, "LOCK.MACQUIRE": {silent}, release: {wrong, right}})
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				defer cancel()
				if _, err := f.client().LockAll(ctx, strings.Fields(names)); !errors.Is(err, ErrNotAcquired) {
					t.Error(err)
				}
				if sent := f.await(release, 2); sent[0].conn == sent[1].conn {
					t.Errorf("sent %v", sent)
				}
			})
		})
	}
}

func TestWithdrawalEndsOnAFatalError(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {cut, "-NOPERM x\r\n"}, "LOCK.RELEASE": {"-NOPERM x\r\n"}})
		c := f.client()
		_, _ = c.Lock(context.Background(), "k")
		f.await("LOCK.RELEASE", 1)
		_ = c.Close()
		if n := len(f.sent("LOCK.RELEASE")); n != 1 {
			t.Errorf("%d RELEASEs", n)
		}
	})
}

func TestLossOfOneNameReleasesTheOthers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.MACQUIRE": {token}, "LOCK.MRENEW": {"*2\r\n:7\r\n$-1\r\n"}, "LOCK.MRELEASE": {"*2\r\n:1\r\n$-1\r\n"}})
		h, err := f.client().LockAll(context.Background(), []string{"a", "b"}, Lease(time.Second))
		if err != nil {
			t.Fatal(err)
		}
		within(t, patience, func() any { <-h.Lost(); return nil })
		f.await("LOCK.MRELEASE", 1)
	})
}

func TestEphemeralHoldIsLostWithItsConnection(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RENEW": {renewal}, "LOCK.RELEASE": {one}})
		c := f.client()
		h := mustLock(t, c, Ephemeral(), Lease(time.Second))
		own := f.sent("LOCK.ACQUIRE")[0].conn
		if got := f.await("LOCK.RENEW", 2)[1].conn; got != own {
			t.Errorf("renewed over connection %d, acquired over %d", got, own)
		}
		p := c.pool(f.addr)
		p.mu.Lock()
		if len(p.conns)+len(p.idle) != 0 {
			t.Error("the pool still counts the connection")
		}
		p.mu.Unlock()
		f.cutAll()
		within(t, patience, func() any { <-h.Lost(); return nil })
		if got := lossReason(context.Cause(h.Context())); got != ReasonDisconnected {
			t.Errorf("lost: %q", got)
		}
		h = mustLock(t, c, Ephemeral())
		if err := h.Release(context.Background()); err != nil {
			t.Error(err)
		}
		if asked, released := f.sent("LOCK.ACQUIRE"), f.sent("LOCK.RELEASE"); asked[1].conn != released[0].conn {
			t.Error("released over another connection")
		}
	})
}

func TestReleaseOfAnEphemeralHoldWithoutAReplyEndsItsConnection(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for _, reply := range []string{cut, silent} {
			f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {reply}, "LOCK.RENEW": {reply}})
			c := f.client()
			h := mustLock(t, c, Ephemeral())
			if err := h.Release(context.Background()); err != nil || len(f.sent("LOCK.RELEASE")) != 1 {
				t.Errorf("%v, %v", err, f.sent("LOCK.RELEASE"))
			}
			if err := h.conn.SetDeadline(time.Time{}); !errors.Is(err, io.ErrClosedPipe) {
				t.Errorf("the connection is open: %v", err)
			}
			h = mustLock(t, c, Ephemeral())
			if err := h.ReleaseAfter(context.Background(), time.Second); err == nil { // the server may have released it
				t.Error("reported as held for a second")
			}
		}
	})
}

func TestRenewIsRepeatedWhileTheServerIsLoading(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for _, option := range []Option{Replicas(1), NoRenew()} { // renewed by the timer and by Renew
			f := newFake(t, script{"LOCK.VERSION": {version, "-LOADING x\r\n", "-LOADING x\r\n", version}, "LOCK.ACQUIRE": {token}, "LOCK.RENEW": {cut, renewal}, "LOCK.RELEASE": {one}})
			c := f.client()
			h := mustLock(t, c, option, Lease(2*time.Second))
			p := c.pool(f.addr)
			p.mu.Lock()
			p.proven = false // as if the server had been replaced
			p.mu.Unlock()
			if err := h.Renew(context.Background(), 0); err != nil {
				t.Error(err)
			}
			f.await("LOCK.RENEW", 2)
			if err := h.Release(context.Background()); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestGivenOwnerIsNeverRepeated(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"PING": {"+PONG\r\n"}, "LOCK.ACQUIRE": {cut}, "LOCK.RELEASE": {cut}})
		c := f.client()
		_, err := c.TryLock(context.Background(), "k", Owner("app"))
		if err == nil || errors.Is(err, ErrNotAcquired) || !strings.Contains(err.Error(), "lease") {
			t.Errorf("got %v", err)
		}
		if _, err := c.ReleaseOwner(context.Background(), "k", "app", 0); err == nil {
			t.Error("no error")
		}
		_ = c.Close()
		if a, r := f.sent("LOCK.ACQUIRE"), f.sent("LOCK.RELEASE"); len(a) != 1 || len(r) != 1 || a[0].command[3] != "NEW" || len(r[0].command) != 3 {
			t.Errorf("sent %v, %v", a, r)
		}
	})
}

func TestDialFailureIsRepeatedWithinTheTime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}})
		var dials int
		c := f.client(func(config *Config) {
			config.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
				if dials++; dials < 4 { // one attempt at a time
					return nil, errors.New("refused")
				}
				return dialFake(ctx, addr)
			}
		})
		mustLock(t, c)
		if dials != 4 {
			t.Errorf("%d attempts", dials)
		}
	})
}
