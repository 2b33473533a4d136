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
	"time"
)

// pipeline is how many commands are sent together at most.
const pipeline = 256

// A conn is a connection that carries one pipeline at a time. A goroutine of its own reads the replies: the end of an
// idle connection is noticed, and a caller may stop waiting for a reply and continue later.
type conn struct {
	net.Conn
	replies chan any // closed when the connection has ended
	err     error    // why it has ended
	used    bool     // it has answered a request: if it breaks under the next one, it may have died while it was idle
}

func newConn(socket net.Conn) *conn {
	c := &conn{Conn: socket, replies: make(chan any, pipeline+1)}
	go c.read()
	return c
}

func (c *conn) read() {
	defer close(c.replies)
	for r := bufio.NewReader(c.Conn); ; {
		reply, err := parse(r)
		if err != nil {
			c.err = fmt.Errorf("holdfast: connection lost: %w", err)
			return
		}
		select {
		case c.replies <- reply:
		default:
			c.err = errors.New("holdfast: protocol error: more replies than requests")
			return
		}
	}
}

// send writes commands.
func (c *conn) send(deadline time.Time, commands ...[]string) error {
	var out []byte
	for _, command := range commands {
		out = append(strconv.AppendInt(append(out, '*'), int64(len(command)), 10), "\r\n"...)
		for _, arg := range command {
			out = append(strconv.AppendInt(append(out, '$'), int64(len(arg)), 10), "\r\n"...)
			out = append(append(out, arg...), "\r\n"...)
		}
	}
	_ = c.SetWriteDeadline(deadline) // fails only on a closed connection, as does the write that follows
	_, err := c.Write(out)
	return err
}

// receive returns the next reply. An error reply is a value, a [ServerError]. After [os.ErrDeadlineExceeded] and
// errInterrupted, it may be called again.
func (c *conn) receive(ctx context.Context, deadline time.Time) (any, error) {
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	select {
	case reply, open := <-c.replies:
		if !open {
			return nil, c.err
		}
		return reply, nil
	case <-timer.C:
		return nil, fmt.Errorf("holdfast: no answer: %w", os.ErrDeadlineExceeded)
	case <-ctx.Done():
		return nil, errInterrupted
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

// dead reports whether an idle connection has ended, or has sent what nobody asked for.
func (c *conn) dead() bool {
	select {
	case <-c.replies:
		return true
	default:
		return false
	}
}

// parse reads one reply.
func parse(r *bufio.Reader) (any, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return nil, err
	}
	kind, text := line[0], strings.TrimSuffix(line[1:], "\r\n")
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
		var b strings.Builder // grows with what arrives
		if _, err := io.CopyN(&b, r, n); err != nil {
			return nil, err
		}
		_, err := r.Discard(len("\r\n"))
		return b.String(), err
	case kind == '*':
		items := []any{}
		for range n {
			item, err := parse(r)
			if err != nil {
				return nil, err
			}
			items = append(items, item)
		}
		return items, nil
	}
	return nil, fmt.Errorf("protocol error: %q", line)
}
