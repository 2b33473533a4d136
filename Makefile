# What can be done here. `make` alone lists it.

.DEFAULT_GOAL := help
.PHONY: help run stop build install-build test simulate test-versions test-pythons test-containers conformance lint bench bench-quick league lab image dist test-dist test-deploy docs install

help: ## Lists these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: install-build ## Builds the module and starts a Redis with it on 127.0.0.1
	@scripts/run

stop: ## Stops the Redis that `make run` started
	@scripts/run --stop

build: install-build ## Builds the module: target/release/libholdfast.so
	@HOLDFAST_MODULE= scripts/build

test: install ## Runs every test against this machine's Redis (ARGS=name: those whose name contains it)
	@scripts/test $(ARGS)

test-versions: install ## The same tests on each server of scripts/servers (SERVERS="redis-8.0 …", ARGS=name)
	@scripts/test-versions $(ARGS)

test-pythons: install ## The Python client's tests with every Python that can be had here (ARGS=file)
	@clients/python/run-tests --all $(ARGS)

test-containers: install ## The same tests against servers in containers (ARGS=name)
	@scripts/test-containers $(ARGS)

conformance: install ## Runs every scenario of the client specification against all clients, with faults between any two messages (ARGS="--client rust --clean")
	@scripts/conformance $(ARGS)

simulate: install ## Seeded runs of the module on a server in memory, checked after each event-loop iteration (SEED=n: from this one on; MINUTES=n, RUNS=n)
	@cargo run --profile simulation --locked -q -p simulator --bin simulate -- --seed $(or $(SEED),1) $(if $(RUNS),--runs $(RUNS),--minutes $(or $(MINUTES),1))

lint: install ## Formatting, clippy, documentation, cycles among modules, linters of the clients: no warning passes
	scripts/timing
	$$(scripts/python) scripts/prose
	tests/skips.py --test
	deploy/packages/release --test
	deploy/packages/dist --version
	scripts/workflows --check
	scripts/modules --check
	verification/simulator/inject --check
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet
	scripts/test-clients --lint

bench: install build ## Measures the module beside what people use today, into target/bench
	@scripts/bench

bench-quick: install build ## The same in two minutes: shows that it runs, judges nothing
	@scripts/bench --quick

league: ## Measures Holdfast beside its competitors, into docs/league.md (ARGS=--smoke: shows that it runs)
	@bench/league/run $(ARGS)

lab: install build ## Failover, partitions, kill -9, random requests: tries to break it (LAB_MINUTES=n)
	@scripts/lab

image: install ## Builds the container image holdfast-test:redis-8.0 (SERVER=redis-7.0, valkey-8.1, valkey-9.1: with that server)
	@scripts/image

dist: install ## Makes the packages in target/dist: tarball, Debian package, wheel, crates, bill of materials, checksums
	@deploy/packages/dist

test-dist: install ## Makes them twice, compares, installs and uses them (ARGS=--twice: compiles twice, too)
	@deploy/packages/test-dist $(ARGS)

test-deploy: install ## Checks deploy/, and starts and uses its shapes and the chart in containers (SERVER=valkey-9.1: with that server)
	@deploy/tests/run

docs: install ## Builds the documentation's site: target/site/index.html
	@docs/site/build

install: ## Installs what is missing for all of these (nothing, when all is there)
	@scripts/install

# Neither other languages nor what only tests use.
install-build:
	@scripts/install --build
