//go:build !unix

package holdfast

// dead reports whether an idle connection has received a reply that no request is waiting for. On these systems, only
// the next command finds out that the peer has closed the connection.
func (c *conn) dead() bool { return c.in.Buffered() > 0 }
