//go:build unix

package holdfast

import "syscall"

// dead reports whether the peer has closed an idle connection, or has sent anything over it: before the end, TLS sends an
// alert, and a proxy may send its reason.
func (c *conn) dead() bool {
	if c.in.Buffered() > 0 {
		return true
	}
	if c.raw == nil {
		return false
	}
	dead := false
	err := c.raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		dead = err != syscall.EAGAIN && err != syscall.EINTR
	})
	return dead || err != nil
}
