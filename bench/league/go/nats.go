package main

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// natsClient locks with a bucket of keys and values: NATS has no lock of its own. Create succeeds for one client; the others watch the
// key until it is deleted, or until its time to live is over. The revision is the token. A holder renews by Update.
func natsClient(league string, endpoints []string) (lockFunc, error) {
	connection, err := nats.Connect(strings.Join(endpoints, ","))
	if err != nil {
		return nil, err
	}
	stream, err := jetstream.New(connection)
	if err != nil {
		return nil, err
	}
	config := jetstream.KeyValueConfig{Bucket: "locks", TTL: lease, Storage: jetstream.FileStorage, Replicas: len(endpoints)}
	if league == "M" {
		config.Storage = jetstream.MemoryStorage
	}
	bucket, err := natsBucket(stream, config)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, key string, _ bool) (int64, func() error, error) {
		key = strings.ReplaceAll(key, ":", ".")
		for {
			revision, err := bucket.Create(ctx, key, nil)
			if err == nil {
				return int64(revision), natsHold(bucket, key, revision), nil
			}
			if !errors.Is(err, jetstream.ErrKeyExists) && !isBeingCreated(err) {
				return 0, nil, err
			}
			if err := natsDeleted(ctx, bucket, key); err != nil {
				return 0, nil, err
			}
		}
	}, nil
}

// natsBucket tries for as long as three servers may take to elect a leader: a request before that gets no answer.
func natsBucket(stream jetstream.JetStream, config jetstream.KeyValueConfig) (bucket jetstream.KeyValue, err error) {
	for range 20 {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		bucket, err = stream.CreateOrUpdateKeyValue(ctx, config)
		cancel()
		if err == nil {
			break
		}
	}
	return bucket, err
}

// isBeingCreated reports whether three servers refused a key because another client is about to create it: the library does not know
// the number of this error.
func isBeingCreated(err error) bool {
	var refusal *jetstream.APIError
	return errors.As(err, &refusal) && refusal.ErrorCode == 10164
}

// natsDeleted waits until the key is deleted, or has not been written for as long as it lives: nobody announces that it expired.
func natsDeleted(ctx context.Context, bucket jetstream.KeyValue, key string) error {
	watcher, err := bucket.Watch(ctx, key)
	if err != nil {
		return err
	}
	defer watcher.Stop() //nolint:errcheck // nothing to do about it
	expiry := time.NewTimer(lease)
	defer expiry.Stop()
	present := false
	for {
		select {
		case entry, open := <-watcher.Updates():
			switch {
			case !open:
				return errors.New("the watcher ended")
			case entry != nil && entry.Operation() == jetstream.KeyValuePut:
				present = true
				expiry.Reset(lease - time.Since(entry.Created()))
			case entry != nil || !present:
				return nil
			}
		case <-expiry.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// natsHold renews the key, and returns the function that deletes it.
func natsHold(bucket jetstream.KeyValue, key string, revision uint64) func() error {
	stop, newest := make(chan struct{}), make(chan uint64)
	go func() {
		renewal := time.NewTicker(lease / 3)
		defer renewal.Stop()
		for {
			select {
			case <-renewal.C:
				if next, err := bucket.Update(context.Background(), key, nil, revision); err == nil {
					revision = next
				}
			case <-stop:
				newest <- revision
				return
			}
		}
	}()
	return func() error {
		close(stop)
		return bucket.Delete(context.Background(), key, jetstream.LastRevision(<-newest))
	}
}
