module holdfast/contrib/dapr

go 1.26.0

require (
	github.com/dapr/components-contrib v1.18.0
	holdfast v0.0.0
)

replace holdfast => ../../
