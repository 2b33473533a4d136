module holdfast/rueidis

go 1.24.9

require (
	github.com/redis/rueidis v1.0.70
	holdfast v0.0.0
)

require golang.org/x/sys v0.39.0 // indirect

replace holdfast => ../
