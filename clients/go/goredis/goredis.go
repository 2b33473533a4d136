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

// failover is the address of go-redis clients whose dialer asks a Sentinel.
const failover = "FailoverClient"

// lookUp is how long a Sentinel may take before the last known address is tried.
const lookUp = 500 * time.Millisecond

// New returns a client for the servers of rdb, which must be a [redis.Client], also one made by
// [redis.NewFailoverClient], or a [redis.ClusterClient]. Closing it does not close rdb.
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

// setup returns the commands that go-redis, too, sends first on a connection.
func setup(o *redis.Options) func(context.Context) ([][]string, error) {
	return func(ctx context.Context) (commands [][]string, err error) {
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
		if password == "" {
			user = ""
		}
		return holdfast.Handshake(user, password, o.DB, o.ClientName), nil
	}
}

// discard ignores new credentials: each connection reads them when it is opened.
type discard struct{}

func (discard) OnNext(auth.Credentials) {}
func (discard) OnError(error)           {}

// A sentinel dials the primary that go-redis finds, and the last known one while a Sentinel does not reply.
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
	go func() { // the dialer does not end with ctx while a Sentinel is silent
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
	var patience <-chan time.Time
	if primary != "" {
		patience = time.After(lookUp)
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
	case <-patience:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return redis.NewDialer(s.options)(ctx, "tcp", primary)
}
