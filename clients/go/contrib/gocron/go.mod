module holdfast/contrib/gocron

go 1.24

require (
	github.com/go-co-op/gocron/v2 v2.21.2
	holdfast v0.0.0
)

replace holdfast => ../../
