package test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	goredislib "github.com/redis/go-redis/v9"
	rueidislib "github.com/redis/rueidis"

	"holdfast"
	"holdfast/goredis"
	"holdfast/internal/testserver"
	"holdfast/rueidis"
)

func quiet(config *holdfast.Config) { config.Logger = slog.New(slog.DiscardHandler) }

// A place has the addresses of servers, as options of both libraries.
type place struct {
	goredis goredislib.UniversalOptions
	network string
	rueidis rueidislib.ClientOption
}

// clients makes a client with each library.
func clients(t *testing.T, p place) map[string]*holdfast.Client {
	t.Helper()
	var rdb goredislib.UniversalClient
	if p.network == "unix" {
		rdb = goredislib.NewClient(&goredislib.Options{Network: "unix", Addr: p.goredis.Addrs[0]})
	} else {
		rdb = goredislib.NewUniversalClient(&p.goredis)
	}
	t.Cleanup(func() { _ = rdb.Close() })
	first := must[*holdfast.Client](t)(goredis.New(rdb, quiet))
	p.rueidis.DisableCache = true
	rc := must[rueidislib.Client](t)(rueidislib.NewClient(p.rueidis))
	t.Cleanup(rc.Close)
	second := must[*holdfast.Client](t)(rueidis.New(rc, p.rueidis, quiet))
	t.Cleanup(func() { _, _ = first.Close(), second.Close() })
	return map[string]*holdfast.Client{"goredis": first, "rueidis": second}
}

// contend lets each client acquire a lock, and the other one wait for it.
func contend(t *testing.T, clients map[string]*holdfast.Client) {
	t.Helper()
	for name, c := range clients {
		h, err := c.Lock(short(t), "k")
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, other := range clients {
			if _, err := other.Lock(ctx, "k", holdfast.Wait(10*time.Millisecond)); err == nil {
				t.Errorf("%s: two hold the lock", name)
			}
		}
		if err := h.Renew(short(t), 0); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := h.Release(short(t)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if h, err = c.Lock(short(t), "k", holdfast.Ephemeral()); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for range 3 { // between two of these, the client reads the connection
			if err := h.Renew(short(t), 0); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := h.Release(short(t)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestUnixSocket(t *testing.T) {
	s := testserver.Start(t)
	unix := func(_ context.Context, addr string, d *net.Dialer, _ *tls.Config) (net.Conn, error) {
		return d.Dial("unix", addr)
	}
	contend(t, clients(t, place{
		network: "unix",
		goredis: goredislib.UniversalOptions{Addrs: []string{s.Addr}},
		rueidis: rueidislib.ClientOption{InitAddress: []string{s.Addr}, DialCtxFn: unix},
	}))
}

func TestACLUserAndDatabase(t *testing.T) {
	rule := "app on >secret ~* -@all +@connection +lock.acquire +lock.renew +lock.release +lock.info +lock.version +info"
	s := testserver.Start(t, append([]string{"--port", testserver.Port(t), "--user"}, strings.Fields(rule)...)...)
	contend(t, clients(t, place{
		goredis: goredislib.UniversalOptions{Addrs: []string{s.Addr}, Username: "app", Password: "secret", DB: 3, ClientName: "app"},
		rueidis: rueidislib.ClientOption{InitAddress: []string{s.Addr}, Username: "app", Password: "secret", SelectDB: 3, ClientName: "app", ForceSingleClient: true},
	}))
}

// Without a password, go-redis sends no AUTH.
func TestUserWithoutAPasswordIsIgnoredAsByGoRedis(t *testing.T) {
	s := testserver.Start(t)
	rdb := goredislib.NewClient(&goredislib.Options{Network: "unix", Addr: s.Addr, Username: "unknown"})
	t.Cleanup(func() { _ = rdb.Close() })
	if err := rdb.Ping(ctx).Err(); err != nil {
		t.Fatal(err)
	}
	c := must[*holdfast.Client](t)(goredis.New(rdb, quiet))
	t.Cleanup(func() { _ = c.Close() })
	if _, err := c.TryLock(ctx, "k"); err != nil {
		t.Error(err)
	}
}

func TestTLS(t *testing.T) {
	dir := t.TempDir()
	config := certificate(t, dir)
	s := testserver.Start(t, "--port", "0", "--tls-port", testserver.Port(t), "--tls-cert-file", filepath.Join(dir, "cert"),
		"--tls-key-file", filepath.Join(dir, "key"), "--tls-auth-clients", "no")
	contend(t, clients(t, place{
		goredis: goredislib.UniversalOptions{Addrs: []string{s.Addr}, TLSConfig: config},
		rueidis: rueidislib.ClientOption{InitAddress: []string{s.Addr}, TLSConfig: config},
	}))
}

func certificate(t *testing.T, dir string) *tls.Config {
	t.Helper()
	key := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der := must[[]byte](t)(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))
	private := must[[]byte](t)(x509.MarshalECPrivateKey(key))
	for name, block := range map[string]*pem.Block{"cert": {Type: "CERTIFICATE", Bytes: der}, "key": {Type: "EC PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pool := x509.NewCertPool()
	pool.AddCert(must[*x509.Certificate](t)(x509.ParseCertificate(der)))
	return &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
}

// Replicated locks survive a failover, and waits continue at the new primary.
func TestSentinelFailover(t *testing.T) {
	primary := testserver.Start(t, "--port", testserver.Port(t))
	host, port, _ := net.SplitHostPort(primary.Addr)
	testserver.Start(t, "--port", testserver.Port(t), "--replicaof", host+" "+port, "--repl-diskless-sync-delay", "0")
	admin := goredislib.NewClient(&goredislib.Options{Addr: primary.Addr})
	t.Cleanup(func() { _ = admin.Close() })
	testserver.Eventually(t, "the replica is online", func() bool {
		return strings.Contains(admin.Info(ctx, "replication").Val(), "state=online")
	})
	conf := filepath.Join(t.TempDir(), "sentinel.conf")
	text := fmt.Sprintf("sentinel monitor main %s %s 1\nsentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000\n", host, port)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	sentinel := testserver.StartPlain(t, conf, "--sentinel", "--port", testserver.Port(t))
	sdb := goredislib.NewSentinelClient(&goredislib.Options{Addr: sentinel.Addr})
	t.Cleanup(func() { _ = sdb.Close() })
	testserver.Eventually(t, "the sentinel knows the replica", func() bool {
		replicas, err := sdb.Replicas(ctx, "main").Result()
		return err == nil && len(replicas) == 1 && strings.Contains(replicas[0]["flags"], "slave") && replicas[0]["master-link-status"] == "ok"
	})
	both := clients(t, place{
		goredis: goredislib.UniversalOptions{Addrs: []string{sentinel.Addr}, MasterName: "main"},
		rueidis: rueidislib.ClientOption{InitAddress: []string{sentinel.Addr}, Sentinel: rueidislib.SentinelOption{MasterSet: "main"}},
	})
	contend(t, both)
	holds := map[string]*holdfast.Hold{}
	granted := make(chan error, len(both))
	for name, c := range both {
		holds[name] = must[*holdfast.Hold](t)(c.Lock(short(t), name, holdfast.Replicas(1), holdfast.Lease(20*time.Second)))
		go func() {
			h, err := c.RWLock(name).RLock(short(t))
			if err == nil {
				err = h.Release(short(t))
			}
			granted <- err
		}()
		waiting(t, c, name, 1)
	}
	primary.Kill()
	for name, h := range holds {
		testserver.Eventually(t, name+" is served by the new primary", func() bool { return h.Check(ctx) == nil })
		if err := h.Release(short(t)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for range both {
		if err := <-granted; err != nil {
			t.Error(err)
		}
	}
}

// Locks and waits follow a slot that moves to another node.
func TestClusterSlotMove(t *testing.T) {
	var nodes []*testserver.Server
	var admins []*goredislib.Client
	var ids []string
	for i := range 2 {
		s := testserver.Start(t, "--port", testserver.Port(t), "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
		admin := goredislib.NewClient(&goredislib.Options{Addr: s.Addr})
		t.Cleanup(func() { _ = admin.Close() })
		if err := admin.ClusterAddSlotsRange(ctx, i*8192, i*8192+8191).Err(); err != nil {
			t.Fatal(err)
		}
		nodes, admins, ids = append(nodes, s), append(admins, admin), append(ids, admin.Do(ctx, "CLUSTER", "MYID").Val().(string))
	}
	host, port, _ := net.SplitHostPort(nodes[1].Addr)
	if err := admins[0].ClusterMeet(ctx, host, port).Err(); err != nil {
		t.Fatal(err)
	}
	testserver.Eventually(t, "the cluster is ready", func() bool {
		ready := true
		for _, admin := range admins {
			ready = ready && strings.Contains(admin.ClusterInfo(ctx).Val(), "cluster_state:ok") && strings.Contains(admin.ClusterInfo(ctx).Val(), "cluster_known_nodes:2")
		}
		return ready
	})
	both := clients(t, place{
		goredis: goredislib.UniversalOptions{Addrs: []string{nodes[0].Addr, nodes[1].Addr}, IsClusterMode: true},
		rueidis: rueidislib.ClientOption{InitAddress: []string{nodes[0].Addr, nodes[1].Addr}},
	})
	contend(t, both)
	granted := make(chan error, len(both))
	holds := map[string]*holdfast.Hold{}
	slot := int(admins[0].ClusterKeySlot(ctx, "{tag}").Val())
	from := slot / 8192
	for name, c := range both {
		key := "{tag}" + name
		holds[name] = must[*holdfast.Hold](t)(c.LockAll(short(t), []string{key, key + "2"}))
		go func() {
			h, err := c.Lock(short(t), key)
			if err == nil {
				err = h.Release(short(t))
			}
			granted <- err
		}()
		waiting(t, c, key, 1)
	}
	to := 1 - from
	move := func(node int, args ...any) {
		t.Helper()
		if err := admins[node].Do(ctx, args...).Err(); err != nil {
			t.Fatal(args, err)
		}
	}
	move(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[from])
	move(from, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[to])
	_, targetPort, _ := net.SplitHostPort(nodes[to].Addr)
	for _, key := range admins[from].ClusterGetKeysInSlot(ctx, slot, 100).Val() {
		move(from, "MIGRATE", "127.0.0.1", targetPort, key, 0, 5000)
	}
	for name, h := range holds { // the slot is being migrated: the old node replies with -ASK
		if err := h.Renew(short(t), 0); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	move(to, "CLUSTER", "SETSLOT", slot, "NODE", ids[to])
	move(from, "CLUSTER", "SETSLOT", slot, "NODE", ids[to])
	for name, h := range holds {
		if err := h.Check(short(t)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := h.Release(short(t)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for range both {
		if err := <-granted; err != nil {
			t.Error(err)
		}
	}
}
