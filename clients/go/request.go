package holdfast

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// shortLease is the lease below which there is no time to repeat a renewal.
const shortLease = 300 * time.Millisecond

// A request has the names of the locks and the options, and what is known of the node that serves them. One goroutine at a
// time sends it.
type request struct {
	client            *Client
	names             []string
	lease, wait       time.Duration // Renew may change the lease; wait 0: do not wait
	manual            atomic.Bool   // the timer does not renew the lock
	ephemeral, shared bool
	replicas, limit   int // limit 0: none was given
	value, owner      string
	given             bool // the application chose the owner
	err               error

	addr    string   // the node that serves the names, as far as is known
	asking  string   // the node of the next request only, after -ASK
	stale   bool     // addr must be looked up again
	looking *located // a look-up that has begun
	hops    int      // redirects, and SUPERSEDED, in a row
	conn    *conn    // of an ephemeral hold
}

// A located is the outcome of a look-up.
type located struct {
	addr string
	err  error
	done chan struct{}
}

// An Option is an option of an acquisition.
type Option func(*request)

// Lease sets for how long a lock is held without a renewal: a killed holder blocks others for that long.
func Lease(d time.Duration) Option { return func(r *request) { r.lease = d } }

// NoRenew leaves renewal to [Hold.Renew]. By default the client renews a lock until it is released or lost.
func NoRenew() Option { return func(r *request) { r.manual.Store(true) } }

// Wait bounds the wait, as a deadline of the context does. If it is 0, the lock is only tried.
func Wait(d time.Duration) Option { return func(r *request) { r.wait = max(d, 0) } }

// Ephemeral has the server release the lock when its connection ends. The server may notice that before this client
// does: whatever the lock guards should check [Hold.Fence].
func Ephemeral() Option { return func(r *request) { r.ephemeral = true } }

// Replicas requires that n replicas confirm the lock and each renewal.
func Replicas(n int) Option { return func(r *request) { r.replicas = n } }

// Limit lets n owners hold the lock at once, at least 1. All must name the same limit.
func Limit(n int) Option {
	return func(r *request) {
		r.limit = n
		if n < 1 {
			r.err = fmt.Errorf("holdfast: Limit must be at least 1, got %d", n)
		}
	}
}

// Shared lets any number of shared owners hold the lock at once.
func Shared() Option { return func(r *request) { r.shared = true } }

// Value puts a readable value before the owner's random part: "value#…", where "%" and "#" in the value are "%25" and "%23".
func Value(v string) Option { return func(r *request) { r.value = v } }

// Owner sets the whole owner, for interfaces that dictate it; it is for TryLock only. The lock is refused if this owner
// holds it already. A request whose reply was lost is not repeated: its error says that a lease may be left, and does not
// match [ErrNotAcquired].
func Owner(owner string) Option { return func(r *request) { r.owner, r.given = owner, owner != "" } }

func (c *Client) request(names []string, wait time.Duration, options []Option) (*request, error) {
	r := &request{client: c, addr: c.config.Addr, names: slices.Clone(names), lease: c.config.Lease, wait: wait}
	for _, option := range options {
		option(r)
	}
	switch {
	case len(names) == 0:
		return nil, errors.New("holdfast: a lock needs a name")
	case r.lease <= 0:
		return nil, fmt.Errorf("holdfast: lease must be positive, got %v", r.lease)
	case r.err != nil:
		return nil, r.err
	case r.replicas < 0:
		return nil, fmt.Errorf("holdfast: Replicas must not be negative, got %d", r.replicas)
	case r.shared && r.limit > 0:
		return nil, errors.New("holdfast: Limit and Shared exclude each other")
	case len(names) > 1 && (r.shared || r.limit > 0):
		return nil, errors.New("holdfast: Shared and Limit are for one name, got " + strconv.Itoa(len(names)))
	case r.given && r.wait != 0:
		return nil, errors.New("holdfast: Owner is for TryLock only: a wait could not be repeated safely")
	}
	r.lease = max(r.lease, time.Millisecond) // the shortest that is sent
	if r.lease < shortLease && !r.manual.Load() {
		c.config.Logger.Warn("holdfast: the lease is too short to repeat a renewal", "name", r.name(), "lease", r.lease)
	}
	if !r.given {
		r.drawOwner()
	}
	return r, nil
}

// escaped and unescaped translate the value in an owner, where it contains no "#".
var (
	escaped   = strings.NewReplacer("%", "%25", "#", "%23")
	unescaped = strings.NewReplacer("%25", "%", "%23", "#")
)

// drawOwner draws an owner that no other acquisition has.
func (r *request) drawOwner() {
	var random [16]byte
	_, _ = rand.Read(random[:]) // it never fails
	r.owner = hex.EncodeToString(random[:])
	if r.value != "" {
		r.owner = escaped.Replace(r.value) + "#" + r.owner
	}
}

func (r *request) name() string { return strings.Join(r.names, ",") }

// mutex reports whether the request is for one lock that one owner at a time may hold.
func (r *request) mutex() bool { return len(r.names) == 1 && !r.shared && r.limit == 0 }

// command returns LOCK.<verb> or LOCK.M<verb> for these names and this owner.
func (r *request) command(verb string, terms ...string) []string {
	command := append(make([]string, 0, 3+len(r.names)+len(terms)), "LOCK."+verb)
	if len(r.names) > 1 {
		command = append(command[:0], "LOCK.M"+verb, strconv.Itoa(len(r.names)))
	}
	return append(append(append(command, r.names...), r.owner), terms...)
}

// acquire returns the command that requests the lock, with WAIT and WAITED only if these are not 0.
func (r *request) acquire(wait, waited time.Duration) []string {
	terms := make([]string, 0, 16)
	if r.given {
		terms = append(terms, "NEW")
	} else {
		terms = append(terms, "HOLDS", "1")
	}
	terms = append(terms, "LEASE", millis(r.lease))
	if wait > 0 {
		terms = append(terms, "WAIT", millis(wait))
	}
	if wait > 0 && waited > 0 {
		terms = append(terms, "WAITED", millis(waited))
	}
	if r.limit > 0 {
		terms = append(terms, "LIMIT", strconv.Itoa(r.limit))
	}
	if r.shared {
		terms = append(terms, "SHARED")
	}
	if r.ephemeral {
		terms = append(terms, "EPHEMERAL")
	}
	if r.replicas > 0 {
		terms = append(terms, "REPLICAS", strconv.Itoa(r.replicas))
	}
	return r.command("ACQUIRE", append(terms, "WITHWAITED")...)
}

// answers reports whether this can be the reply to a command. For ACQUIRE, it is an error, nil or a grant. For RENEW and
// RELEASE, it is an error, or for each name nil or a number. The number for RENEW is the token that the command names, or
// the next one. The replies to other commands are not checked.
func answers(command []string, reply any) bool {
	verb, several := strings.CutPrefix(command[0], "LOCK.M")
	verb = strings.TrimPrefix(verb, "LOCK.")
	switch {
	case failure(reply) != nil:
		return true
	case verb == "ACQUIRE":
		return reply == nil || granted(reply)
	case verb != "RENEW" && verb != "RELEASE":
		return true
	}
	names, first, items := 1, 1, []any{reply}
	if several {
		names, _ = strconv.Atoi(command[1])
		first = 2
		items, _ = reply.([]any)
	}
	var token int64
	if verb == "RENEW" { // after the names come the owner, "TOKEN" and the token
		token, _ = strconv.ParseInt(command[first+names+2], 10, 64)
	}
	isWrong := func(item any) bool {
		n, number := item.(int64)
		return item != nil && !(number && (verb == "RELEASE" || n == token || n == token+1))
	}
	return len(items) == names && !slices.ContainsFunc(items, isWrong)
}

// millis rounds up to whole milliseconds, at least 1.
func millis(d time.Duration) string {
	n := int64(d / time.Millisecond)
	if d%time.Millisecond > 0 {
		n++
	}
	return strconv.FormatInt(max(1, n), 10)
}

// sure returns the part of a lease that is certain by a clock whose speed differs from the server's.
func sure(lease time.Duration) time.Duration { return lease / 100 * 99 }
