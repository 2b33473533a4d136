#!/usr/bin/env bash
# A lock with redis-cli and raw LOCK.* commands.  Usage: recipe.sh PORT KEY
# For a real job take `holdfast run KEY -- COMMAND`: it renews the lock and stops the command when the lock is lost.
set -euo pipefail
port=$1 key=$2
lease=10000 # ms; nothing renews it here, so the work has to be shorter
owner=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n') # unique for each acquisition

# redis-cli prints an empty line for nil, and fails when the connection breaks.
send() { redis-cli -p "$port" -e "$@"; }

began=$(date +%s%3N) wait=30000 token='' broke=
while waited=$(($(date +%s%3N) - began)) && [ "$waited" -lt "$wait" ]; do
    # WAITED keeps the place in the queue when the request is sent again.
    if token=$(send LOCK.ACQUIRE "$key" "$owner" HOLDS 1 LEASE "$lease" WAIT $((wait - waited)) WAITED "$waited") &&
        [[ $token =~ ^[0-9]*$ ]]; then
        break
    fi
    token='' broke=1
    sleep 0.1
done
release() {
    local reply
    for _ in 1 2 3 4 5; do # within the lease; after that it has ended anyway
        # A request that was sent twice may still be in the queue: ALL withdraws it.
        if [ -z "$token" ] || reply=$(send LOCK.RELEASE "$key" "$owner" TOKEN "$token") && [[ ${reply:-1} =~ ^[01]$ ]]; then
            [ -z "$broke" ] || send LOCK.RELEASE "$key" "$owner" ALL >/dev/null || { sleep 0.1; continue; }
            return
        fi
        broke=1
        sleep 0.1
    done
}
trap release EXIT
[ -n "$token" ] || { echo "$key was not acquired" >&2; exit 1; }

echo "held $token"
[ "$(redis-cli -p "$port" INCR "inside:$key")" = 1 ] || { echo "two processes hold the lock" >&2; exit 3; }
sleep 0.5 # the work
redis-cli -p "$port" DECR "inside:$key" >/dev/null
trap - EXIT
release
echo released
