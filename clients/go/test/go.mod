module holdfast/test

go 1.26.0

require (
	github.com/redis/go-redis/v9 v9.23.0
	github.com/redis/rueidis v1.0.79
	go.uber.org/goleak v1.3.0
	holdfast v0.0.0
	holdfast/goredis v0.0.0-00010101000000-000000000000
	holdfast/rueidis v0.0.0-00010101000000-000000000000
	pgregory.net/rapid v1.3.0
)

require (
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	go.uber.org/atomic v1.12.0 // indirect
	golang.org/x/sys v0.48.0 // indirect
)

replace (
	holdfast => ../
	holdfast/goredis => ../goredis
	holdfast/rueidis => ../rueidis
)
