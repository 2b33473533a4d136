// Package rueidis makes a [holdfast.Client] from a rueidis client: a standalone server, Sentinel or a cluster.
//
// The client opens connections of its own, with the dialer, TLS, credentials and database of the rueidis client: a wait
// never blocks the connection that the application's requests share.
package rueidis

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"holdfast"
)

// New returns a client for the servers of a rueidis client that was made with option. The options may change the
// configuration. Closing the returned client does not close the rueidis client.
func New(client rueidis.Client, option rueidis.ClientOption, options ...func(*holdfast.Config)) (*holdfast.Client, error) {
	config := holdfast.Config{
		Dial:  func(ctx context.Context, addr string) (net.Conn, error) { return dial(ctx, addr, &option) },
		Setup: func(_ context.Context, remote net.Addr) ([][]string, error) { return setup(&option, remote) },
	}
	switch client.Mode() {
	case rueidis.ClientModeCluster:
		config.Locate = (&cluster{client: client}).locate
	case rueidis.ClientModeSentinel:
		config.Locate = func(context.Context, string, bool) (string, error) { return primary(client) }
	default:
		if len(option.InitAddress) == 0 {
			return nil, errors.New("holdfast: the rueidis client has no InitAddress")
		}
		config.Addr = option.InitAddress[0]
	}
	for _, option := range options {
		option(&config)
	}
	return holdfast.New(config)
}

func dial(ctx context.Context, addr string, o *rueidis.ClientOption) (net.Conn, error) {
	switch {
	case o.DialCtxFn != nil:
		return o.DialCtxFn(ctx, addr, &o.Dialer, o.TLSConfig)
	case o.DialFn != nil:
		return o.DialFn(addr, &o.Dialer, o.TLSConfig)
	case o.TLSConfig != nil:
		dialer := tls.Dialer{NetDialer: &o.Dialer, Config: o.TLSConfig}
		return dialer.DialContext(ctx, "tcp", addr)
	}
	return o.Dialer.DialContext(ctx, "tcp", addr)
}

// setup returns the commands that rueidis sends first on a connection.
func setup(o *rueidis.ClientOption, remote net.Addr) ([][]string, error) {
	user, password := o.Username, o.Password
	if o.AuthCredentialsFn != nil {
		credentials, err := o.AuthCredentialsFn(rueidis.AuthCredentialsContext{Address: remote})
		if err != nil {
			return nil, err
		}
		user, password = credentials.Username, credentials.Password
	}
	return holdfast.Handshake(user, password, o.SelectDB, o.ClientName), nil
}

// primary returns the address of the primary that rueidis learned from its Sentinels.
func primary(client rueidis.Client) (string, error) {
	for addr := range client.Nodes() { // with SendToReplicas there are several: a replica replies with -READONLY, and this is tried again
		return addr, nil
	}
	return "", errors.New("holdfast: rueidis knows no primary")
}

// slotCount is the number of slots of a cluster.
const slotCount = 16384

// A slotMap has the address of the node that serves each slot, "" if none does.
type slotMap [slotCount]string

// A cluster caches the map of slots, and reads it again when it was wrong.
type cluster struct {
	client  rueidis.Client
	known   atomic.Pointer[slotMap]
	reading sync.Mutex
}

func (c *cluster) locate(ctx context.Context, key string, stale bool) (string, error) {
	known := c.known.Load()
	if stale || known == nil { // other look-ups use the known map meanwhile
		var err error
		if known, err = c.refresh(ctx, known); err != nil {
			return "", err
		}
	}
	command := c.client.B().Ping().Build().SetSlot(key) // is never sent: rueidis computes the slot
	slot := command.Slot() % slotCount
	if known[slot] == "" {
		return "", fmt.Errorf("holdfast: no node serves slot %d", slot)
	}
	return known[slot], nil
}

// refresh reads the map that replaces a wrong one, unless another look-up has just done so.
func (c *cluster) refresh(ctx context.Context, wrong *slotMap) (*slotMap, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	if known := c.known.Load(); known != wrong {
		return known, nil
	}
	known, err := c.read(ctx)
	if err == nil {
		c.known.Store(known)
	}
	return known, err
}

// nodeTimeout is how long one of several nodes may take to reply with the map.
const nodeTimeout = time.Second

// read asks a node for the map. A node whose host is not in the map has the host that it was asked at. Which node rueidis
// asks is unknown, so read then asks each by its address until one replies.
func (c *cluster) read(ctx context.Context) (*slotMap, error) {
	known, err := parse(c.client.Do(ctx, c.client.B().ClusterSlots().Build()), "")
	if !errors.Is(err, errNoHost) {
		return known, err
	}
	for addr, node := range c.client.Nodes() {
		host, _, _ := net.SplitHostPort(addr)
		limited, cancel := context.WithTimeout(ctx, nodeTimeout)
		known, err = parse(node.Do(limited, c.client.B().ClusterSlots().Build()), host)
		cancel()
		if err == nil {
			return known, nil
		}
	}
	return nil, err
}

var errNoHost = errors.New("holdfast: a node of the cluster has no host")

// parse parses a map of slots. A node without a host gets the host that is passed.
func parse(result rueidis.RedisResult, host string) (*slotMap, error) {
	reply, err := result.ToArray()
	if err != nil {
		return nil, err
	}
	var known slotMap
	for _, item := range reply {
		fields, err := item.ToArray()
		if err != nil || len(fields) < 3 {
			continue
		}
		first, _ := fields[0].AsInt64()
		last, _ := fields[1].AsInt64()
		node, err := fields[2].ToArray()
		if err != nil || len(node) < 2 {
			continue
		}
		named, _ := node[0].ToString()
		port, _ := node[1].AsInt64()
		if named = cmp.Or(named, host); named == "" {
			return nil, errNoHost
		}
		addr := net.JoinHostPort(named, strconv.FormatInt(port, 10))
		for slot := max(first, 0); slot <= min(last, slotCount-1); slot++ {
			known[slot] = addr
		}
	}
	return &known, nil
}
