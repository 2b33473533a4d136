package holdfast

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"
)

// pipeline is how many commands are sent together at most.
const pipeline = 256

var (
	errIncomplete = errors.New("incomplete reply")
	crlf          = []byte("\r\n")
	past          = time.Unix(1, 0)
)

// A conn is a connection that carries one pipeline at a time. A read that a deadline or its caller ends can be
// continued: what has arrived stays in buf.
type conn struct {
	net.Conn
	buf     []byte   // what has arrived and was not read
	out     []byte   // for the next commands
	used    bool     // it had a reply already: if the next request fails, the connection may have been closed while it was idle
	replies chan any // of a watched connection; closed when the connection has ended
	gone    chan struct{}
}

// watch lets a goroutine read the replies, so that the end of the connection is noticed between requests.
func (c *conn) watch() {
	c.replies, c.gone = make(chan any, pipeline), make(chan struct{})
	_ = c.SetReadDeadline(time.Time{})
	go func() {
		defer close(c.gone)
		defer close(c.replies)
		for {
			reply, err := c.read()
			if err != nil {
				return
			}
			select {
			case c.replies <- reply:
			default: // more replies than requests
				return
			}
		}
	}()
}

// send writes commands.
func (c *conn) send(deadline time.Time, commands ...[]string) error {
	out := c.out[:0]
	for _, command := range commands {
		out = append(strconv.AppendInt(append(out, '*'), int64(len(command)), 10), "\r\n"...)
		for _, arg := range command {
			out = append(strconv.AppendInt(append(out, '$'), int64(len(arg)), 10), "\r\n"...)
			out = append(append(out, arg...), "\r\n"...)
		}
	}
	c.out = out
	_ = c.SetWriteDeadline(deadline) // fails only on a closed connection, as does the write that follows
	_, err := c.Write(out)
	return err
}

// receive returns the next reply. An error reply is a value, a [ServerError]. After [os.ErrDeadlineExceeded] and
// errInterrupted, it may be called again.
func (c *conn) receive(ctx context.Context, deadline time.Time) (any, error) {
	if c.replies != nil {
		timer := time.NewTimer(time.Until(deadline))
		defer timer.Stop()
		select {
		case reply, open := <-c.replies:
			if !open {
				return nil, io.EOF
			}
			return reply, nil
		case <-timer.C:
			return nil, os.ErrDeadlineExceeded
		case <-ctx.Done():
			return nil, errInterrupted
		}
	}
	_ = c.SetReadDeadline(deadline) // fails only on a closed connection, as does the read that follows
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(past); close(interrupted) })
	reply, err := c.read()
	if !stop() {
		<-interrupted
		if err != nil {
			return nil, errInterrupted
		}
	}
	return reply, err
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

// exchange sends commands in one pipeline and reads their replies.
func (c *conn) exchange(ctx context.Context, deadline time.Time, commands ...[]string) ([]any, error) {
	if err := c.send(deadline, commands...); err != nil {
		return nil, err
	}
	replies := make([]any, len(commands))
	for i := range replies {
		var err error
		if replies[i], err = c.receive(ctx, deadline); err != nil {
			return nil, err
		}
	}
	return replies, nil
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
