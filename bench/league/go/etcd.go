package main

import (
	"context"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
)

// etcdClient has one session of 10 s for all its locks, as the documentation of package concurrency shows.
func etcdClient(_ string, endpoints []string) (lockFunc, error) {
	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints, Logger: zap.NewNop()})
	if err != nil {
		return nil, err
	}
	session, err := concurrency.NewSession(client, concurrency.WithTTL(int(lease.Seconds())))
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, key string, _ bool) (int64, func() error, error) {
		mutex := concurrency.NewMutex(session, key)
		if err := mutex.Lock(ctx); err != nil {
			return 0, nil, err
		}
		return mutex.Header().Revision, func() error { return mutex.Unlock(context.Background()) }, nil
	}, nil
}
