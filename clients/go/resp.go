package holdfast

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"
)

var (
	errIncomplete = errors.New("incomplete reply")
	crlf          = []byte("\r\n")
	past          = time.Unix(1, 0)
)

// A conn is a connection that carries one pipeline at a time. It reads no more than it is asked for, and a read
// that a deadline interrupts can be continued: what has arrived stays in buf.
type conn struct {
	net.Conn
	buf  []byte
	used bool // it has answered before, so an immediate end of file means that it died while it was idle
}

// errDeadIdle is the failure of a connection that died while it was idle: it may be replaced without a pause.
type errDeadIdle struct{ error }

func (e errDeadIdle) Unwrap() error { return e.error }

// interrupt sets the deadline of reads, and lets the end of ctx interrupt them until stop is called.
func (c *conn) interrupt(ctx context.Context, deadline time.Time) (stop func()) {
	_ = c.SetReadDeadline(deadline) // fails only on a closed connection, as does the read that follows
	if ctx.Done() == nil {
		return func() {}
	}
	done := make(chan struct{})
	cancel := context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(past); close(done) })
	return func() {
		if !cancel() {
			<-done
		}
	}
}

// send writes commands.
func (c *conn) send(deadline time.Time, commands ...[]string) error {
	var out []byte
	for _, command := range commands {
		out = append(strconv.AppendInt(append(out, '*'), int64(len(command)), 10), crlf...)
		for _, arg := range command {
			out = append(strconv.AppendInt(append(out, '$'), int64(len(arg)), 10), crlf...)
			out = append(append(out, arg...), crlf...)
		}
	}
	_ = c.SetWriteDeadline(deadline)
	_, err := c.Write(out)
	return c.failure(err)
}

// receive reads one reply. An error reply is a value, a [ServerError].
func (c *conn) receive() (any, error) {
	for {
		reply, rest, err := parse(c.buf)
		if err == nil {
			c.buf = append(c.buf[:0], rest...)
			c.used = true
			return reply, nil
		}
		if !errors.Is(err, errIncomplete) {
			return nil, err
		}
		size := len(c.buf)
		c.buf = append(c.buf, make([]byte, max(512, size))...)
		n, err := c.Read(c.buf[size:])
		c.buf = c.buf[:size+n]
		if n == 0 && err != nil {
			return nil, c.failure(err)
		}
	}
}

func (c *conn) failure(err error) error {
	if err != nil && c.used && len(c.buf) == 0 && !isTimeout(err) {
		return errDeadIdle{err}
	}
	return err
}

// exchange sends commands in one pipeline and reads their replies.
func (c *conn) exchange(ctx context.Context, deadline time.Time, commands ...[]string) ([]any, error) {
	if err := c.send(deadline, commands...); err != nil {
		return nil, err
	}
	defer c.interrupt(ctx, deadline)()
	replies := make([]any, len(commands))
	for i := range replies {
		var err error
		if replies[i], err = c.receive(); err != nil {
			return nil, err
		}
	}
	return replies, nil
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// parse returns the first reply in b and what follows it, or errIncomplete.
func parse(b []byte) (reply any, rest []byte, err error) {
	line, rest, found := bytes.Cut(b, crlf)
	if !found {
		return nil, nil, errIncomplete
	}
	if len(line) == 0 {
		return nil, nil, errors.New("holdfast: protocol error: empty line")
	}
	text := string(line[1:])
	switch line[0] {
	case '+':
		return text, rest, nil
	case '-':
		return ServerError(text), rest, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return nil, nil, fmt.Errorf("holdfast: protocol error: %q", line)
	}
	switch line[0] {
	case ':':
		return n, rest, nil
	case '$':
		if n < 0 {
			return nil, rest, nil
		}
		if int64(len(rest)) < n+2 {
			return nil, nil, errIncomplete
		}
		return string(rest[:n]), rest[n+2:], nil
	case '*':
		if n < 0 {
			return nil, rest, nil
		}
		items := []any{}
		for range n {
			var item any
			if item, rest, err = parse(rest); err != nil {
				return nil, nil, err
			}
			items = append(items, item)
		}
		return items, rest, nil
	}
	return nil, nil, fmt.Errorf("holdfast: protocol error: %q", line)
}
