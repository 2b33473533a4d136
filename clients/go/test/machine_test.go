package test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"holdfast"
	"holdfast/internal/testserver"
)

// A machine makes random calls to one lock with a new name, and compares each outcome with its model of the lock.
type machine struct {
	client *holdfast.Client
	name   string
	shared bool // the holds are shared
	held   []*holdfast.Hold
	lost   []*holdfast.Hold // force-released
	fence  int64            // the greatest so far
}

func (m *machine) Lock(t *rapid.T) {
	shared := rapid.Bool().Draw(t, "shared")
	free := len(m.held) == 0 || shared && m.shared
	var options []holdfast.Option
	if shared {
		options = append(options, holdfast.Shared())
	}
	var h *holdfast.Hold
	var err error
	if rapid.Bool().Draw(t, "wait") {
		wait := 20 * time.Second // a busy machine needs time even for a free lock
		if !free {
			wait = 2 * time.Millisecond
		}
		h, err = m.client.Lock(ctx, m.name, append(options, holdfast.Wait(wait))...)
	} else {
		h, err = m.client.TryLock(ctx, m.name, options...)
	}
	if free != (err == nil) || err != nil && !errors.Is(err, holdfast.ErrNotAcquired) {
		t.Fatalf("free: %v, but %v", free, err)
	}
	if err != nil {
		return
	}
	if h.Fence() <= m.fence {
		t.Fatalf("fence %d after %d", h.Fence(), m.fence)
	}
	m.fence, m.shared = h.Fence(), shared
	m.held = append(m.held, h)
}

func (m *machine) pick(t *rapid.T) int {
	if len(m.held) == 0 {
		t.Skip("nothing is held")
	}
	return rapid.IntRange(0, len(m.held)-1).Draw(t, "hold")
}

func (m *machine) Release(t *rapid.T) {
	i := m.pick(t)
	if err := m.held[i].Release(ctx); err != nil {
		t.Fatal(err)
	}
	m.held = append(m.held[:i:i], m.held[i+1:]...)
}

func (m *machine) Renew(t *rapid.T) {
	h := m.held[m.pick(t)]
	lease := time.Duration(rapid.IntRange(10, 60).Draw(t, "seconds")) * time.Second
	if err := h.Renew(ctx, lease); err != nil {
		t.Fatal(err)
	}
	if left := h.Remaining(); left > lease || left < lease/2 {
		t.Fatalf("remaining %v of %v", left, lease)
	}
}

func (m *machine) CheckHold(t *rapid.T) {
	if err := m.held[m.pick(t)].Check(ctx); err != nil {
		t.Fatal(err)
	}
}

func (m *machine) Force(t *rapid.T) {
	forced, err := m.client.Force(ctx, m.name)
	if err != nil || forced != (len(m.held) > 0) {
		t.Fatalf("forced: %v, %v; %d held it", forced, err, len(m.held))
	}
	m.lost, m.held = append(m.lost, m.held...), nil
}

func (m *machine) ReleaseLost(t *rapid.T) {
	if len(m.lost) == 0 {
		t.Skip("nothing is lost")
	}
	if err := m.lost[0].Release(ctx); !errors.Is(err, holdfast.ErrLockLost) {
		t.Fatalf("released a lost lock: %v", err)
	}
	m.lost = m.lost[1:]
}

// Check compares the server with the model after every call.
func (m *machine) Check(t *rapid.T) {
	info, err := m.client.Info(ctx, m.name)
	if err != nil || len(info.Holders) != len(m.held) || info.Waiters != 0 {
		t.Fatalf("%+v, %v; the model has %d holders", info, err, len(m.held))
	}
}

func TestRandomCallsAgreeWithAModel(t *testing.T) {
	c := client(t, testserver.Start(t))
	n := 0
	rapid.Check(t, func(t *rapid.T) {
		n++
		m := &machine{client: c, name: fmt.Sprint("machine", n)}
		t.Repeat(rapid.StateMachineActions(m))
	})
}
