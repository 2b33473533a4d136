# A server with Holdfast loaded. Both base images are arguments: any image with apt that holds Rust for the one, any with apt
# for the other, from a registry or home-made (`scripts/image` makes one with debootstrap where there is no registry).
#
#   docker build -t holdfast .                        builds the module in a container of its own
#   docker build -t holdfast --target prebuilt .      takes the module that `make build` made on this machine
#
# The module and the server should see the same C library: choose both bases of one release.
ARG BUILD_BASE=rust:1-bookworm
ARG BASE=debian:bookworm-slim

# The server as its distribution ships it. Nothing to install where the base brings it.
FROM ${BASE} AS server
RUN command -v redis-server \
    || (apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*)
RUN mkdir -p /data /usr/lib/redis/modules && chown redis:redis /data
WORKDIR /data
USER redis
EXPOSE 6379
# Reachable from the container's network: publish the port to loopback only, or set a password.
CMD ["redis-server", "--loadmodule", "/usr/lib/redis/modules/libholdfast.so", "--bind", "*", "--protected-mode", "no"]

# Stands before the build stage, so that builders that go through the stages in order never come to that one.
FROM server AS prebuilt
COPY target/release/libholdfast.so /usr/lib/redis/modules/libholdfast.so

FROM ${BUILD_BASE} AS build
# gcc and libclang read the module API's header.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libclang-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /holdfast
COPY Cargo.toml Cargo.lock ./
COPY src src
COPY tests tests
COPY bench bench
COPY lab lab
COPY clients/rust clients/rust
COPY cli cli
RUN cargo build --release --locked --lib

FROM server
COPY --from=build /holdfast/target/release/libholdfast.so /usr/lib/redis/modules/libholdfast.so
