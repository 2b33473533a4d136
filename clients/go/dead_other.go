//go:build !unix

package holdfast

// dead reports whether an idle connection has a reply to no request. If the system cannot tell that the peer has
// closed it, the next command finds out.
func (c *conn) dead() bool { return len(c.buf) > 0 }
