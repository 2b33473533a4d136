// The driver of the Go client for the conformance suite: ../../DRIVER.md.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/url"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sys/unix"

	"holdfast"
	"holdfast/goredis"
)

type call struct {
	ID        uint64   `json:"id"`
	Call      string   `json:"call"`
	URL       string   `json:"url"`
	Hold      string   `json:"hold"`
	Keys      []string `json:"keys"`
	Wait      *int64   `json:"wait"`
	Lease     int64    `json:"lease"`
	Watched   bool     `json:"watched"`
	Ephemeral bool     `json:"ephemeral"`
	Shared    bool     `json:"shared"`
	Limit     int      `json:"limit"`
	Replicas  int      `json:"replicas"`
}

type outcome struct {
	ID      uint64 `json:"id,omitempty"`
	Outcome string `json:"outcome,omitempty"`
	Lost    string `json:"lost,omitempty"`
	Fence   int64  `json:"fence,omitempty"`
	Reason  string `json:"reason,omitempty"`
	Text    string `json:"text,omitempty"`
	Count   int    `json:"count,omitempty"`
	At      int64  `json:"at"`
}

type driver struct {
	mu      sync.Mutex
	out     *json.Encoder
	url     string // the argument of the last open
	client  *holdfast.Client
	library io.Closer
	holds   map[string]*holdfast.Hold
	cancels map[string]context.CancelFunc
}

func (d *driver) write(o outcome) {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	o.At = now.Nano() / 1000
	d.mu.Lock()
	defer d.mu.Unlock()
	_ = d.out.Encode(o)
}

func milliseconds(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// open creates a client of a server, by its URL: redis://, redis+cluster:// or redis+sentinel://host:port/name.
func (d *driver) open(address string) error {
	u, err := url.Parse(address)
	if err != nil {
		return err
	}
	var rdb redis.UniversalClient
	switch u.Scheme {
	case "redis+cluster":
		rdb = redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{u.Host}})
	case "redis+sentinel":
		rdb = redis.NewFailoverClient(&redis.FailoverOptions{SentinelAddrs: []string{u.Host}, MasterName: strings.Trim(u.Path, "/")})
	default:
		options, err := redis.ParseURL(address)
		if err != nil {
			return err
		}
		rdb = redis.NewClient(options)
	}
	d.close()
	d.url = address
	client, err := goredis.New(rdb, func(config *holdfast.Config) {
		config.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	})
	d.client, d.library = client, rdb
	return err
}

func (d *driver) close() {
	if d.client != nil {
		_ = d.client.Close()
		_ = d.library.Close()
		d.client = nil
	}
}

func (d *driver) acquire(c call) outcome {
	ctx, cancel := context.WithCancel(context.Background())
	d.mu.Lock()
	d.cancels[c.Hold] = cancel
	var err error
	if d.client == nil { // it was closed
		err = d.open(d.url)
	}
	client := d.client
	d.mu.Unlock()
	defer cancel()
	if err != nil {
		return failure(err)
	}
	var options []holdfast.Option
	if c.Lease > 0 {
		options = append(options, holdfast.Lease(milliseconds(c.Lease)))
		if !c.Watched {
			options = append(options, holdfast.NoRenew())
		}
	}
	if c.Ephemeral {
		options = append(options, holdfast.Ephemeral())
	}
	if c.Shared {
		options = append(options, holdfast.Shared())
	}
	if c.Limit != 0 {
		options = append(options, holdfast.Limit(c.Limit))
	}
	if c.Replicas != 0 {
		options = append(options, holdfast.Replicas(c.Replicas))
	}
	lock := client.LockAll
	if c.Wait != nil && *c.Wait == 0 {
		lock = client.TryLockAll
	} else if c.Wait != nil {
		options = append(options, holdfast.Wait(milliseconds(*c.Wait)))
	}
	hold, err := lock(ctx, c.Keys, options...)
	if err != nil {
		return failure(err)
	}
	d.mu.Lock()
	d.holds[c.Hold] = hold
	d.mu.Unlock()
	go func() {
		<-hold.Context().Done()
		var lost *holdfast.LostError
		if errors.As(context.Cause(hold.Context()), &lost) {
			d.write(outcome{Lost: c.Hold, Reason: string(lost.Reason)})
		}
	}()
	return outcome{Outcome: "held", Fence: hold.Fence()}
}

func failure(err error) outcome {
	o := outcome{Outcome: "connection", Text: err.Error()}
	var lost *holdfast.LostError
	var reply holdfast.ServerError
	switch {
	case errors.As(err, &lost):
		o.Outcome, o.Reason = "lost", string(lost.Reason)
	case errors.Is(err, context.Canceled), errors.Is(err, holdfast.ErrClosed):
		o.Outcome = "cancelled"
	case errors.Is(err, holdfast.ErrDeadlock):
		o.Outcome = "deadlock"
	case errors.As(err, &reply):
		switch reply.Code() {
		case "NOREPLICAS", "UNCONFIRMED":
			o.Outcome = "no-replicas"
		case "WRONGTYPE":
			o.Outcome = "wrong-type"
		default:
			o.Outcome = "server"
			if errors.Is(err, holdfast.ErrNotAcquired) {
				o.Outcome = "not-granted"
			}
		}
	case errors.Is(err, holdfast.ErrNotAcquired):
		o.Outcome = "not-granted"
	case errors.Is(err, holdfast.ErrModuleNotLoaded), errors.Is(err, holdfast.ErrServerTooOld), errors.Is(err, holdfast.ErrClientTooOld):
		o.Outcome = "server"
	case strings.HasPrefix(err.Error(), "holdfast: Limit"), strings.HasPrefix(err.Error(), "holdfast: lease"), strings.HasPrefix(err.Error(), "holdfast: a lock"):
		o.Outcome = "invalid"
	}
	return o
}

// withHold calls fn with a hold. The outcome is good if fn does not fail.
func (d *driver) withHold(c call, fn func(context.Context, *holdfast.Hold) error, good string) outcome {
	d.mu.Lock()
	hold := d.holds[c.Hold]
	d.mu.Unlock()
	if hold == nil {
		return outcome{Outcome: "not-held"}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := fn(ctx, hold); err != nil {
		return failure(err)
	}
	return outcome{Outcome: good}
}

func (d *driver) run(c call) outcome {
	switch c.Call {
	case "open":
		if err := d.open(c.URL); err != nil {
			return failure(err)
		}
	case "acquire":
		return d.acquire(c)
	case "release":
		return d.withHold(c, func(ctx context.Context, h *holdfast.Hold) error { return h.Release(ctx) }, "released")
	case "renew":
		return d.withHold(c, func(ctx context.Context, h *holdfast.Hold) error { return h.Renew(ctx, milliseconds(c.Lease)) }, "renewed")
	case "check":
		o := d.withHold(c, func(ctx context.Context, h *holdfast.Hold) error { return h.Check(ctx) }, "held")
		if o.Outcome == "connection" || o.Outcome == "server" {
			o.Outcome = "uncertain"
		}
		return o
	case "cancel":
		d.mu.Lock()
		cancel := d.cancels[c.Hold]
		d.mu.Unlock()
		if cancel != nil {
			cancel()
		}
	case "close":
		d.close()
	case "threads":
		return outcome{Outcome: "ok", Count: runtime.NumGoroutine()}
	default:
		return outcome{Outcome: "invalid", Text: "this driver has no " + c.Call}
	}
	return outcome{Outcome: "ok"}
}

func main() {
	d := &driver{out: json.NewEncoder(os.Stdout), holds: map[string]*holdfast.Hold{}, cancels: map[string]context.CancelFunc{}}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var c call
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			slog.Error("not a call", "line", lines.Text(), "error", err)
			continue
		}
		answer := func() {
			o := d.run(c)
			o.ID = c.ID
			d.write(o)
		}
		switch c.Call {
		case "open", "cancel", "threads": // these end before the next call is read
			answer()
		default:
			go answer()
		}
	}
	d.close()
}
