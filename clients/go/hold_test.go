//go:build go1.25

package holdfast

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"
)

func TestReleaseAfterRenewsEachOfSeveralNames(t *testing.T) {
	for name, test := range map[string]struct {
		replies []any // to the commands for a, b, a, b …
		want    error
		sent    int
	}{
		"is done when each is renewed":        {[]any{":8\r\n"}, nil, 2},
		"tells a loss of the second":          {[]any{":8\r\n", null}, ErrLockLost, 2},
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

func TestEachCommandOfAPipelineFollowsARedirectWithAsking(t *testing.T) {
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
