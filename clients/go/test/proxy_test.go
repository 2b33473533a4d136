package test

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast"
	"holdfast/internal/testserver"
)

type fault int

const (
	none      fault = iota
	cutBefore       // the connection is cut, and the message does not arrive
	cutAfter        // the message arrives, then the connection is cut
	swallow         // from this message on, the connection passes nothing
	faults
)

// A proxy between a client and its server injects a fault at one message.
type proxy struct {
	addr   string
	target string

	mu       sync.Mutex
	conns    map[net.Conn]bool
	messages int
	fault    fault
	at       int
}

func newProxy(t testing.TB, s *testserver.Server) *proxy {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(s.Dir, "p"))
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{addr: l.Addr().String(), target: s.Addr, conns: map[net.Conn]bool{}}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go p.serve(c)
		}
	}()
	t.Cleanup(func() { _ = l.Close(); p.cut() })
	return p
}

func (p *proxy) server() *testserver.Server { return &testserver.Server{Addr: p.addr} }

func (p *proxy) serve(client net.Conn) {
	network := "tcp"
	if strings.HasPrefix(p.target, "/") {
		network = "unix"
	}
	server, err := net.Dial(network, p.target)
	if err != nil {
		_ = client.Close()
		return
	}
	p.mu.Lock()
	p.conns[client], p.conns[server] = true, true
	p.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() { p.pass(client, server) })
	both.Go(func() { p.pass(server, client) })
	both.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, client)
	delete(p.conns, server)
}

// pass copies messages: what arrives in one read counts as one.
func (p *proxy) pass(from, to net.Conn) {
	defer func() { _, _ = from.Close(), to.Close() }()
	b := make([]byte, 1<<16)
	swallowing := false
	for {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		p.mu.Lock()
		fault := none
		if p.messages++; p.messages == p.at {
			fault = p.fault
		}
		p.mu.Unlock()
		swallowing = swallowing || fault == swallow
		if fault == cutBefore {
			return
		}
		if swallowing {
			continue
		}
		if _, err := to.Write(b[:n]); err != nil || fault == cutAfter {
			return
		}
	}
}

// inject plans a fault at the n-th message from now on.
func (p *proxy) inject(f fault, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.messages, p.fault, p.at = 0, f, n
}

// cut ends all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}

// Whichever message is lost, all calls but the try succeed, no loss is reported, and no hold or waiter is left at the server. The
// messages are those of connecting, a wait that is granted, a renewal, a check, a release and a try.
func TestCallsSurviveAFaultAtEveryMessage(t *testing.T) {
	s := testserver.Start(t)
	other := client(t, s)
	var all sync.WaitGroup
	defer all.Wait()
	for f := cutBefore; f < faults; f++ {
		for n := 1; n <= 14; n++ {
			name := fmt.Sprintf("fault-%d-%d", f, n)
			all.Go(func() {
				inner := *s
				inner.Dir = t.TempDir()
				p := newProxy(t, &inner)
				c := client(t, p.server())
				p.inject(f, n)
				before, err := other.Lock(short(t), name)
				if err != nil {
					t.Error(err)
					return
				}
				granted := make(chan *holdfast.Hold)
				go func() {
					h, err := c.Lock(short(t), name, holdfast.Lease(30*time.Second))
					if err != nil {
						t.Errorf("%s: %v", name, err)
					}
					granted <- h
				}()
				waiting(t, other, name, 1)
				if err := before.Release(ctx); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				h := <-granted
				if h == nil {
					return
				}
				if err := h.Renew(short(t), 0); err != nil {
					t.Errorf("%s: renew: %v", name, err)
				}
				if err := h.Check(short(t)); err != nil {
					t.Errorf("%s: check: %v", name, err)
				}
				if err := h.Release(short(t)); err != nil {
					t.Errorf("%s: release: %v", name, err)
				}
				if again, err := c.TryLock(short(t), name); err != nil && !errors.Is(err, holdfast.ErrNotAcquired) {
					t.Logf("%s: try: %v", name, err) // a try is not repeated
				} else if err == nil {
					_ = again.Release(short(t))
				}
				free(t, other, name)
			})
		}
	}
}
