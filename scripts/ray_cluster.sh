#!/usr/bin/env bash
# Makes a Ray cluster of several machines for `rl ... ray.address=HEAD_ADDRESS:PORT`.
#
#     bash scripts/ray_cluster.sh head ADDRESS [PORT]     on the first machine; ADDRESS is its own, in the cluster's network
#     bash scripts/ray_cluster.sh join ADDRESS [PORT]     on every other machine; ADDRESS is the head's
#     bash scripts/ray_cluster.sh stop                    on every machine, when the work is done
#
# Every machine needs the same environment and the run folder under the same path, and one secret: the head makes it in
# ~/.ray/auth_token, and where home is not shared, copy that file to the others before they join.
#
# What is exposed: the head listens on ADDRESS:PORT and on more ports of that interface (object store, node manager,
# workers), every other machine likewise. Who reaches one of them and knows the token can run code as you. Use a network
# that only the cluster's machines are in. The dashboard is not started; Ray's client server stays off.
set -euo pipefail

usage() { sed -n '2,8p' "${BASH_SOURCE[0]}" >&2; exit 2; }

[[ $# -ge 1 ]] || usage
command=$1
port=${3:-6379}

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

refuse_hidden_devices() {
    for name in HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES; do
        if [[ -n "${!name:-}" ]]; then
            echo "ray_cluster.sh: $name=${!name} would choose GPUs beside CUDA_VISIBLE_DEVICES, by which a run gives them" \
                "to its processes. Unset it; to leave out GPUs use CUDA_VISIBLE_DEVICES, which ROCm reads too." >&2
            exit 1
        fi
    done
}

export RAY_USAGE_STATS_ENABLED=0
# The processes of a run have environments of their own, so no worker that waits in stock would ever be used.
export RAY_enable_worker_prestart=0 RAY_prestart_worker_first_driver=0
# A run gives its processes their GPUs itself.
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0

case $command in
    head)
        [[ $# -ge 2 ]] || usage
        refuse_hidden_devices
        require_tokens
        # On a loopback address Ray would take another one, and listen on every interface.
        [[ $2 == 127.* ]] && export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
        make_token
        ray start --head --node-ip-address="$2" --port="$port" --include-dashboard=false --disable-usage-stats
        echo
        echo "exposed on $2: port $port and Ray's other ports, to whoever has the token ($token); no dashboard"
        echo "others:  bash scripts/ray_cluster.sh join $2 $port"
        echo "run:     RAY_AUTH_MODE=token rl ... ray.address=$2:$port"
        ;;
    join)
        [[ $# -ge 2 ]] || usage
        refuse_hidden_devices
        require_tokens
        ray start --address="$2:$port" --disable-usage-stats
        ;;
    stop) ray stop ;;
    *) usage ;;
esac
