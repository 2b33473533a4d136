module holdfast/contrib/valkeyrie

go 1.24

require (
	github.com/kvtools/valkeyrie v1.0.0
	holdfast v0.0.0
)

replace holdfast => ../../
