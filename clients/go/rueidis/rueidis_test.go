package rueidis

import (
	"context"
	"testing"
	"time"

	"github.com/redis/rueidis"
)

// hanging is a client whose server does not reply.
type hanging struct {
	rueidis.Client
	asked chan struct{}
}

func (h *hanging) B() rueidis.Builder { return rueidis.Builder{} }

func (h *hanging) Do(ctx context.Context, _ rueidis.Completed) rueidis.RedisResult {
	h.asked <- struct{}{}
	<-ctx.Done()
	return rueidis.RedisResult{}
}

func TestHangingLookUpDelaysNoLookUpInTheKnownMap(t *testing.T) {
	client := &hanging{asked: make(chan struct{}, 1)}
	c := &cluster{client: client}
	c.known.Store(&slotMap{ranges: []slots{{0, 16383, "node:1"}}})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { _, _ = c.locate(ctx, "k", true) }()
	<-client.asked
	found := make(chan string, 1)
	go func() {
		addr, _ := c.locate(ctx, "k", false)
		found <- addr
	}()
	select {
	case addr := <-found:
		if addr != "node:1" {
			t.Errorf("found %q", addr)
		}
	case <-time.After(time.Second):
		t.Error("it waits for the other look-up")
	}
}
