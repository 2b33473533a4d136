# A server with Holdfast loaded, and `holdfast` beside it; deploy/README.md says how to run it. Both base images are arguments: any
# image with apt that holds Rust for the one, any with apt for the other, from a registry or home-made (`scripts/image` makes one
# with debootstrap where there is no registry). deploy/Dockerfile.prebuilt takes a module and a program that are there already.
#
#   docker build -t holdfast .                        builds the module in a container of its own
#   docker build --build-arg SERVER=valkey --build-arg BASE=debian:trixie-slim --build-arg BUILD_BASE=rust:1-trixie .
#
# The module and the server should see the same C library: choose both bases of one release.
ARG BUILD_BASE=rust:1-bookworm
ARG BASE=debian:bookworm-slim

# The server as its distribution ships it. Nothing to install where the base brings it.
FROM ${BASE} AS base
ARG SERVER=redis
RUN command -v ${SERVER}-server \
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

FROM ${BUILD_BASE} AS build
# gcc and libclang read the module API's header.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libclang-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /holdfast
COPY . .
RUN cargo build --release --locked -p holdfast -p holdfast-cli --lib --bins

FROM server
COPY --from=build /holdfast/target/release/libholdfast.so /usr/lib/redis/modules/libholdfast.so
COPY --from=build /holdfast/target/release/holdfast /usr/local/bin/holdfast
