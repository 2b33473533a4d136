module holdfast/contrib/valkeyrie

go 1.24

require (
	github.com/kvtools/valkeyrie v1.0.0
	holdfast v0.0.0
)

require (
	github.com/davecgh/go-spew v1.1.1 // indirect
	github.com/kr/text v0.2.0 // indirect
	github.com/pmezard/go-difflib v1.0.0 // indirect
	github.com/stretchr/testify v1.8.0 // indirect
	gopkg.in/yaml.v3 v3.0.1 // indirect
)

replace holdfast => ../../
