#!/usr/bin/env bash
# A lock with redis-cli and raw LOCK.* commands.  Usage: recipe.sh PORT KEY
# For a real job take `holdfast run KEY -- COMMAND`: it renews the lock and stops the command when the lock is lost.
set -euo pipefail
port=$1 key=$2
lease=10000 # ms; nothing renews it beside the work, so the work has to be shorter
sure=$((lease / 100 * 99)) # a lease counts for this long, from before its request was sent: two clocks may differ by 1 %
owner=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n') # unique for each acquisition

# redis-cli prints an empty line for nil, and fails when the connection breaks.
send() { redis-cli -p "$port" -e "$@"; }

# Milliseconds since the machine started. A step of the wall clock does not change them.
now() { local up; read -r up _ </proc/uptime; echo "${up/./}0"; }

began=$(now) wait=30000 token='' broke='' certain=0
while sent=$(now) waited=$((sent - began)) && [ "$waited" -lt "$wait" ]; do
    # WAITED keeps the place in the queue when the request is sent again.
    if token=$(send LOCK.ACQUIRE "$key" "$owner" HOLDS 1 LEASE "$lease" WAIT $((wait - waited)) WAITED "$waited") &&
        [[ $token =~ ^[0-9]*$ ]]; then
        certain=$((sent + sure))
        # The lease began during the wait, but it is not known when: a renewal decides.
        [ -n "$token" ] && [ $((certain - $(now))) -lt $((sure / 2)) ] || break
        certain=$(($(now) + sure))
        if renewed=$(send LOCK.RENEW "$key" "$owner" TOKEN "$token" LEASE "$lease") && [ "$renewed" = "$token" ]; then
            break
        fi
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
[ "$(now)" -lt "$certain" ] || { echo "the work took longer than the lease" >&2; exit 4; }
redis-cli -p "$port" DECR "inside:$key" >/dev/null
trap - EXIT
release
echo released
