//go:build unix

package holdfast

import (
	"net"
	"syscall"
)

// dead reports whether the peer has closed an idle connection, or has sent anything over it: before the end, TLS sends an
// alert, and a proxy may send its reason.
func (c *conn) dead() bool {
	if c.in.Buffered() > 0 {
		return true
	}
	raw, ok := underlying(c.Conn).(syscall.Conn)
	if !ok {
		return false
	}
	descriptor, err := raw.SyscallConn()
	if err != nil {
		return true
	}
	dead := false
	err = descriptor.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		dead = err != syscall.EAGAIN && err != syscall.EINTR
	})
	return dead || err != nil
}

// underlying returns the connection below TLS, or c itself.
func underlying(c net.Conn) net.Conn {
	if tls, ok := c.(interface{ NetConn() net.Conn }); ok {
		return tls.NetConn()
	}
	return c
}
