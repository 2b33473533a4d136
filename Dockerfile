# A server with Holdfast loaded, and `holdfast` beside it; docs/deployment.md says how to run it. The base decides which server it is:
#
#   docker build -t holdfast .                                    Redis 8.0, the newest of Debian's stable release
#   docker build --build-arg BASE=debian:bookworm-slim .          Redis 7.0
#   docker build --build-arg BASE=valkey/valkey:9.1 .             Valkey 9.1 (by BuildKit: that base has a volume at /data)
#   docker build --build-arg SERVER=valkey .                      Valkey 8.1, of Debian's stable release
#
# The module is built in a container of its own, from an image that holds Rust; its C library must be no newer than the base's: for
# bookworm, --build-arg BUILD_BASE=rust:1-bookworm. `scripts/image` makes a base with debootstrap where there is no registry;
# deploy/Dockerfile.prebuilt takes a module and a program that are there already.
ARG BUILD_BASE=rust:1-trixie
ARG BASE=debian:trixie-slim

# The server that the base brings, or else the one that its distribution ships.
FROM ${BASE} AS base
ARG SERVER=redis
RUN command -v redis-server || command -v valkey-server \
    || (apt-get update && apt-get install -y --no-install-recommends ${SERVER}-server && rm -rf /var/lib/apt/lists/*)

FROM base AS server
# A number, so that orchestrators can see that it is not root's.
RUN mkdir -p /data /etc/holdfast /usr/lib/redis/modules && chown 10001:10001 /data
COPY redis.conf.example /usr/share/holdfast/redis.conf
COPY deploy/image/ /usr/local/bin/
LABEL org.opencontainers.image.title="Holdfast" \
      org.opencontainers.image.description="Distributed locks inside Redis and Valkey: a server with the module, and holdfast" \
      org.opencontainers.image.licenses="MIT"
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 6379
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s CMD ["holdfast-health"]
# Reachable from the container's network: publish the port to loopback only, or set HOLDFAST_PASSWORD.
ENTRYPOINT ["holdfast-server"]
CMD []

FROM ${BUILD_BASE} AS build
# gcc and libclang read the module API's header.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libclang-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /holdfast
COPY . .
RUN cargo build --release --locked -p holdfast -p holdfast-cli --lib --bins

FROM server
COPY --from=build /holdfast/target/release/libholdfast.so /usr/lib/redis/modules/libholdfast.so
COPY --from=build /holdfast/target/release/holdfast /usr/local/bin/holdfast
