// Package goredis makes a [holdfast.Client] from a go-redis client: a standalone server, Sentinel or a cluster.
//
// The client opens connections of its own, with the dialer, TLS, credentials and database of the go-redis client. It
// does not use OnConnect, hooks, or the connection pool of go-redis.
package goredis

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/auth"

	"holdfast"
)

// failover is the address in the options of clients that [redis.NewFailoverClient] has made.
const failover = "FailoverClient"

// sentinelTimeout is how long a Sentinel may take before the last known primary is dialled.
const sentinelTimeout = 500 * time.Millisecond

// New returns a client for the servers of rdb, which must be a [*redis.Client] (that of [redis.NewFailoverClient] is one)
// or a [*redis.ClusterClient]. The options may change the configuration. Closing the client does not close rdb.
func New(rdb redis.UniversalClient, options ...func(*holdfast.Config)) (*holdfast.Client, error) {
	var config holdfast.Config
	switch rdb := rdb.(type) {
	case *redis.Client:
		o := rdb.Options()
		config.Addr = o.Addr
		config.Dial = func(ctx context.Context, addr string) (net.Conn, error) { return o.Dialer(ctx, o.Network, addr) }
		if o.Addr == failover {
			config.Dial = (&sentinel{options: o}).dial
		}
		config.Setup = setup(o)
	case *redis.ClusterClient:
		c := rdb.Options()
		o := &redis.Options{
			Dialer: c.Dialer, TLSConfig: c.TLSConfig, DialTimeout: c.DialTimeout, ClientName: c.ClientName,
			Username: c.Username, Password: c.Password, CredentialsProvider: c.CredentialsProvider,
			CredentialsProviderContext:   c.CredentialsProviderContext,
			StreamingCredentialsProvider: c.StreamingCredentialsProvider,
		}
		if o.Dialer == nil {
			o.Dialer = redis.NewDialer(o)
		}
		config.Dial = func(ctx context.Context, addr string) (net.Conn, error) { return o.Dialer(ctx, "tcp", addr) }
		config.Setup = setup(o)
		config.Locate = func(ctx context.Context, key string, stale bool) (string, error) {
			if stale {
				rdb.ReloadState(ctx)
			}
			node, err := rdb.MasterForKey(ctx, key)
			if err != nil {
				return "", err
			}
			return node.Options().Addr, nil
		}
	default:
		return nil, fmt.Errorf("holdfast: %T is neither a *redis.Client nor a *redis.ClusterClient", rdb)
	}
	for _, option := range options {
		option(&config)
	}
	return holdfast.New(config)
}

// setup returns the commands that go-redis sends first on a connection.
func setup(o *redis.Options) func(context.Context, net.Addr) ([][]string, error) {
	return func(ctx context.Context, _ net.Addr) (commands [][]string, err error) {
		user, password := o.Username, o.Password
		switch {
		case o.StreamingCredentialsProvider != nil:
			credentials, unsubscribe, err := o.StreamingCredentialsProvider.Subscribe(discard{})
			if err != nil {
				return nil, err
			}
			if err := unsubscribe(); err != nil {
				return nil, err
			}
			user, password = credentials.BasicAuth()
		case o.CredentialsProviderContext != nil:
			if user, password, err = o.CredentialsProviderContext(ctx); err != nil {
				return nil, err
			}
		case o.CredentialsProvider != nil:
			user, password = o.CredentialsProvider()
		}
		if password == "" { // go-redis then sends no AUTH
			user = ""
		}
		return holdfast.Handshake(user, password, o.DB, o.ClientName), nil
	}
}

// discard ignores changes of the credentials: each connection subscribes for those of its time.
type discard struct{}

func (discard) OnNext(auth.Credentials) {}
func (discard) OnError(error)           {}

// A sentinel dials the primary that go-redis finds, or the last known one while the Sentinels do not reply.
type sentinel struct {
	options *redis.Options
	mu      sync.Mutex
	primary string
}

func (s *sentinel) dial(ctx context.Context, addr string) (net.Conn, error) {
	type result struct {
		conn net.Conn
		err  error
	}
	found, left := make(chan result), make(chan struct{})
	defer close(left)
	go func() { // the dialer ignores the end of ctx while it waits for a Sentinel
		conn, err := s.options.Dialer(ctx, s.options.Network, addr)
		select {
		case found <- result{conn, err}:
		case <-left:
			if conn != nil {
				_ = conn.Close()
			}
		}
	}()
	s.mu.Lock()
	primary := s.primary
	s.mu.Unlock()
	var timeout <-chan time.Time
	if primary != "" {
		timeout = time.After(sentinelTimeout)
	}
	select {
	case r := <-found:
		if r.err == nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.primary = r.conn.RemoteAddr().String()
		}
		if r.err == nil || primary == "" {
			return r.conn, r.err
		}
	case <-timeout:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return redis.NewDialer(s.options)(ctx, "tcp", primary)
}
