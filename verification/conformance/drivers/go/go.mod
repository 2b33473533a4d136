module holdfast/conformance

go 1.26.0

require (
	github.com/redis/go-redis/v9 v9.23.0
	golang.org/x/sys v0.48.0
	holdfast v0.0.0
	holdfast/goredis v0.0.0
)

require (
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	go.uber.org/atomic v1.12.0 // indirect
)

replace (
	holdfast => ../../../../clients/go
	holdfast/goredis => ../../../../clients/go/goredis
)
