package holdfast

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	cut      = "\x00cut"    // close the connection instead of replying
	silent   = "\x00silent" // never reply
	null     = "$-1\r\n"
	one      = ":1\r\n"
	token    = "*2\r\n:7\r\n:0\r\n"
	renewal  = ":7\r\n"
	version  = "*6\r\n+protocol\r\n*2\r\n:4\r\n:4\r\n+version\r\n$5\r\n0.4.0\r\n+replicas-timeout\r\n:1000\r\n"
	patience = time.Minute // the deadline of conditions that should hold soon
)

// ExampleAddr is the address of the server of the examples.
var ExampleAddr string

// A fake is a server that follows a script: the replies to each command, in order, of which the last one is repeated.
type fake struct {
	t    *testing.T
	addr string

	mu      sync.Mutex
	script  map[string][]any // string, or func(received) string, which may block
	log     []received
	conns   map[int]net.Conn
	opened  int
	changed chan struct{}
}

type received struct {
	conn    int
	command []string
	at      time.Time
}

func (r received) String() string { return strings.Join(r.command, " ") }

// option returns the argument that follows a name.
func (r received) option(name string) string {
	if i := slices.Index(r.command, name); i >= 0 && i+1 < len(r.command) {
		return r.command[i+1]
	}
	return ""
}

// fakes are the fake servers by their addresses.
var fakes sync.Map

// newFake starts a server that clients reach by pipes within the process.
func newFake(t *testing.T, script map[string][]any) *fake {
	t.Helper()
	f := &fake{t: t, script: script, conns: map[int]net.Conn{}, changed: make(chan struct{})}
	f.addr = fmt.Sprintf("fake:%p", f)
	if script["LOCK.VERSION"] == nil {
		script["LOCK.VERSION"] = []any{version}
	}
	fakes.Store(f.addr, f)
	t.Cleanup(f.stop)
	return f
}

// dialFake connects to a fake server.
func dialFake(_ context.Context, addr string) (net.Conn, error) {
	f, found := fakes.Load(addr)
	if !found {
		return nil, errors.New("refused")
	}
	ours, theirs := net.Pipe()
	f.(*fake).admit(theirs)
	return ours, nil
}

// stop closes all connections, and accepts no more.
func (f *fake) stop() {
	fakes.Delete(f.addr)
	f.cutAll()
}

// listen accepts connections over TCP, too, until the returned function is called.
func (f *fake) listen() (stop func()) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	f.addr = listener.Addr().String()
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			f.admit(c)
		}
	}()
	return func() { _ = listener.Close(); f.cutAll() }
}

func (f *fake) admit(c net.Conn) {
	f.mu.Lock()
	f.opened++
	id := f.opened
	f.conns[id] = c
	f.mu.Unlock()
	go f.serve(id, c)
}

func (f *fake) serve(id int, c net.Conn) {
	defer func() { _ = c.Close() }()
	r := bufio.NewReaderSize(c, 1<<16) // takes in a whole pipeline before the first reply, as the buffer of a socket does
	for {
		command, err := readCommand(r)
		if err != nil {
			return
		}
		f.mu.Lock()
		f.log = append(f.log, received{id, command, time.Now()})
		close(f.changed)
		f.changed = make(chan struct{})
		var step any = "-ERR not in the script\r\n"
		if steps := f.script[command[0]]; len(steps) > 0 {
			if step = steps[0]; len(steps) > 1 {
				f.script[command[0]] = steps[1:]
			}
		}
		f.mu.Unlock()
		reply, ok := step.(string)
		if !ok {
			reply = step.(func(received) string)(received{id, command, time.Now()})
		}
		switch reply {
		case cut:
			return
		case silent:
			continue
		}
		if _, err := io.WriteString(c, reply); err != nil {
			return
		}
	}
}

func readCommand(r *bufio.Reader) ([]string, error) {
	var n int
	if _, err := fmt.Fscanf(r, "*%d\r\n", &n); err != nil {
		return nil, err
	}
	command := make([]string, n)
	for i := range command {
		line, err := r.ReadString('\n')
		if err != nil {
			return nil, err
		}
		size, err := strconv.Atoi(strings.TrimSpace(line[1:]))
		if err != nil {
			return nil, err
		}
		b := make([]byte, size+2)
		if _, err := io.ReadFull(r, b); err != nil {
			return nil, err
		}
		command[i] = string(b[:size])
	}
	return command, nil
}

func (f *fake) cutAll() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		_ = c.Close()
	}
}

// sent returns the commands of this name that were received.
func (f *fake) sent(name string) []received {
	f.mu.Lock()
	defer f.mu.Unlock()
	var found []received
	for _, r := range f.log {
		if r.command[0] == name {
			found = append(found, r)
		}
	}
	return found
}

// await waits until n commands of this name have arrived.
func (f *fake) await(name string, n int) []received {
	f.t.Helper()
	deadline := time.After(patience)
	for {
		f.mu.Lock()
		changed := f.changed
		f.mu.Unlock()
		if found := f.sent(name); len(found) >= n {
			return found
		}
		select {
		case <-changed:
		case <-deadline:
			f.t.Fatalf("%s: %d of %d arrived; all: %v", name, len(f.sent(name)), n, f.log)
		}
	}
}

func (f *fake) client(options ...func(*Config)) *Client {
	f.t.Helper()
	config := Config{Addr: f.addr, Dial: dialFake, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	for _, option := range options {
		option(&config)
	}
	c, err := New(config)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = c.Close() })
	return c
}

// within runs fn, and fails the test if it does not return in time.
func within[T any](t *testing.T, limit time.Duration, fn func() T) T {
	t.Helper()
	result := make(chan T, 1)
	go func() { result <- fn() }()
	select {
	case r := <-result:
		return r
	case <-time.After(limit):
		t.Fatalf("did not return within %v", limit)
		panic("unreachable")
	}
}

func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func lossReason(err error) Reason {
	var lost *LostError
	if errors.As(err, &lost) {
		return lost.Reason
	}
	return ""
}

func mustLock(t *testing.T, c *Client, options ...Option) *Hold {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	h, err := c.Lock(ctx, "k", options...)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// TestMain fails if goroutines of a client outlive the tests, which close all clients.
func TestMain(m *testing.M) {
	examples := &fake{conns: map[int]net.Conn{}, changed: make(chan struct{}), script: map[string][]any{
		"LOCK.VERSION": {version}, "LOCK.ACQUIRE": {token}, "LOCK.MACQUIRE": {token}, "LOCK.RELEASE": {one},
		"LOCK.RENEW":    {func(r received) string { return ":" + cmp.Or(r.option("FENCE"), "7") + "\r\n" }},
		"LOCK.MRELEASE": {"*2\r\n:1\r\n:1\r\n"}, "LOCK.FORCE": {one},
		"LOCK.WAITERS": {"*1\r\n*4\r\n+owner\r\n+node-2#5c\r\n+waited\r\n:1500\r\n"},
		"LOCK.INFO":    {"*4\r\n+waiters\r\n:0\r\n+holders\r\n*1\r\n*4\r\n+owner\r\n+node-1#5c\r\n+token\r\n:7\r\n"},
	}}
	stop := examples.listen()
	ExampleAddr = examples.addr
	code := m.Run()
	stop()
	for deadline := time.Now().Add(patience); code == 0; time.Sleep(10 * time.Millisecond) {
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		left := 0
		for _, stack := range strings.Split(string(stacks), "\n\n") {
			if strings.Contains(stack, "holdfast.(*Client)") || strings.Contains(stack, "holdfast.(*pool)") || strings.Contains(stack, "holdfast.(*hold)") {
				left++
			}
		}
		if left == 0 {
			break
		}
		if time.Now().After(deadline) {
			fmt.Printf("goroutines are left:\n%s\n", stacks)
			code = 1
		}
	}
	os.Exit(code)
}

// logger reports that something was logged.
func logger(logged chan<- struct{}) *slog.Logger {
	return slog.New(slog.NewTextHandler(writer(func() {
		select {
		case logged <- struct{}{}:
		default:
		}
	}), nil))
}

type writer func()

func (w writer) Write(b []byte) (int, error) { w(); return len(b), nil }

// collect runs the garbage collector until something is logged.
func collect(t *testing.T, logged <-chan struct{}) {
	t.Helper()
	for deadline := time.After(patience); ; {
		runtime.GC()
		select {
		case <-logged:
			return
		case <-deadline:
			t.Fatal("nothing was logged")
		case <-time.After(10 * time.Millisecond):
		}
	}
}
