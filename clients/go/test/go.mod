module holdfast/test

go 1.26.0

require (
	go.uber.org/goleak v1.3.0
	holdfast v0.0.0
)

replace (
	holdfast => ../
	holdfast/goredis => ../goredis
	holdfast/rueidis => ../rueidis
)
