// Package recipe is what both Go recipes share: a lock with raw LOCK.* commands over a function that sends one command.
package recipe

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"time"
)

const (
	lease = 10 * time.Second // a killed process blocks others for at most this long
	sure  = lease * 99 / 100 // a lease counts for this long, from before its request was sent: two clocks may differ by 1 %
	pause = 100 * time.Millisecond
	// Silence is the read timeout of commands that do not wait.
	Silence = lease / 8
)

// ErrBroken is what a Send returns, wrapped, when the connection broke or could not be opened; other errors are error replies.
var ErrBroken = errors.New("the connection broke")

// Send sends one command. It never repeats a command. A nil reply is (0, false, nil).
type Send func(ctx context.Context, command string, key string, args ...any) (reply int64, ok bool, err error)

// Library is a Redis library: Wait sends commands that block, over connections without a read timeout.
type Library struct{ Wait, Short Send }

func ms(d time.Duration) int64 { return int64((d + time.Millisecond - 1) / time.Millisecond) }

// WithLock runs work while it holds key; the context ends when the lock is lost. It waits for at most wait.
func (l Library) WithLock(ctx context.Context, key string, wait time.Duration, work func(ctx context.Context, token int64) error) error {
	id := make([]byte, 16) // unique for each acquisition
	if _, err := rand.Read(id); err != nil {
		return err
	}
	owner := hex.EncodeToString(id)
	token, certain, broke, err := l.acquire(ctx, key, owner, wait)
	if err != nil {
		return err
	}
	held, lose := context.WithCancelCause(ctx)
	lost := time.AfterFunc(time.Until(certain), func() { lose(fmt.Errorf("%s is lost", key)) })
	defer lost.Stop()
	done := make(chan struct{})
	go func() { defer close(done); l.renewals(held, lost, key, owner, token) }()
	err = work(held, token)
	lose(nil)
	<-done
	return errors.Join(err, l.release(key, owner, token, broke))
}

// acquire returns the token, until when the lock is certainly held, and whether a connection broke.
func (l Library) acquire(ctx context.Context, key, owner string, wait time.Duration) (token int64, certain time.Time, broke bool, err error) {
	for began := time.Now(); time.Since(began) < wait; time.Sleep(pause) {
		sent := time.Now()
		waited := sent.Sub(began) // keeps the place in the queue when the request is sent again
		token, ok, err := l.Wait(ctx, "LOCK.ACQUIRE", key, owner, "HOLDS", 1, "LEASE", ms(lease), "WAIT", ms(wait-waited), "WAITED", ms(waited))
		certain := sent.Add(sure)
		if ok && time.Until(certain) < sure/2 { // the lease began during the wait, but it is not known when
			certain, ok, err = l.renew(ctx, key, owner, token)
		}
		if ok {
			return token, certain, broke, nil
		}
		if err == nil {
			break
		}
		if !errors.Is(err, ErrBroken) {
			return 0, certain, broke, err
		}
		broke = true
	}
	if broke { // a request may still be on its way
		_, _, err = l.Short(context.WithoutCancel(ctx), "LOCK.RELEASE", key, owner, "ALL")
	}
	return 0, certain, broke, errors.Join(fmt.Errorf("%s was not acquired within %v", key, wait), err)
}

func (l Library) renew(ctx context.Context, key, owner string, token int64) (certain time.Time, ok bool, err error) {
	sent := time.Now()
	_, ok, err = l.Short(ctx, "LOCK.RENEW", key, owner, "TOKEN", token, "LEASE", ms(lease))
	return sent.Add(sure), ok, err
}

// renewals renews the lock until ctx ends. The timer lost fires when the lock is not certainly held any more.
func (l Library) renewals(ctx context.Context, lost *time.Timer, key, owner string, token int64) {
	for wait := lease / 4; ; {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		certain, ok, err := l.renew(ctx, key, owner, token)
		switch {
		case err != nil:
			wait = pause // asked again while the lease is certain
		case ok:
			lost.Reset(time.Until(certain))
			wait = lease / 4
		default:
			lost.Reset(0)
			return
		}
	}
}

func (l Library) release(key, owner string, token int64, broke bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), lease) // after that the lease has ended anyway
	defer cancel()
	for first := true; ctx.Err() == nil; first = false {
		_, ok, err := l.Short(ctx, "LOCK.RELEASE", key, owner, "TOKEN", token)
		if err == nil && broke { // a request that was sent twice may still be in the queue
			_, _, err = l.Short(ctx, "LOCK.RELEASE", key, owner, "ALL")
		}
		switch {
		case errors.Is(err, ErrBroken):
			broke = true
			time.Sleep(pause)
		case err != nil:
			return err
		case !ok && first:
			return fmt.Errorf("%s had been lost", key)
		default:
			return nil // nil to a repetition: the first reply was lost
		}
	}
	return ctx.Err()
}

// Main is the program of both recipes. incr adds to a counter.
func Main(l Library, key string, incr func(key string, by int64) (int64, error)) {
	err := l.WithLock(context.Background(), key, 30*time.Second, func(ctx context.Context, token int64) error {
		fmt.Println("held", token)
		if n, err := incr("inside:"+key, 1); err != nil || n != 1 {
			return fmt.Errorf("two processes hold the lock: %d, %w", n, err)
		}
		time.Sleep(lease / 2) // the work
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		_, err := incr("inside:"+key, -1)
		return err
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("released")
}
