//go:build go1.25

package holdfast

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"
)

func TestForceIsRepeatedOnlyIfItWasNotExecuted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for name, test := range map[string]struct {
			replies []any
			sent    int
			forced  bool
		}{
			"after an error reply":   {[]any{"-LOADING x\r\n", one}, 2, true},
			"not after a lost reply": {[]any{cut, one}, 1, false},
		} {
			f := newFake(t, script{"LOCK.FORCE": test.replies})
			forced, err := f.client().Force(context.Background(), "k")
			if sent := f.sent("LOCK.FORCE"); len(sent) != test.sent || forced != test.forced || (err == nil) != test.forced {
				t.Errorf("%s: %v, %v, sent %v", name, forced, err, sent)
			}
		}
	})
}

func TestObserve(t *testing.T) {
	const info = "*2\r\n+holders\r\n*1\r\n*4\r\n+owner\r\n+node#5c\r\n+token\r\n:7\r\n"
	t.Run("polls with a pause if it has no interval", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			var asked atomic.Int32
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			f := newFake(t, script{"LOCK.INFO": {func(received) string {
				if asked.Add(1) > 200 { // a loop without a pause: no time would pass in the bubble
					cancel()
				}
				return info
			}}})
			if err := f.client().Observe(ctx, "k", 0, func(Leader) {}); !errors.Is(err, context.DeadlineExceeded) || asked.Load() > 51 {
				t.Errorf("%v after %d polls", err, asked.Load())
			}
		})
	})
	t.Run("ends with a permanent error", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			for _, reply := range []string{"-NOPERM x\r\n", "-ERR unknown command 'LOCK.INFO'\r\n", "-WRONGTYPE x\r\n"} {
				f := newFake(t, script{"LOCK.INFO": {"-LOADING x\r\n", info, reply}})
				err := within(t, patience, func() error {
					return f.client().Observe(context.Background(), "k", time.Second, func(Leader) {})
				})
				if err == nil {
					t.Errorf("%s: no error", reply)
				}
			}
		})
	})
	t.Run("ends with the client", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			c := newFake(t, script{"LOCK.INFO": {info}}).client()
			err := within(t, patience, func() error {
				return c.Observe(context.Background(), "k", time.Second, func(Leader) { go func() { _ = c.Close() }() })
			})
			if !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
		})
	})
}

func TestDoEndsSoonAfterItsContext(t *testing.T) {
	for name, before := range map[string]bool{"that ended before the release": true, "that ends during the release": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {silent}})
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				defer cancel()
				began := time.Now()
				err := f.client().Do(ctx, "k", func(inner context.Context) error {
					if before {
						<-inner.Done()
					}
					return nil
				})
				if took := time.Since(began); took != time.Second+late || !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%v after %v", err, took)
				}
			})
		})
	}
}

func TestDoReturnsTheErrorOfItsFunctionUnchanged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}}).client()
		own := errors.New("own")
		if err := c.Do(context.Background(), "k", func(context.Context) error { return own }); err != own { //nolint:errorlint // unchanged
			t.Errorf("got %#v", err)
		}
	})
}

func TestElect(t *testing.T) {
	for name, test := range map[string]struct {
		release string
		fails   error
		least   int // elections in a second
		most    int
	}{
		"returns the loss of another lock":        {one, &LostError{"other", ReasonGone}, 1, 1},
		"stands again with a pause after a loss":  {null, nil, 2, 51},
		"stands again if fn fails after its loss": {null, errors.New("own"), 2, 51},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				c := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {test.release}}).client()
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				defer cancel()
				elected := 0
				err := c.Elect(ctx, "k", "v", func(context.Context, int64) error {
					if elected++; elected > 100 { // a loop without a pause: no time would pass in the bubble
						cancel()
					}
					return test.fails
				})
				if elected < test.least || elected > test.most || err == nil {
					t.Errorf("elected %d times, %v", elected, err)
				}
			})
		})
	}
}

func TestReleaseOwnerWithItsTokenIsRepeated(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for name, test := range map[string]struct {
			replies  []any
			released bool
		}{
			"finds nothing":                    {[]any{null}, false},
			"finds nothing after an error":     {[]any{"-LOADING x\r\n", null}, false},
			"finds nothing after a lost reply": {[]any{cut, null}, true},
			"releases after a lost reply":      {[]any{cut, one}, true},
		} {
			f := newFake(t, script{"LOCK.RELEASE": test.replies})
			if released, err := f.client().ReleaseOwner(context.Background(), "k", "o", 7); released != test.released || err != nil {
				t.Errorf("%s: %v, %v", name, released, err)
			}
		}
	})
}

func TestReleaseOwnerWithoutATokenFollowsARedirect(t *testing.T) {
	bubble(t, func(t *testing.T) {
		second := newFake(t, script{"LOCK.RELEASE": {one}})
		first := newFake(t, script{"LOCK.RELEASE": {"-MOVED 1 " + second.addr + "\r\n"}})
		if released, err := first.client().ReleaseOwner(context.Background(), "k", "o", 0); !released || err != nil {
			t.Errorf("%v, %v", released, err)
		}
	})
}

func TestCallsEndSoonAfterTheirContext(t *testing.T) {
	for name, call := range map[string]func(context.Context, *Hold) error{
		"Info":  func(ctx context.Context, h *Hold) error { _, err := h.client.Info(ctx, "k"); return err },
		"Force": func(ctx context.Context, h *Hold) error { _, err := h.client.Force(ctx, "k"); return err },
		"Check": func(ctx context.Context, h *Hold) error { return h.Check(ctx) },
		"Renew": func(ctx context.Context, h *Hold) error { return h.Renew(ctx, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				h := mustLock(t, newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RENEW": {silent}, "LOCK.INFO": {silent}, "LOCK.FORCE": {silent}, "LOCK.RELEASE": {one}}).client())
				ctx, cancel := context.WithCancel(context.Background())
				time.AfterFunc(100*time.Millisecond, cancel)
				began := time.Now()
				if err := call(ctx, h); !errors.Is(err, context.Canceled) || time.Since(began) > 100*time.Millisecond+late {
					t.Errorf("%v after %v", err, time.Since(began))
				}
			})
		})
	}
}

func TestErrorOfAnEndedContextMatchesBothItsErrorAndItsCause(t *testing.T) {
	for name, call := range map[string]func(context.Context, *Hold) error{
		"Lock":  func(ctx context.Context, h *Hold) error { _, err := h.client.Lock(ctx, "k"); return err },
		"Info":  func(ctx context.Context, h *Hold) error { _, err := h.client.Info(ctx, "k"); return err },
		"Renew": func(ctx context.Context, h *Hold) error { return h.Renew(ctx, 0) },
		"Observe": func(ctx context.Context, h *Hold) error {
			return h.client.Observe(ctx, "free", time.Hour, func(Leader) {})
		},
		"Release": func(ctx context.Context, h *Hold) error { return h.Release(ctx) },
		"Elect": func(ctx context.Context, h *Hold) error {
			return h.client.Elect(ctx, "k", "v", func(context.Context, int64) error { return nil })
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				own := errors.New("own")
				timeout, cancel := context.WithTimeoutCause(context.Background(), time.Second, own)
				defer cancel()
				cancelled, cancelCause := context.WithCancelCause(context.Background())
				time.AfterFunc(time.Second, func() { cancelCause(own) })
				for _, ctx := range []context.Context{timeout, cancelled} {
					info := func(r received) string {
						if r.command[1] == "free" {
							return "*0\r\n"
						}
						return silent
					}
					h := mustLock(t, newFake(t, script{"LOCK.ACQUIRE": {token, silent}, "LOCK.RENEW": {silent}, "LOCK.INFO": {info}, "LOCK.RELEASE": {silent}}).client())
					if err := call(ctx, h); !errors.Is(err, ctx.Err()) || !errors.Is(err, own) {
						t.Errorf("got %v, want %v and the cause", err, ctx.Err())
					}
				}
			})
		})
	}
}

func TestTryLockOfAnRWLockDoesNotWait(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {null}})
		rw := f.client().RWLock("k")
		for _, lock := range []func(context.Context, ...Option) (*Hold, error){rw.TryLock, rw.TryRLock} {
			if _, err := lock(context.Background()); !errors.Is(err, ErrNotAcquired) {
				t.Error(err)
			}
		}
		sent := f.sent("LOCK.ACQUIRE")
		if len(sent) != 2 || slices.Contains(sent[0].command, "SHARED") || !slices.Contains(sent[1].command, "SHARED") {
			t.Errorf("sent %v", sent)
		}
		for _, r := range sent {
			if r.option("WAIT") != "" {
				t.Errorf("sent %v", r)
			}
		}
	})
}
