package main

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// postgresqlClient uses one session of the server for each client. Advisory locks are in memory, whatever the server writes.
func postgresqlClient(_ string, endpoints []string) (lockFunc, error) {
	session, err := pgx.Connect(context.Background(), endpoints[0])
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, key string, shared bool) (int64, func() error, error) {
		lock, unlock := "select pg_advisory_lock(hashtext($1))", "select pg_advisory_unlock(hashtext($1))"
		if shared {
			lock, unlock = "select pg_advisory_lock_shared(hashtext($1))", "select pg_advisory_unlock_shared(hashtext($1))"
		}
		if _, err := session.Exec(ctx, lock, key); err != nil {
			return 0, nil, err
		}
		return 0, func() error { _, err := session.Exec(context.Background(), unlock, key); return err }, nil
	}, nil
}
