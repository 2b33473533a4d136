package holdfast

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"
)

// pipeline is the greatest number of renewals that are sent in one write.
const pipeline = 256

var (
	errIncomplete = errors.New("incomplete reply")
	crlf          = []byte("\r\n")
	past          = time.Unix(1, 0)
)

// A conn is a connection that carries one pipeline at a time. A read that failed with [os.ErrDeadlineExceeded] can be
// continued: bytes that arrived stay in buf.
type conn struct {
	net.Conn
	buf  []byte // bytes that arrived and were not parsed
	out  []byte // reused by send
	used bool   // it has carried a request to its reply: if the next one fails, the connection may have ended while it was idle
}

// exchange sends commands in one pipeline and reads their replies. An error reply is a value, a [ServerError]. A reply
// that cannot be one to its command is a failure of the connection. After a failure, exchange returns the replies that
// were read before it.
func (c *conn) exchange(commands ...[]string) ([]any, error) {
	if err := c.send(commands...); err != nil {
		return nil, err
	}
	replies := make([]any, 0, len(commands))
	for _, command := range commands {
		reply, err := c.read()
		if err != nil {
			return replies, err
		}
		if !answers(command, reply) {
			return replies, fmt.Errorf("holdfast: protocol error: unexpected reply to %s: %v", command[0], reply)
		}
		replies = append(replies, reply)
	}
	return replies, nil
}

// receive reads one reply, until a deadline or the end of ctx.
func (c *conn) receive(ctx context.Context, deadline time.Time) (any, error) {
	_ = c.SetReadDeadline(deadline) // fails only on a closed connection, as does the read that follows
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(past); close(interrupted) })
	reply, err := c.read()
	if !stop() {
		<-interrupted
	}
	return reply, err
}

func (c *conn) send(commands ...[]string) error {
	out := c.out[:0]
	for _, command := range commands {
		out = append(strconv.AppendInt(append(out, '*'), int64(len(command)), 10), "\r\n"...)
		for _, arg := range command {
			out = append(strconv.AppendInt(append(out, '$'), int64(len(arg)), 10), "\r\n"...)
			out = append(append(out, arg...), "\r\n"...)
		}
	}
	c.out = out
	_, err := c.Write(out)
	return err
}

func (c *conn) read() (any, error) {
	for {
		reply, rest, err := parse(c.buf)
		if err == nil {
			c.buf = append(c.buf[:0], rest...)
			return reply, nil
		}
		if !errors.Is(err, errIncomplete) {
			return nil, err
		}
		size := len(c.buf)
		c.buf = append(c.buf, make([]byte, max(512, size))...)
		n, err := c.Read(c.buf[size:])
		if c.buf = c.buf[:size+n]; n == 0 && err != nil {
			return nil, fmt.Errorf("holdfast: no reply: %w", err)
		}
	}
}

// watch calls ended when the connection ends between two requests. The returned function stops the watch, so that a
// request can read the connection.
func (c *conn) watch(ended func()) (stop func()) {
	_ = c.SetDeadline(time.Time{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := c.read(); !errors.Is(err, os.ErrDeadlineExceeded) { // a reply that no request is waiting for counts as an end
			go ended()
		}
	}()
	return func() { _ = c.SetReadDeadline(past); <-done }
}

// parse returns the first reply in b and the bytes that follow it. It returns errIncomplete if b ends within the reply.
func parse(b []byte) (reply any, rest []byte, err error) {
	line, rest, found := bytes.Cut(b, crlf)
	if !found {
		return nil, nil, errIncomplete
	}
	if len(line) == 0 {
		return nil, nil, errors.New("holdfast: protocol error: empty line")
	}
	kind, text := line[0], line[1:]
	switch kind {
	case '+':
		return string(text), rest, nil
	case '-':
		return ServerError(text), rest, nil
	}
	n, err := strconv.ParseInt(string(text), 10, 64)
	switch {
	case err != nil:
	case kind == ':':
		return n, rest, nil
	case (kind == '$' || kind == '*') && n < 0:
		return nil, rest, nil
	case kind == '$' && int64(len(rest)-len(crlf)) < n:
		return nil, nil, errIncomplete
	case kind == '$':
		return string(rest[:n]), rest[n+int64(len(crlf)):], nil
	case kind == '*':
		items := make([]any, 0, min(n, pipeline))
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
