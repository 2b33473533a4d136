module holdfast/contrib/certmagic

go 1.25

require (
	github.com/caddyserver/certmagic v0.25.6
	holdfast v0.0.0
)

replace holdfast => ../../
