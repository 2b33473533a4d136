//go:build go1.25

package holdfast

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"
)

func TestReleaseAfterRenewsEachOfSeveralNames(t *testing.T) {
	for name, test := range map[string]struct {
		replies []any // to the commands for a, b, a, b …
		want    error
		sent    int
	}{
		"is done when each is renewed":        {[]any{":8\r\n"}, nil, 2},
		"reports a loss of the second":        {[]any{":8\r\n", null}, ErrLockLost, 2},
		"is repeated after a passing error":   {[]any{":8\r\n", "-LOADING x\r\n", ":8\r\n"}, nil, 4},
		"returns a fatal error of the second": {[]any{":8\r\n", "-NOPERM x\r\n"}, ServerError("NOPERM x"), 2},
		"is repeated after an end of file":    {[]any{":8\r\n", cut, ":8\r\n"}, nil, 4},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFake(t, script{"LOCK.MACQUIRE": {token}, "LOCK.RENEW": test.replies})
				h, err := f.client().LockAll(context.Background(), []string{"a", "b"})
				if err != nil {
					t.Fatal(err)
				}
				if err := h.ReleaseAfter(context.Background(), 1500*time.Millisecond); !errors.Is(err, test.want) {
					t.Errorf("got %v, want %v", err, test.want)
				}
				sent := f.sent("LOCK.RENEW")
				if len(sent) != test.sent {
					t.Errorf("sent %v", sent)
				}
				for i, r := range sent {
					if want := fmt.Sprintf("LOCK.RENEW %s %s TOKEN 7 FENCE 8 LEASE 1500", h.names[i%2], h.Owner()); r.String() != want {
						t.Errorf("sent %v, want %v", r, want)
					}
				}
			})
		})
	}
}

func TestPipelineSendsAskingBeforeEachCommandAfterARedirect(t *testing.T) {
	bubble(t, func(t *testing.T) {
		second := newFake(t, script{"ASKING": {"+OK\r\n"}, "LOCK.RENEW": {":8\r\n"}})
		first := newFake(t, script{"LOCK.MACQUIRE": {token}, "LOCK.RENEW": {"-ASK 1 " + second.addr + "\r\n"}})
		h, err := first.client().LockAll(context.Background(), []string{"a", "b"})
		if err != nil {
			t.Fatal(err)
		}
		if err := h.ReleaseAfter(context.Background(), time.Second); err != nil {
			t.Error(err)
		}
		if asking, renewed := len(second.sent("ASKING")), len(second.sent("LOCK.RENEW")); asking != 2 || renewed != 2 {
			t.Errorf("%d ASKING, %d LOCK.RENEW", asking, renewed)
		}
	})
}

func TestReleasedHookMayCallRelease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}})
		var h *Hold
		done := make(chan error, 1)
		c := f.client(func(config *Config) {
			config.Hooks.Released = func(string, time.Duration) { done <- h.Release(context.Background()) }
		})
		h = mustLock(t, c)
		if err := within(t, patience, func() error { return h.Release(context.Background()) }); err != nil {
			t.Error(err)
		}
		if err := within(t, patience, func() error { return <-done }); err != nil {
			t.Error(err)
		}
	})
}

func TestConcurrentReleaseEndsWithItsOwnContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {silent}})
		h := mustLock(t, f.client())
		first := make(chan error, 1)
		go func() { first <- h.Release(context.Background()) }()
		f.await("LOCK.RELEASE", 1)
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		began := time.Now()
		if err := h.Release(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > 100*time.Millisecond+late {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		if err := <-first; err == nil {
			t.Error("released without a reply")
		}
	})
}

// A function that defers a release with its own context may be the last one that the process runs.
func TestReleaseIsDoneWhenItReturnsAlthoughItsContextHasEnded(t *testing.T) {
	for name, rest := range map[string]time.Duration{"Release": 0, "ReleaseAfter": time.Second} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}, "LOCK.RENEW": {":8\r\n"}})
				h := mustLock(t, f.client())
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				if err := h.ReleaseAfter(ctx, rest); err != nil {
					t.Error(err)
				}
				if n := len(f.sent("LOCK.RELEASE")) + len(f.sent("LOCK.RENEW")); n != 1 {
					t.Errorf("%d releases were sent", n)
				}
			})
		})
	}
}

// A server with the setting timeout closes connections that are idle for so long, and these holds with them.
func TestEphemeralHoldIsRenewedEveryTwoSeconds(t *testing.T) {
	for name, test := range map[string]struct {
		options []Option
		renewed int // in 9 s
	}{
		"with a long lease":  {[]Option{Ephemeral(), Lease(time.Minute)}, 4},
		"with a short lease": {[]Option{Ephemeral(), Lease(4 * time.Second)}, 8},
		"but no other hold":  {[]Option{Lease(time.Minute)}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RENEW": {renewal}, "LOCK.RELEASE": {one}})
				mustLock(t, f.client(), test.options...)
				time.Sleep(9*time.Second - 1)
				if n := len(f.sent("LOCK.RENEW")); n != test.renewed {
					t.Errorf("%d RENEWs", n)
				}
			})
		})
	}
}

func TestPanicOfTheAcquiredHookReleasesTheLock(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}})
		c := f.client(func(config *Config) { config.Hooks.Acquired = func(string, time.Duration) { panic("own") } })
		defer func() {
			if r := recover(); r != "own" {
				t.Errorf("recovered %v", r)
			}
			if n := len(f.sent("LOCK.RELEASE")); n != 1 {
				t.Errorf("%d RELEASEs", n)
			}
		}()
		mustLock(t, c)
	})
}

func TestPanicOnANilContextLeavesTheHoldAsItIs(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RENEW": {renewal}, "LOCK.RELEASE": {one}})
		h := mustLock(t, f.client())
		for name, call := range map[string]func(context.Context) error{
			"Release": h.Release,
			"Renew":   func(ctx context.Context) error { return h.Renew(ctx, 0) },
		} {
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%s did not panic", name)
					}
				}()
				_ = call(nil) //nolint:staticcheck // the wrong argument is tested
			}()
		}
		if !h.Held() {
			t.Error("the hold is not held")
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if err := h.Release(ctx); err != nil {
			t.Error(err)
		}
	})
}

// suspend makes the wall clock say that the hold is over.
func (h *hold) suspend() {
	h.mu.Lock()
	defer h.mu.Unlock()
	wall := (*uint64)(unsafe.Pointer(&h.certain)) //nolint:gosec // a flag, 33 bits of seconds, 30 bits of nanoseconds
	*wall -= 3600 << 30
}

func TestHoldIsRenewedOnceAfterASuspend(t *testing.T) { // not in a bubble, which has no wall clock of its own
	for name, test := range map[string]struct {
		renew string
		takes time.Duration
		most  int // RENEWs in 400 ms
	}{
		"if the server confirms it":   {renewal, 100 * time.Millisecond, 1},
		"and with pauses if it fails": {"-LOADING x\r\n", 0, 12},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}, "LOCK.RENEW": {func(received) string {
				time.Sleep(test.takes)
				return test.renew
			}}})
			h := mustLock(t, f.client())
			h.suspend()
			if h.Held() {
				t.Fatal("the wall clock is not over")
			}
			for began := time.Now(); time.Since(began) < 400*time.Millisecond; time.Sleep(time.Millisecond) {
				h.Held()
			}
			if n := len(f.await("LOCK.RENEW", 1)); n > test.most {
				t.Errorf("%d RENEWs", n)
			}
			if test.renew == renewal {
				eventually(t, "held again", h.Held)
			}
		})
	}
}

func TestNoRenewIsNeverRenewedByTheTimer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}, "LOCK.RENEW": {renewal}})
		h := mustLock(t, f.client(), NoRenew())
		_ = h.inTurn(context.Background(), h.attend) // as the timer does that fires just before a Renew ends
		if n := len(f.sent("LOCK.RENEW")); n > 0 || !h.Held() {
			t.Errorf("%d RENEWs, held: %v", n, h.Held())
		}
	})
}

func TestCheckReportsAnOverwrittenLockAsLost(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {null}, "LOCK.INFO": {"-WRONGTYPE x\r\n"}})
		h := mustLock(t, f.client())
		if err := h.Check(context.Background()); lossReason(err) != ReasonChanged || h.Context().Err() == nil {
			t.Error(err)
		}
	})
}

func TestCheckFindsNoLossWhenNotAllHoldersAreShown(t *testing.T) {
	bubble(t, func(t *testing.T) {
		others := strings.Repeat("*4\r\n+owner\r\n+other\r\n+token\r\n:8\r\n", shown)
		info := fmt.Sprintf("*2\r\n+holders\r\n*%d\r\n%s", shown, others)
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}, "LOCK.INFO": {info}})
		if err := mustLock(t, f.client(), Shared()).Check(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

func TestRenewKeepsTheFormerLeaseWhenTheNewOneIsRefused(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RENEW": {cut, "-ERR LEASE must be between 1 and 60000 ms\r\n", renewal}, "LOCK.RELEASE": {one}})
		h := mustLock(t, f.client(), Lease(time.Second))
		if err := h.Renew(context.Background(), -time.Second); err == nil {
			t.Error("a negative lease is accepted")
		}
		if err := h.Renew(context.Background(), time.Hour); !errors.Is(err, ServerError("ERR LEASE must be between 1 and 60000 ms")) {
			t.Errorf("renewed: %v", err)
		}
		f.await("LOCK.RENEW", 4)
		for i, want := range []string{"3600000", "3600000", "1000", "1000"} {
			if r := f.sent("LOCK.RENEW")[i]; !strings.HasSuffix(r.String(), " LEASE "+want) {
				t.Errorf("renewal %d: %v, want LEASE %s", i, r, want)
			}
		}
		if !h.Held() {
			t.Error("lost")
		}
	})
}

// tokens returns the commands that name a token.
func tokens(sent []received) []received {
	return slices.DeleteFunc(sent, func(r received) bool { return r.option("TOKEN") == "" })
}

func TestUnexpectedReplyConfirmsNothing(t *testing.T) {
	for name, test := range map[string]struct{ renew, release any }{
		"of another type": {"+OK\r\n", "+OK\r\n"},
		"of another hold": {":6\r\n", one},
		"of several":      {"*0\r\n", "*0\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RENEW": {test.renew, renewal}, "LOCK.RELEASE": {test.release, one}})
				h := mustLock(t, f.client())
				before := h.Remaining()
				time.Sleep(time.Second)
				if err := h.Renew(context.Background(), 0); err != nil || h.Remaining() < before-time.Second/2 {
					t.Errorf("%v, certain for %v", err, h.Remaining())
				}
				if err := h.Release(context.Background()); err != nil {
					t.Error(err)
				}
				if sent := f.sent("LOCK.RENEW"); len(sent) < 2 || sent[0].conn == sent[1].conn {
					t.Errorf("sent %v", sent)
				}
				if sent := tokens(f.sent("LOCK.RELEASE")); test.release != one && (len(sent) != 2 || sent[0].conn == sent[1].conn) {
					t.Errorf("sent %v", sent)
				}
			})
		})
	}
}

// One reply that cannot belong to its RENEW must not end the renewal of the other holds in the pipeline.
func TestRenewalIsConfirmedWhenALaterReplyOfItsPipelineIsUnexpected(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RENEW": {renewal, "+OK\r\n", renewal}, "LOCK.RELEASE": {one}})
		c := f.client()
		const lease = 8 * time.Second
		for _, name := range []string{"a", "b", "c"} {
			if _, err := c.Lock(context.Background(), name, Lease(lease)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(lease/4 + lease/8) // all are renewed once; what was not confirmed is repeated
		sent := map[string]int{}
		for _, r := range f.sent("LOCK.RENEW") {
			sent[r.command[1]]++
		}
		first := f.sent("LOCK.RENEW")[0].command[1]
		if len(sent) != 3 || sent[first] != 1 {
			t.Errorf("sent %v, %s first", sent, first)
		}
	})
}

func TestRenewThatIsCancelledKeepsAnEphemeralHold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}, "LOCK.RENEW": {func(received) string {
			time.Sleep(late + 200*time.Millisecond)
			return renewal
		}}})
		h := mustLock(t, f.client(), Ephemeral())
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		began := time.Now()
		if err := h.Renew(ctx, 0); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > 100*time.Millisecond+late {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		if err := h.Release(context.Background()); err != nil || len(f.sent("LOCK.RELEASE")) != 1 {
			t.Errorf("%v, %v", err, f.sent("LOCK.RELEASE"))
		}
	})
}
