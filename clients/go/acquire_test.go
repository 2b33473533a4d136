//go:build go1.25

package holdfast

import (
	"context"
	"math"
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
			if asked++; asked > 10 { // a loop without a pause: the bubble's clock stands still
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

func TestGrantOfWhichTooLittleIsCertainIsRequestedAgainAfterAPause(t *testing.T) {
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

func TestLockAllKeepsItsNames(t *testing.T) {
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
