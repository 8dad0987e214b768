#!/usr/bin/env bash
# Makes a Ray cluster of several machines for `rl ... ray.address=HEAD_ADDRESS:PORT`.
#
#     bash scripts/ray_cluster.sh head ADDRESS [PORT] [--block]   on the first machine; ADDRESS is its own there
#     bash scripts/ray_cluster.sh join ADDRESS [PORT] [--block]   on every other machine; ADDRESS is the head's
#     bash scripts/ray_cluster.sh stop                            on every machine, when the work is done
#     bash scripts/ray_cluster.sh wait ADDRESS PORT COUNT         on the first: until so many machines are in the cluster
#     bash scripts/ray_cluster.sh address                         prints an address of this machine that others can reach
#
# With --block Ray runs until this script is ended, for whoever ends what a command leaves behind, as Slurm does.
# Machines wait for each other for RL_CLUSTER_LIMIT_S seconds, 300 by default.
# Every machine needs the same environment and the run folder under the same path, and one secret: the head makes it in
# ~/.ray/auth_token, and where home is not shared, copy that file to the others before they join.
#
# What is exposed: the head listens on ADDRESS:PORT and on more ports of that interface (object store, node manager,
# workers), every other machine likewise. Who reaches one of them and knows the token can run code as you. Use a network
# that only the cluster's machines are in. The dashboard is not started; Ray's client server stays off.
set -euo pipefail

limit_s=${RL_CLUSTER_LIMIT_S:-300}  # of machines that wait for each other
kfd=${RL_KFD_NODES:-/sys/class/kfd/kfd/topology/nodes}  # Linux's list of AMD's GPUs, and of the CPUs; tests have another

usage() { sed -n '2,10p' "${BASH_SOURCE[0]}" >&2; exit 2; }
fail() { echo "ray_cluster.sh: $*" >&2; exit 1; }

[[ $# -ge 1 ]] || usage
command=$1
port=${3:-6379}
[[ $port != --block ]] || { set -- "$1" "$2" 6379 --block; port=6379; }
block=${4:-}

token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}

# Without a token whoever reaches a port can run code here. Not asked of `ray` itself: each call of it takes seconds.
require_tokens() {
    python - <<'PYTHON' || exit 1
import importlib.util, sys
if importlib.util.find_spec("ray") is None:
    sys.exit("ray_cluster.sh: Ray is not in this environment.")
if importlib.util.find_spec("ray._private.authentication") is None:
    sys.exit("ray_cluster.sh: this Ray has no token authentication. Install a newer one: pip install -U ray.")
PYTHON
    export RAY_AUTH_MODE=token
}

make_token() {
    [[ -n "${RAY_AUTH_TOKEN:-}" || -s $token ]] && return
    mkdir -p "$(dirname "$token")"
    (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$token")
}

# A run takes a machine whole and gives its processes their GPUs by CUDA_VISIBLE_DEVICES. On AMD Ray itself counts by
# HIP_VISIBLE_DEVICES alone. So no variable may leave GPUs out, and one that names all of them, as Slurm sets it, can go.
clear_device_variables() {
    local count=0 names=(HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES) name all
    if [[ -d $kfd ]]; then
        count=$(cat "$kfd"/*/properties | grep -c '^simd_count [1-9]' || true)
    fi
    ((count == 0)) || names+=(CUDA_VISIBLE_DEVICES)
    all=$(seq -s , 0 $((count - 1)))
    for name in "${names[@]}"; do
        [[ -z "${!name:-}" || "${!name}" == "$all" ]] || fail "$name=${!name} would leave out GPUs of this machine, or" \
            "name them in another order, but a run in a cluster takes whole machines: Ray counts AMD's GPUs by" \
            "HIP_VISIBLE_DEVICES alone, and a run gives them to its processes by CUDA_VISIBLE_DEVICES alone. Unset" \
            "$name. For some GPUs of one machine run there without a cluster, and choose them by CUDA_VISIBLE_DEVICES."
        unset "$name"
    done
}

# The address of this machine's name where that is one of its own and not the loopback one, else its first IPv4.
own_address() {
    local own named one
    own=$(hostname --all-ip-addresses)
    named=$(getent ahostsv4 "$(hostname)" | awk '{print $1}' || true)
    for one in $named $own; do
        [[ $one =~ ^[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+$ && $one != 127.* && " $own " == *" $one "* ]] || continue
        echo "$one"
        return
    done
    fail "$(hostname) has no IPv4 address but the loopback one, by which no other machine reaches it (it has: $own)."
}

wait_for_head() {
    local end=$((SECONDS + limit_s))
    until (exec 3<>"/dev/tcp/$1/$port") 2>/dev/null; do
        ((SECONDS < end)) || fail "nothing listens on $1:$port after $limit_s s. Start the head there (ray_cluster.sh" \
            "head $1 $port), and look whether a firewall lets this machine ($(hostname)) reach it."
        sleep 1
    done
}

wait_for_machines() {
    wait_for_head "$1"
    python - "$1:$port" "$2" "$limit_s" <<'PYTHON'
import sys, time
import ray

address, count, limit_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
deadline = time.monotonic() + limit_s
while len(there := [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]) < count:
    if time.monotonic() > deadline:
        sys.exit(
            f"ray_cluster.sh: after {limit_s:g} s {len(there)} of {count} machines are in the cluster at {address}: "
            f"{', '.join(there)}. What the others say is in the output of their steps."
        )
    time.sleep(1.0)
PYTHON
}

export RAY_USAGE_STATS_ENABLED=0
# The processes of a run have environments of their own, so no worker that waits in stock would ever be used.
export RAY_enable_worker_prestart=0 RAY_prestart_worker_first_driver=0
# A run gives its processes their GPUs itself.
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
# On a loopback address Ray would take another one, and listen on every interface.
unset RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER
[[ ${2:-} != 127.* ]] || export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0

case $command in
    head)
        [[ $# -ge 2 ]] || usage
        clear_device_variables
        require_tokens
        make_token
        echo "exposed on $2: port $port and Ray's other ports, to whoever has the token ($token); no dashboard"
        echo "others:  bash scripts/ray_cluster.sh join $2 $port"
        echo "run:     RAY_AUTH_MODE=token rl ... ray.address=$2:$port"
        exec ray start --head --node-ip-address="$2" --port="$port" --include-dashboard=false --disable-usage-stats \
            ${block:+"$block"}
        ;;
    join)
        [[ $# -ge 2 ]] || usage
        clear_device_variables
        require_tokens
        wait_for_head "$2"
        exec ray start --address="$2:$port" --disable-usage-stats ${block:+"$block"}
        ;;
    wait)
        [[ $# -eq 4 ]] || usage
        require_tokens
        wait_for_machines "$2" "$4"
        ;;
    address) own_address ;;
    stop) ray stop ;;
    *) usage ;;
esac
