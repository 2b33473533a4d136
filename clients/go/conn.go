package holdfast

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// pipeline is the greatest number of renewals that are sent in one write.
const pipeline = 256

const crlf = "\r\n"

// past is a deadline that ends a read at once.
var past = time.Unix(1, 0)

// A conn is a connection that carries one pipeline at a time.
type conn struct {
	net.Conn
	pool *pool
	raw  syscall.RawConn // of the socket, below TLS; nil if it has none
	in   *bufio.Reader
	out  []byte // reused by send
	used bool   // it has carried a request to its reply: if the next one fails, the connection may have ended while it was idle
}

func newConn(socket net.Conn, p *pool) *conn {
	c := &conn{Conn: socket, pool: p, in: bufio.NewReader(socket)}
	if tls, ok := socket.(interface{ NetConn() net.Conn }); ok {
		socket = tls.NetConn()
	}
	if s, ok := socket.(syscall.Conn); ok {
		c.raw, _ = s.SyscallConn() // fails only on a closed connection, as does what follows
	}
	return c
}

// exchange sends commands in one pipeline and reads their replies, until a deadline or the end of ctx. After a failure of
// the connection, the answer has the replies that were read before it.
func (c *conn) exchange(ctx context.Context, deadline time.Time, commands ...[]string) answer {
	a := answer{pool: c.pool, sent: time.Now()}
	a.err = c.during(ctx, deadline, func() (err error) {
		if err = c.send(commands...); err == nil {
			a.replies, err = c.receive(commands...)
		}
		return err
	})
	if errors.Is(a.err, os.ErrDeadlineExceeded) {
		if a.err = errSilent; ctx.Err() != nil {
			a.err = errNoReply
		}
	}
	return a
}

// during runs fn, whose reads and writes fail with [os.ErrDeadlineExceeded] after a deadline or the end of ctx.
func (c *conn) during(ctx context.Context, deadline time.Time, fn func() error) error {
	_ = c.SetDeadline(deadline) // fails only on a closed connection, as does what follows
	if ctx.Done() == nil {
		return fn()
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(past); close(interrupted) })
	err := fn()
	if !stop() {
		<-interrupted
	}
	return err
}

// arrives waits until anything arrives, or the connection fails. It returns false after a deadline or the end of ctx.
func (c *conn) arrives(ctx context.Context, deadline time.Time) bool {
	err := c.during(ctx, deadline, func() error { _, err := c.in.Peek(1); return err })
	return !errors.Is(err, os.ErrDeadlineExceeded)
}

func (c *conn) send(commands ...[]string) error {
	out := c.out[:0]
	for _, command := range commands {
		out = append(strconv.AppendInt(append(out, '*'), int64(len(command)), 10), crlf...)
		for _, arg := range command {
			out = append(strconv.AppendInt(append(out, '$'), int64(len(arg)), 10), crlf...)
			out = append(append(out, arg...), crlf...)
		}
	}
	c.out = out
	_, err := c.Write(out)
	return err
}

// receive reads the replies to commands, without those to ASKING. An error reply is a value, a [ServerError]. A reply that
// cannot be one to its command is a failure of the connection.
func (c *conn) receive(commands ...[]string) ([]any, error) {
	replies := make([]any, 0, len(commands))
	for _, command := range commands {
		reply, err := read(c.in)
		switch {
		case err != nil:
			return replies, err
		case !answers(command, reply):
			return replies, fmt.Errorf("holdfast: protocol error: unexpected reply to %s: %v", command[0], reply)
		case command[0] != "ASKING":
			replies = append(replies, reply)
		}
	}
	return replies, nil
}

// watch calls ended when the connection ends between two requests. The returned function stops the watch, so that a
// request can read the connection.
func (c *conn) watch(ended func()) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if c.arrives(ctx, time.Time{}) { // a reply that no request is waiting for counts as an end
			go ended()
		}
	}()
	return func() { cancel(); <-done }
}

// read reads one reply.
func read(in *bufio.Reader) (any, error) {
	line, err := in.ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("holdfast: no reply: %w", err)
	}
	text, whole := strings.CutSuffix(line, crlf)
	if !whole || text == "" {
		return nil, fmt.Errorf("holdfast: protocol error: %q", line)
	}
	kind, text := text[0], text[1:]
	switch kind {
	case '+':
		return text, nil
	case '-':
		return ServerError(text), nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	switch {
	case err != nil:
	case kind == ':':
		return n, nil
	case (kind == '$' || kind == '*') && n < 0:
		return nil, nil
	case kind == '$':
		b, err := io.ReadAll(io.LimitReader(in, n+int64(len(crlf)))) // allocates only what arrives
		if err == nil && int64(len(b))-int64(len(crlf)) != n {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, fmt.Errorf("holdfast: no reply: %w", err)
		}
		return string(b[:n]), nil
	case kind == '*':
		items := make([]any, 0, min(n, pipeline))
		for range n {
			item, err := read(in)
			if err != nil {
				return nil, err
			}
			items = append(items, item)
		}
		return items, nil
	}
	return nil, fmt.Errorf("holdfast: protocol error: %q", line)
}
