//go:build go1.25

package holdfast

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestPoolOpensNoMoreThanItsConnections(t *testing.T) {
	bubble(t, func(t *testing.T) {
		proceed := make(chan struct{})
		f := newFake(t, script{"LOCK.ACQUIRE": {func(received) string { <-proceed; return token }}, "LOCK.RELEASE": {one}})
		c := f.client(func(config *Config) { config.MaxConnections = 5 })
		var done sync.WaitGroup
		for i := range 20 {
			done.Add(1)
			go func() {
				defer done.Done()
				if _, err := c.TryLock(context.Background(), fmt.Sprint(i)); err != nil {
					t.Error(err)
				}
			}()
		}
		f.await("LOCK.ACQUIRE", 5)
		close(proceed)
		done.Wait()
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.opened > 5 {
			t.Errorf("%d connections", f.opened)
		}
	})
}

func TestWaitsLeaveConnectionsFree(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan struct{})
		f := newFake(t, script{"LOCK.RELEASE": {one}, "LOCK.INFO": {"*0\r\n"}, "LOCK.ACQUIRE": {func(r received) string {
			switch r.option("WAIT") {
			case "", "100": // a request that polls
				return null
			}
			<-release
			return token
		}}})
		c := f.client(func(config *Config) { config.MaxConnections = 4 })
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		var done sync.WaitGroup
		for range 4 { // not for a mutex: all but one would wait in the client
			done.Add(1)
			go func() {
				defer done.Done()
				if _, err := c.Lock(ctx, "k", Shared()); err != nil {
					t.Error(err)
				}
			}()
		}
		eventually(t, "two waits poll", func() bool {
			polls := 0
			for _, r := range f.sent("LOCK.ACQUIRE") {
				if wait := r.option("WAIT"); wait == "100" {
					polls++
					if r.option("WAITED") == "" {
						t.Error("a poll names no WAITED")
					}
				}
			}
			return polls >= 2
		})
		if _, err := c.Info(ctx, "k"); err != nil {
			t.Error(err)
		}
		close(release)
		done.Wait()
	})
}

// exhausted returns a client with two waits, which have all connections that waits may have, and a function that ends
// them. Polls, and waits for the empty name, get the replies of polled.
func exhausted(t *testing.T, polled func() string) (*Client, func()) {
	t.Helper()
	release := make(chan struct{})
	f := newFake(t, script{"LOCK.RELEASE": {one}, "LOCK.ACQUIRE": {func(r received) string {
		switch wait := r.option("WAIT"); {
		case wait == "":
			return null
		case wait == "100" || r.command[1] == "":
			return polled()
		}
		<-release
		return token
	}}})
	c := f.client(func(config *Config) { config.MaxConnections = 4 })
	var done sync.WaitGroup
	for range 2 {
		done.Go(func() { mustLock(t, c, Shared()) })
	}
	f.await("LOCK.ACQUIRE", 2)
	return c, func() { close(release); done.Wait() }
}

func TestPollsWaitShorterTheMoreAreDue(t *testing.T) {
	for waits, wait := range map[int]string{26: "40", 302: "5"} {
		t.Run(fmt.Sprint(waits), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFake(t, script{"LOCK.ACQUIRE": {func(r received) string {
					switch wait := r.option("WAIT"); {
					case wait == "":
						return null
					case len(wait) > 3: // it has a connection of its own
						return silent
					}
					time.Sleep(time.Second / 2) // until the first reply to a poll, the other waits become due
					return null
				}}, "LOCK.RELEASE": {one}})
				c := f.client(func(config *Config) { config.MaxConnections = 4 })
				ctx, cancel := context.WithCancel(context.Background())
				var done sync.WaitGroup
				for range waits + 2 {
					done.Go(func() { _, _ = c.Lock(ctx, "k", Shared()) })
				}
				var polls []string
				eventually(t, "two requests poll", func() bool {
					polls = nil
					for _, r := range f.sent("LOCK.ACQUIRE") {
						if wait := r.option("WAIT"); wait != "" && len(wait) < 4 {
							polls = append(polls, wait)
						}
					}
					return len(polls) >= 2
				})
				if polls[1] != wait {
					t.Errorf("%d waits poll with WAIT %v", waits, polls)
				}
				cancel()
				done.Wait()
			})
		})
	}
}

func TestEmptyNameIsANameLikeAnyOther(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c, end := exhausted(t, func() string { return token })
		// This wait takes the turn of its mutex and, to poll, that of polls: their keys must differ.
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if _, err := c.Lock(ctx, ""); err != nil {
			t.Error(err)
		}
		end()
	})
}

func TestPollWithoutAReplyIsRepeated(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var polls atomic.Int32
		c, end := exhausted(t, func() string { return []string{silent, token}[polls.Add(1)-1] })
		mustLock(t, c, Shared())
		end()
	})
}

func TestOnlyTheOldestWaitOfAMutexIsAtTheServer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		grant := make(chan struct{})
		f := newFake(t, script{"LOCK.ACQUIRE": {func(received) string { <-grant; return token }}, "LOCK.RELEASE": {one}})
		c := f.client()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		var done sync.WaitGroup
		for range 10 {
			done.Add(1)
			go func() {
				defer done.Done()
				if _, err := c.Lock(ctx, "k"); err != nil {
					t.Error(err)
				}
			}()
		}
		for n := 1; n <= 10; n++ {
			asked := f.await("LOCK.ACQUIRE", n)
			if len(asked) > n {
				t.Errorf("%d wait at the server", len(asked)-n+1)
			}
			grant <- struct{}{}
		}
		done.Wait()
	})
}

func TestRenewalsGoFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		c := newFake(t, script{}).client()
		p := c.pool("unused")
		busy := newConn(fakeConn{}, p)
		p.mu.Lock()
		p.conns[busy] = true
		p.opening = 31 // as many as may be opened
		p.mu.Unlock()
		order := make(chan priority, 3)
		for _, class := range []priority{forOther, forRelease, forRenew} {
			go func() {
				got, err := p.get(context.Background(), class, time.Second, time.Now().Add(patience))
				if err != nil {
					t.Error(err)
				}
				order <- class
				p.put(got, answer{})
			}()
			eventually(t, "it waits", func() bool {
				p.mu.Lock()
				defer p.mu.Unlock()
				return slices.ContainsFunc(p.queue, func(w *waiter) bool { return w.class == class })
			})
		}
		p.put(busy, answer{})
		for want := forRenew; want <= forOther; want++ {
			if got := <-order; got != want {
				t.Errorf("priority %d before %d", got, want)
			}
		}
	})
}

type fakeConn struct{ net.Conn }

func (fakeConn) Close() error { return nil }

// However many requests need a connection, the client makes few attempts to connect, and no call outlasts its time.
func TestOutageCostsFewAttempts(t *testing.T) {
	for name, connect := range map[string]func() (net.Conn, error){
		"of a server that refuses connections": func() (net.Conn, error) { return nil, errors.New("refused") },
		"of a server that accepts connections, and closes them": func() (net.Conn, error) {
			ours, theirs := net.Pipe()
			return ours, theirs.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}, "LOCK.RENEW": {renewal}})
				var down atomic.Bool
				var dials, pending, most atomic.Int32
				c := f.client(func(config *Config) {
					config.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
						most.Store(max(most.Load(), pending.Add(1)))
						defer pending.Add(-1)
						if dials.Add(1); down.Load() {
							return connect()
						}
						return dialFake(ctx, addr)
					}
				})
				mustLock(t, c)
				down.Store(true)
				f.cutAll()
				dials.Store(0)
				var done sync.WaitGroup
				for i := range 1000 {
					done.Go(func() {
						began := time.Now()
						_, err := c.Lock(context.Background(), fmt.Sprint(i), Wait(10*time.Second))
						if took := time.Since(began); !errors.Is(err, ErrNotAcquired) || took > 10250*time.Millisecond {
							t.Errorf("%v after %v", err, took)
						}
					})
				}
				done.Wait()
				if n := dials.Load(); n < 10 || n > 40 {
					t.Errorf("%d attempts in 10 s", n)
				}
				if most.Load() > 1 {
					t.Errorf("%d at a time", most.Load())
				}
			})
		})
	}
}

func TestDeadIdleConnectionIsReplacedAtOnce(t *testing.T) {
	t.Parallel()
	f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}})
	defer f.listen()()
	c := f.client(func(config *Config) { config.Dial = dial })
	for range 3 {
		h, err := c.TryLock(context.Background(), "k") // a try does not last through a pause
		if err != nil {
			t.Fatal(err)
		}
		if err := h.Release(context.Background()); err != nil {
			t.Fatal(err)
		}
		f.cutAll()
	}
}

func TestRenewalIsNotDelayedByAHangingLookUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}, "LOCK.RENEW": {cut, cut, renewal}})
		var looks atomic.Int32
		hang := make(chan struct{})
		c := f.client(func(config *Config) {
			config.Locate = func(_ context.Context, _ string, _ bool) (string, error) {
				if looks.Add(1) > 1 {
					<-hang
				}
				return f.addr, nil
			}
		})
		defer close(hang)
		h := mustLock(t, c, Lease(time.Second))
		f.await("LOCK.RENEW", 4)
		if !h.Held() || looks.Load() < 2 {
			t.Errorf("held: %v after %d look-ups", h.Held(), looks.Load())
		}
	})
}

func TestRenewalsGoToTheNewNodeAfterAFailover(t *testing.T) {
	bubble(t, func(t *testing.T) {
		answers := func() script {
			return script{"LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}, "LOCK.RENEW": {renewal}}
		}
		first, second := newFake(t, answers()), newFake(t, answers())
		var failed atomic.Bool
		c := first.client(func(config *Config) {
			config.Locate = func(context.Context, string, bool) (string, error) {
				if failed.Load() {
					return second.addr, nil
				}
				return first.addr, nil
			}
		})
		var holds []*Hold
		for i := range 300 {
			h, err := c.TryLock(context.Background(), fmt.Sprint(i), Lease(4*time.Second))
			if err != nil {
				t.Fatal(err)
			}
			holds = append(holds, h)
		}
		failed.Store(true)
		first.stop()
		second.await("LOCK.RENEW", 300)
		for _, h := range holds {
			if h.Context().Err() != nil {
				t.Fatal(context.Cause(h.Context()))
			}
		}
	})
}

func TestCallsEndInTimeWhenTheDialerIgnoresItsContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		hang := make(chan struct{})
		c, err := New(Config{Addr: "unused", Dial: func(context.Context, string) (net.Conn, error) {
			<-hang
			return nil, errors.New("late")
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { close(hang); _ = c.Close() }()
		began := time.Now()
		_, err = c.Lock(context.Background(), "k", Wait(100*time.Millisecond))
		if took := time.Since(began); !errors.Is(err, ErrNotAcquired) || took > patience {
			t.Errorf("%v after %v", err, took)
		}
		if _, err = c.TryLock(context.Background(), "k"); err == nil || time.Since(began) > patience {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

func TestDroppedHoldIsLoggedAndStaysHeld(t *testing.T) {
	t.Parallel()
	f := newFake(t, script{"LOCK.ACQUIRE": {token}, "LOCK.RENEW": {renewal}, "LOCK.RELEASE": {one}})
	logged := make(chan struct{}, 100)
	c := f.client(func(config *Config) { config.Logger = logger(logged) })
	mustLock(t, c)
	collect(t, logged)
	if len(f.sent("LOCK.RELEASE")) != 0 {
		t.Error("released by the garbage collector")
	}
}

func FuzzRead(f *testing.F) {
	for _, seed := range []string{token, renewal, null, "-ERR x\r\n", "*2\r\n$1\r\na\r\n*-1\r\n", "$-1\r\n", "*1000000000\r\n", "\r\n"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		rest := bytes.NewReader(b)
		in := bufio.NewReader(rest)
		reply, err := read(in)
		if err == nil && in.Buffered()+rest.Len() >= len(b) {
			t.Errorf("%v consumed nothing", reply)
		}
	})
}

func TestPutClosesTheConnectionWhenThePoolIsClosed(t *testing.T) {
	p := &pool{client: newFake(t, script{}).client(), conns: map[*conn]bool{}}
	ours, theirs := net.Pipe()
	defer func() { _ = theirs.Close() }()
	var done sync.WaitGroup
	p.mu.Lock()
	done.Go(func() { p.client.cancel(); p.close() })
	time.Sleep(5 * time.Millisecond)
	done.Go(func() { p.put(newConn(ours, p), answer{}) })
	time.Sleep(5 * time.Millisecond)
	p.mu.Unlock() // a Mutex with a waiter of more than 1 ms is handed to its waiters in order
	p.mu.Lock()
	time.Sleep(5 * time.Millisecond)
	p.mu.Unlock()
	done.Wait()
	if len(p.idle) > 0 {
		t.Error("a connection is left")
	}
}

func TestInfoNeedsNoRightToCallLockVersion(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.VERSION": {"-NOPERM x\r\n"}, "LOCK.INFO": {"*2\r\n+waiters\r\n:3\r\n"}})
		if info, err := f.client().Info(context.Background(), "k"); err != nil || info.Waiters != 3 {
			t.Errorf("%v, %v", info, err)
		}
	})
}

func TestIdleConnectionWithAnUnrequestedReplyIsReplaced(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ reply, later string }{
		"together with a reply": {"*0\r\n-ERR going away\r\n", ""},
		"afterwards":            {"*0\r\n", "-ERR going away\r\n"},
	} {
		f := newFake(t, script{"LOCK.INFO": {test.reply, "*0\r\n"}})
		defer f.listen()()
		c := f.client(func(config *Config) { config.Dial = dial })
		for i := range 2 {
			if _, err := c.Info(context.Background(), "k"); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if i > 0 {
				continue
			}
			f.mu.Lock()
			_, _ = io.WriteString(f.conns[1], test.later)
			f.mu.Unlock()
			p := c.pool(f.addr)
			eventually(t, "the connection is dead", func() bool {
				p.mu.Lock()
				defer p.mu.Unlock()
				return p.idle[0].dead()
			})
		}
		f.mu.Lock()
		if f.opened != 2 {
			t.Errorf("%s: %d connections", name, f.opened)
		}
		f.mu.Unlock()
	}
}

func TestUnknownCommandOfTheSetupIsNotAMissingModule(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"SELECT": {"-ERR unknown command 'SELECT', with args beginning with: '1' \r\n"}})
		c := f.client(func(config *Config) {
			config.Setup = func(context.Context, net.Addr) ([][]string, error) { return [][]string{{"SELECT", "1"}}, nil }
		})
		if _, err := c.TryLock(context.Background(), "k"); err == nil || errors.Is(err, ErrModuleNotLoaded) {
			t.Error(err)
		}
	})
}

func TestDeadConnectionsToAFormerNodeAreClosed(t *testing.T) {
	t.Parallel()
	former := newFake(t, script{"LOCK.INFO": {"*0\r\n"}})
	stop := former.listen()
	node := newFake(t, script{"LOCK.INFO": {"*0\r\n"}})
	defer node.listen()()
	var failed atomic.Bool
	c := former.client(func(config *Config) {
		config.Dial = dial
		config.Locate = func(context.Context, string, bool) (string, error) {
			if failed.Load() {
				return node.addr, nil
			}
			return former.addr, nil
		}
	})
	if _, err := c.Info(context.Background(), "k"); err != nil {
		t.Fatal(err)
	}
	stop()
	failed.Store(true)
	eventually(t, "the connection to the former node is closed", func() bool {
		p := c.pool(node.addr)
		p.mu.Lock()
		for _, idle := range p.idle { // the next request opens another
			p.drop(idle)
		}
		p.idle = nil
		p.mu.Unlock()
		if _, err := c.Info(context.Background(), "k"); err != nil {
			t.Fatal(err)
		}
		p = c.pool(former.addr)
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.idle) == 0
	})
}

func TestTimeoutOfACallerDoesNotCountAsAFailure(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"LOCK.INFO": {silent}, "LOCK.ACQUIRE": {token}, "LOCK.RELEASE": {one}})
		c := f.client()
		p := c.pool(f.addr)
		for range 2 {
			got, err := p.get(context.Background(), forOther, time.Second, time.Now().Add(patience))
			if err != nil {
				t.Fatal(err)
			}
			defer p.put(got, answer{})
		}
		mustLock(t, c) // over a third connection
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		if _, err := c.Info(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.pause != 0 || !p.proven {
			t.Errorf("a pause of %v, proven: %v", p.pause, p.proven)
		}
	})
}

func TestCancellationBeforeTheRequestIsSentDoesNotCountAsAFailure(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := newFake(t, script{"PING": {silent}})
		c := f.client()
		p := c.pool(f.addr)
		var taken []*conn
		for range 2 {
			got, err := p.get(context.Background(), forOther, time.Second, time.Now().Add(patience))
			if err != nil {
				t.Fatal(err)
			}
			taken = append(taken, got)
		}
		for _, got := range taken {
			p.put(got, answer{})
		}
		ctx, cancel := context.WithCancel(context.Background())
		go func() { f.await("PING", 1); cancel() }()
		if _, err := c.TryLock(ctx, "k", Owner("o")); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.pause != 0 || !p.proven || len(p.idle) != 1 {
			t.Errorf("a pause of %v, proven: %v, idle: %d", p.pause, p.proven, len(p.idle))
		}
	})
}
