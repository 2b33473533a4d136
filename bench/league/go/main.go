// Command league is the Go part of the league: it locks with one contender as bench/league/league.py tells it on standard input, or is
// one of the servers that have no program of their own.
//
//	league client CONTENDER LEAGUE ENDPOINT,ENDPOINT…
//	league server etcd|nats …
//
// bench/league/README.md describes the lines that come in and go out.
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A lockFunc waits for a lock. A token of 0 means that the contender has none.
type lockFunc func(ctx context.Context, key string, shared bool) (token int64, unlock func() error, err error)

// A contender makes one client, with connections of its own.
type contender func(league string, endpoints []string) (lockFunc, error)

var contenders = map[string]contender{
	"holdfast-go":           holdfastClient(),
	"holdfast-go-ephemeral": holdfastClient(ephemeral),
	"redsync":               redsyncClient,
	"redislock":             redislockClient,
	"postgresql":            postgresqlClient,
	"etcd":                  etcdClient,
	"nats":                  natsClient,
}

// bootNow and bootMonotonic are the same moment. Python, Java and Node read CLOCK_MONOTONIC, and so must this program.
var bootNow, bootMonotonic = func() (time.Time, int64) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err)
	}
	return time.Now(), now.Nano()
}()

func monotonic() int64 { return bootMonotonic + int64(time.Since(bootNow)) }

func main() {
	if len(os.Args) > 2 && os.Args[1] == "server" {
		fail(serve(os.Args[2], os.Args[3:]))
		return
	}
	if len(os.Args) != 5 || os.Args[1] != "client" || contenders[os.Args[2]] == nil {
		fail(fmt.Errorf("usage: league client CONTENDER LEAGUE ENDPOINTS"))
	}
	driver := &driver{
		connect: func() (lockFunc, error) {
			return contenders[os.Args[2]](os.Args[3], strings.Split(os.Args[4], ","))
		},
		unlocks: map[string]func() error{},
	}
	say("ready")
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		fail(driver.obey(strings.Fields(lines.Text())))
	}
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "league:", err)
		os.Exit(1)
	}
}

var output sync.Mutex

func say(format string, values ...any) {
	output.Lock()
	defer output.Unlock()
	fmt.Printf(format+"\n", values...)
}

type driver struct {
	connect func() (lockFunc, error)
	clients []lockFunc
	unlocks map[string]func() error
}

// open makes sure that there are n clients.
func (d *driver) open(n int) error {
	for len(d.clients) < n {
		client, err := d.connect()
		if err != nil {
			return err
		}
		d.clients = append(d.clients, client)
	}
	return nil
}

func (d *driver) obey(words []string) error {
	values := map[string]int{}
	for _, word := range words[1:] {
		if name, value, found := strings.Cut(word, "="); found {
			if n, err := strconv.Atoi(value); err == nil {
				values[name] = n
			}
		}
	}
	switch words[0] {
	case "run":
		if err := d.open(values["clients"]); err != nil {
			return err
		}
		return d.run(values, words[len(words)-1])
	case "lock":
		if err := d.open(1); err != nil {
			return err
		}
		token, unlock, err := d.clients[0](context.Background(), words[1], false)
		if err != nil {
			say("failed %v", err)
			return nil
		}
		d.unlocks[words[1]] = unlock
		say("held %d %d", monotonic(), token)
	case "unlock":
		if err := d.unlocks[words[1]](); err != nil {
			say("failed %s", strings.ReplaceAll(err.Error(), "\n", " "))
			return nil
		}
		say("released")
	case "wait":
		if err := d.open(values["clients"]); err != nil {
			return err
		}
		for _, lock := range d.clients {
			go lock(context.Background(), words[1], false) //nolint:errcheck // ends with the process
		}
		say("waiting")
	default:
		return fmt.Errorf("unknown request %q", words)
	}
	return nil
}

// A sample is one acquisition.
type sample struct {
	client, key                         int
	shared                              bool
	asked, granted, releasing, released int64
	token                               int64
}

const writer = 1 << 16

func (d *driver) run(values map[string]int, path string) error {
	clients, keys, readers := values["clients"], values["keys"], values["readers"]
	inside := make([]atomic.Int64, keys)
	samples := make([][]sample, clients)
	var overlaps, failures atomic.Int64
	var stop atomic.Bool
	var first atomic.Value
	var running sync.WaitGroup
	for client := range clients {
		running.Go(func() {
			key := client % keys
			name := fmt.Sprintf("league:%d:%d", values["round"], key)
			seed := uint32(client + 1)
			for !stop.Load() {
				seed = seed*1664525 + 1013904223
				s := sample{client: client, key: key, shared: int(seed>>16)%100 < readers, asked: monotonic()}
				token, unlock, err := d.clients[client](context.Background(), name, s.shared)
				if err != nil {
					first.CompareAndSwap(nil, err.Error())
					failures.Add(1)
					time.Sleep(10 * time.Millisecond)
					continue
				}
				s.granted, s.token = monotonic(), token
				weight, most := int64(writer), int64(writer)
				if s.shared {
					weight, most = 1, writer-1
				}
				if inside[key].Add(weight) > most {
					overlaps.Add(1)
				}
				inside[key].Add(-weight)
				s.releasing = monotonic()
				if err := unlock(); err != nil {
					first.CompareAndSwap(nil, err.Error())
					failures.Add(1)
				}
				s.released = monotonic()
				samples[client] = append(samples[client], s)
			}
		})
	}
	time.Sleep(time.Duration(values["warm"]) * time.Millisecond)
	say("begin %d", monotonic())
	time.Sleep(time.Duration(values["ms"]) * time.Millisecond)
	say("end %d", monotonic())
	stop.Store(true)
	running.Wait()
	if failure := first.Load(); failure != nil {
		fmt.Fprintln(os.Stderr, "league:", failure)
	}
	if err := write(path, samples); err != nil {
		return err
	}
	say("done %d %d", overlaps.Load(), failures.Load())
	return nil
}

func write(path string, samples [][]sample) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer file.Close()
	out := bufio.NewWriter(file)
	for _, of := range samples {
		for _, s := range of {
			shared := 0
			if s.shared {
				shared = 1
			}
			fmt.Fprintln(out, s.client, s.key, shared, s.asked, s.granted, s.releasing, s.released, s.token)
		}
	}
	return out.Flush()
}
