module holdfast/contrib/vault

go 1.26.0

require (
	github.com/hashicorp/vault/sdk v0.25.1
	holdfast v0.0.0
)

replace holdfast => ../../
