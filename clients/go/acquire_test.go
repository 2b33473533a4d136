//go:build go1.25

package holdfast

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestTimesAreRoundedUpToMilliseconds(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "1", 1: "1", time.Millisecond: "1", time.Millisecond + 1: "2", math.MaxInt64: "9223372036855",
	} {
		if got := millis(d); got != want {
			t.Errorf("%d ns: %s ms, want %s", d, got, want)
		}
	}
}

func TestLeaseBelowAMillisecondIsRoundedUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		asked := 0
		f := newFake(t, script{"LOCK.RENEW": {renewal}, "LOCK.RELEASE": {one}, "LOCK.ACQUIRE": {func(received) string {
			if asked++; asked > 10 { // a loop without a pause: no time would pass in the bubble
				return "-ERR a loop\r\n"
			}
			return token
		}}})
		h := mustLock(t, f.client(), Lease(10), NoRenew())
		if asked != 1 {
			t.Errorf("asked %d times", asked)
		}
		if left := h.Remaining(); left <= time.Millisecond/2 || left > time.Millisecond {
			t.Errorf("certain for %v", left)
		}
	})
}

func TestLockAsksAgainAfterAPauseWhenAGrantIsNotCertainForLong(t *testing.T) {
	bubble(t, func(t *testing.T) {
		slow := func(reply string) func(received) string {
			return func(received) string { time.Sleep(45 * time.Millisecond); return reply }
		}
		for name, reply := range map[string]string{"confirmed": renewal, "lost": null, "refused": "-NOPERM x\r\n"} {
			f := newFake(t, script{"LOCK.ACQUIRE": {slow(token), token}, "LOCK.RENEW": {slow(reply), renewal}, "LOCK.RELEASE": {one}})
			mustLock(t, f.client(), Lease(80*time.Millisecond), NoRenew())
			asked, renewed := f.sent("LOCK.ACQUIRE"), f.sent("LOCK.RENEW")
			if len(asked) != 2 || asked[1].at.Sub(renewed[0].at) < 45*time.Millisecond+minPause {
				t.Errorf("%s: asked %v, renewed %v", name, asked, renewed)
			}
		}
	})
}

func TestLockAllCopiesItsNames(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.MACQUIRE": {token}, "LOCK.MRELEASE": {"*2\r\n:1\r\n:1\r\n"}})
		names := []string{"a", "b"}
		h, err := f.client().LockAll(context.Background(), names)
		if err != nil {
			t.Fatal(err)
		}
		names[0] = "x"
		if err := h.Release(context.Background()); err != nil {
			t.Error(err)
		}
		if got := f.sent("LOCK.MRELEASE")[0].command[2]; got != "a" {
			t.Errorf("released %s", got)
		}
	})
}

// An owner that the application chose must not be released with ALL: a late copy could release a later hold.
func TestGivenOwnerReleasesALateGrantByItsToken(t *testing.T) {
	late := func(d time.Duration) func(received) string {
		return func(received) string { time.Sleep(d); return token }
	}
	for name, test := range map[string]struct {
		reply   any
		timeout time.Duration // of the caller
		renew   string
		want    error // what the error matches; it does not match ErrNotAcquired then
	}{
		"cancelled":        {late(200 * time.Millisecond), 100 * time.Millisecond, renewal, context.DeadlineExceeded},
		"silent":           {late(1200 * time.Millisecond), time.Minute, renewal, os.ErrDeadlineExceeded},
		"not certain":      {late(45 * time.Millisecond), time.Minute, null, nil},
		"renewal was lost": {late(45 * time.Millisecond), time.Minute, cut, nil},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFake(t, script{"PING": {"+PONG\r\n"}, "LOCK.ACQUIRE": {test.reply}, "LOCK.RENEW": {test.renew}, "LOCK.RELEASE": {"-LOADING x\r\n", one}})
				lease := 10 * time.Second
				if test.want == nil {
					lease = 80 * time.Millisecond
				}
				ctx, cancel := context.WithTimeout(context.Background(), test.timeout)
				defer cancel()
				c := f.client()
				_, err := c.TryLock(ctx, "k", Owner("app"), Lease(lease), NoRenew())
				if test.want == nil && !errors.Is(err, ErrNotAcquired) {
					t.Errorf("got %v", err)
				}
				if test.want != nil && (!errors.Is(err, test.want) || errors.Is(err, ErrNotAcquired) || !strings.Contains(err.Error(), "lease may be left")) {
					t.Errorf("got %v", err)
				}
				for _, r := range f.await("LOCK.RELEASE", 2) {
					if r.String() != "LOCK.RELEASE k app TOKEN 7" {
						t.Errorf("sent %v", r)
					}
				}
			})
		})
	}
}

func TestWithdrawalFreesItsConnectionsSoon(t *testing.T) {
	for name, options := range map[string][]Option{"own owner": nil, "given owner": {Owner("app")}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFake(t, script{"PING": {"+PONG\r\n"}, "LOCK.ACQUIRE": {silent}, "LOCK.RELEASE": {one}})
				c := f.client()
				lock := c.Lock
				if options != nil {
					lock = c.TryLock
				}
				ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
				defer cancel()
				if _, err := lock(ctx, "k", append(options, Lease(time.Hour))...); err == nil {
					t.Fatal("acquired")
				}
				time.Sleep(askAgain + time.Second/2) // another RELEASE ALL follows a second after it
				p := c.pool(f.addr)
				p.mu.Lock()
				defer p.mu.Unlock()
				if busy := len(p.conns) - len(p.idle); busy != 0 {
					t.Errorf("%d connections are busy", busy)
				}
			})
		})
	}
}

func TestTryReturnsAPassingErrorAndNotErrNotAcquired(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for _, reply := range []string{"OOM x", "MISCONF x", "LOADING x", "CLUSTERDOWN x"} {
			f := newFake(t, script{"LOCK.ACQUIRE": {"-" + reply + "\r\n"}, "LOCK.RELEASE": {one}})
			_, err := f.client().TryLock(context.Background(), "name")
			if !errors.Is(err, ServerError(reply)) || errors.Is(err, ErrNotAcquired) || !strings.Contains(err.Error(), "name") {
				t.Errorf("%s: %v", reply, err)
			}
		}
	})
}

func TestUnexpectedReplyToAcquireClosesTheConnection(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {"+NONSENSE\r\n", token}, "LOCK.RELEASE": {one}})
		hold, err := f.client().Lock(context.Background(), "k", Wait(5*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		_ = hold.Release(context.Background())
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.opened < 2 {
			t.Errorf("%d connections", f.opened)
		}
	})
}

func TestGivenOwnerPausesWhenItsConnectionsBreak(t *testing.T) {
	bubble(t, func(t *testing.T) {
		opened := 0
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "PING": {func(received) string {
			if opened++; opened > 100 { // a loop without a pause: no time would pass in the bubble
				return "+PONG\r\n"
			}
			return cut
		}}})
		c := f.client()
		for range 10 {
			if _, err := c.TryLock(context.Background(), "k", Owner("app")); err == nil {
				t.Fatal("acquired")
			}
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.opened > 11 {
			t.Errorf("%d connections", f.opened)
		}
	})
}

func TestLimitBelowOneIsRefused(t *testing.T) {
	c := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}}).client()
	for _, limit := range []int{0, -1} {
		want := fmt.Sprintf("holdfast: Limit must be at least 1, got %d", limit)
		if _, err := c.Semaphore("k", limit).TryAcquire(context.Background()); err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// A client whose connections never break learns only from -MOVED that a slot has moved.
func TestLookUpIsStaleAfterARedirect(t *testing.T) {
	bubble(t, func(t *testing.T) {
		second := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}})
		first := newFake(t, script{"LOCK.ACQUIRE": {"-MOVED 1 " + second.addr + "\r\n"}})
		var looked []bool // whether the map was stale
		addr := first.addr
		c := first.client(func(config *Config) {
			config.Locate = func(_ context.Context, _ string, stale bool) (string, error) {
				if looked = append(looked, stale); stale {
					addr = second.addr
				}
				return addr, nil
			}
		})
		for range 3 {
			if err := mustLock(t, c).Release(context.Background()); err != nil {
				t.Error(err)
			}
		}
		if want := []bool{false, true, false}; !slices.Equal(looked, want) {
			t.Errorf("looked up %v, want %v", looked, want)
		}
		if n := len(first.sent("LOCK.ACQUIRE")); n != 1 {
			t.Errorf("the old node got %d ACQUIREs", n)
		}
	})
}

func TestRedirectIsDialledAtTheAddressThatItNames(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for named, want := range map[string]string{
			"10.0.0.2:7000": "10.0.0.2:7000", "2001:db8::1:7000": "[2001:db8::1]:7000", "::1:7000": "[::1]:7000", ":7000": "[::5]:7000",
		} {
			f := newFake(t, script{"LOCK.ACQUIRE": {"-MOVED 1 " + named + "\r\n", token}, "LOCK.RELEASE": {one}})
			dialled := make(chan string, 2)
			c := f.client(func(config *Config) {
				config.Addr = "[::5]:6000"
				config.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
					dialled <- addr
					return dialFake(ctx, f.addr)
				}
			})
			mustLock(t, c)
			if <-dialled; len(dialled) != 1 || <-dialled != want {
				t.Errorf("%s: not %s", named, want)
			}
		}
	})
}

func TestReplyIsIncompleteWhenALengthExceedsTheInput(t *testing.T) {
	for _, length := range []int64{math.MaxInt64, math.MaxInt64 - 1} {
		for _, kind := range "$*" {
			if _, err := read(bufio.NewReader(strings.NewReader(fmt.Sprintf("%c%d\r\nab\r\n", kind, length)))); err == nil {
				t.Errorf("%c%d is a reply", kind, length)
			}
		}
	}
}

func TestLockEndsWithItsContextWhenTheNodeOfARedirectIsSilent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		second := newFake(t, script{"ASKING": {silent}})
		first := newFake(t, script{"LOCK.ACQUIRE": {"-ASK 1 " + second.addr + "\r\n"}})
		ctx, cancel := context.WithCancel(context.Background())
		go func() { second.await("ASKING", 1); cancel() }()
		began := time.Now()
		if _, err := first.client().Lock(ctx, "k"); !errors.Is(err, ErrNotAcquired) || time.Since(began) > late {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

func TestAcquireWaitsForTheTimeThatConnectingHasLeft(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {null}})
		c := f.client(func(config *Config) {
			config.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
				time.Sleep(1500 * time.Millisecond)
				return dialFake(ctx, addr)
			}
		})
		if _, err := c.Lock(context.Background(), "k", Wait(4*time.Second)); !errors.Is(err, ErrNotAcquired) {
			t.Error(err)
		}
		if wait := f.sent("LOCK.ACQUIRE")[0].option("WAIT"); wait != "2500" {
			t.Errorf("WAIT %s, want 2500", wait)
		}
	})
}
