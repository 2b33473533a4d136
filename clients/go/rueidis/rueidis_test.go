package rueidis

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"

	"holdfast"
)

// hanging is a client whose requests get no reply.
type hanging struct {
	rueidis.Client
	asked chan struct{}
}

func (h *hanging) B() rueidis.Builder { return rueidis.Builder{} }

func (h *hanging) Do(ctx context.Context, _ rueidis.Completed) rueidis.RedisResult {
	h.asked <- struct{}{}
	<-ctx.Done()
	return rueidis.RedisResult{}
}

func TestLookUpUsesTheKnownMapWhileAnotherHangs(t *testing.T) {
	client := &hanging{asked: make(chan struct{}, 1)}
	c := &cluster{client: client}
	var known slotMap
	for slot := range known {
		known[slot] = "node:1"
	}
	c.known.Store(&known)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { _, _ = c.locate(ctx, "k", true) }()
	<-client.asked
	found := make(chan string, 1)
	go func() {
		addr, _ := c.locate(ctx, "k", false)
		found <- addr
	}()
	select {
	case addr := <-found:
		if addr != "node:1" {
			t.Errorf("found %q", addr)
		}
	case <-time.After(time.Minute):
		t.Error("the look-up waits for the other one")
	}
}

// namelessNode starts a node that serves all slots and does not name its host. It returns the node's address.
func namelessNode(t *testing.T) string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	port := listener.Addr().(*net.TCPAddr).Port
	serve := func(conn net.Conn) {
		defer func() { _ = conn.Close() }()
		lines := bufio.NewScanner(conn)
		for lines.Scan() { // a line *n, and then n times the two lines $length and word
			n, _ := strconv.Atoi(strings.TrimPrefix(lines.Text(), "*"))
			var words []string
			for i := range 2 * n {
				lines.Scan()
				if i%2 == 1 {
					words = append(words, lines.Text())
				}
			}
			reply := "+OK\r\n"
			if strings.Join(words, " ") == "CLUSTER SLOTS" {
				reply = fmt.Sprintf("*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$-1\r\n:%d\r\n$2\r\nid\r\n", port)
			}
			_, _ = conn.Write([]byte(reply))
		}
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go serve(conn)
		}
	}()
	return listener.Addr().String()
}

func TestNodeWithoutAHostHasTheHostThatItWasAskedAt(t *testing.T) {
	addr := namelessNode(t)
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{addr}, AlwaysRESP2: true, DisableCache: true})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if client.Mode() != rueidis.ClientModeCluster {
		t.Fatalf("mode %v", client.Mode())
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if found, err := (&cluster{client: client}).locate(ctx, "k", false); found != addr {
		t.Errorf("got %q, %v, want %q", found, err, addr)
	}
}

func TestCredentialsFunctionGetsTheAddressOfTheServer(t *testing.T) {
	addr := namelessNode(t)
	asked := make(chan string, 1)
	option := rueidis.ClientOption{InitAddress: []string{addr}, AlwaysRESP2: true, DisableCache: true}
	client, err := rueidis.NewClient(option)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	option.AuthCredentialsFn = func(c rueidis.AuthCredentialsContext) (rueidis.AuthCredentials, error) {
		select {
		case asked <- c.Address.String():
		default:
		}
		return rueidis.AuthCredentials{}, errors.New("enough")
	}
	locks, err := New(client, option, func(config *holdfast.Config) { config.Addr, config.Locate = addr, nil })
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = locks.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	go func() { _, _ = locks.Lock(ctx, "k") }()
	select {
	case found := <-asked:
		if found != addr {
			t.Errorf("got %q, want %q", found, addr)
		}
	case <-ctx.Done():
		t.Error("the function was not called")
	}
}
