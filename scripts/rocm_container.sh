#!/usr/bin/env bash
# Runs a command of this suite in the container image that the published ROCm runs belong to.
#
#     bash scripts/rocm_container.sh [--dry-run] rl experiment=qwen3_8b_grpo
#     bash scripts/rocm_container.sh [--dry-run] --check-versions          only compares the image's versions
#     bash scripts/rocm_container.sh --compare FILE                        `pip list --format=freeze` of an image, anywhere
#
# --dry-run prints the command and runs nothing. Run it from the folder that holds your data: that folder is /work inside.
# Models and data of the hub come from and stay in yours: $HF_HOME, or ~/.cache/huggingface.
#
# The image is verl's, docker/rocm (2026-07-20): docker/rocm/README.md names verlai/verl, and AMD's quick start for verl
# names amdagi/verl-dev with the same tag. Whether the two are one image, and whether either is bit for bit what the
# Dockerfile builds, was not found; RL_ROCM_IMAGE=NAME[@sha256:...] chooses another. CONTAINER=podman chooses the tool.
#
# What it may do: use the two kinds of GPU devices by the groups that own them, and lock and share memory. It has no
# capability, gains none, and is your user. RL_ROCM_NETWORK=host is for a cluster of several machines (default: bridge).
# AMD's own line has --privileged, SYS_PTRACE and seccomp=unconfined as well. This one has not been tried on an AMD GPU:
# where it is refused something, RL_ROCM_OPTIONS='--cap-add SYS_PTRACE --security-opt seccomp=unconfined' adds that, or
# whatever else, a volume for instance.
set -euo pipefail

image=${RL_ROCM_IMAGE:-verlai/verl:rocm7.14_torch2.12_release_0724}
container=${CONTAINER:-docker}
network=${RL_ROCM_NETWORK:-bridge}
suite=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
hub=$(realpath --canonicalize-missing "${HF_HOME:-${HOME:-/root}/.cache/huggingface}")

# docker/rocm/README.md and Dockerfile.rocm at the same date. Ray's version is not stated there.
expected='
torch 2.12.0
triton 3.7.0
vllm 0.22.1rc1
sglang 0.5.15
flash-attn 2.8.3
transformer-engine 2.14.0
megatron-core 0.18.0
flash-linear-attention 0.5.1
datasets 5.0.0
accelerate 1.14.0
mathruler 0.1.0
qwen-vl-utils 0.0.14
xgrammar 0.1.32
'

usage() { sed -n '2,8p' "${BASH_SOURCE[0]}" >&2; exit 2; }

# Reads `name==version` lines; says of each expected package whether it is there, without what builders append (+rocm...).
# Exit code 1 where one is missing or differs.
compare_versions() {
    local name wanted found installed differs=0
    installed=$(tr 'A-Z_' 'a-z-')
    while read -r name wanted; do
        [[ -n $name ]] || continue
        found=$(sed -n "s/^$name==//p" <<<"$installed" | head -n 1)
        if [[ -z $found ]]; then
            printf '  %-24s expected %-12s not installed\n' "$name" "$wanted"
            differs=1
        elif [[ ${found%%+*} != "$wanted" && ${found%%.dev*} != "$wanted" ]]; then
            printf '  %-24s expected %-12s found %s\n' "$name" "$wanted" "$found"
            differs=1
        fi
    done <<<"$expected"
    ((differs)) || echo "  every expected version is there"
    return $differs
}

dry_run=false
if [[ ${1:-} == --dry-run ]]; then
    dry_run=true
    shift
fi
[[ $# -ge 1 ]] || usage

case $1 in
    --compare)
        [[ $# -eq 2 && -r $2 ]] || usage
        compare_versions <"$2"
        exit
        ;;
    --check-versions) inside=() ;;
    -*) usage ;;
    *) inside=("$@") ;;
esac

# The groups by number: inside, their names may stand for others or for nothing.
groups=()
for name in video render; do
    id=$(getent group "$name" | cut -d: -f3 || true)
    [[ -z $id ]] || groups+=(--group-add "$id")
done

# The suite and what the image lacks go into an environment on top of the image's own. The packages that are compared
# below may not be replaced there: pip fails where the suite wants another. The image sets expandable segments for every
# process; engines cannot sleep with them and refuse to start, and the experiments set them for trainers.
script='set -euo pipefail
unset PYTORCH_ALLOC_CONF
python3 -m venv --system-site-packages /tmp/rl
source /tmp/rl/bin/activate
pip list --format=freeze >/tmp/image.txt
grep -iE "^(torch|torchvision|triton|vllm|sglang|flash.attn|transformer.engine|megatron.core)==" /tmp/image.txt >/tmp/kept.txt
pip install --quiet --disable-pip-version-check --constraint /tmp/kept.txt /suite
echo "image, compared with the versions of the published one:"
bash /suite/scripts/rocm_container.sh --compare /tmp/image.txt || true
exec "$@"'
((${#inside[@]})) ||
    script='python3 -m pip list --format=freeze --disable-pip-version-check | bash /suite/scripts/rocm_container.sh --compare /dev/stdin'

command=(
    "$container" run --rm --interactive
    --device /dev/kfd --device /dev/dri "${groups[@]}"
    --security-opt no-new-privileges --cap-drop ALL
    --network "$network" --ipc private --shm-size "${RL_ROCM_SHM:-64g}"
    --ulimit memlock=-1:-1 --ulimit stack=67108864:67108864
    --user "$(id -u):$(id -g)" --env HOME=/tmp --env USER=rl
    --volume "$suite:/suite:ro" --volume "$PWD:/work" --workdir /work
    --volume "$hub:/hub" --env HF_HOME=/hub
)
# By name alone, so that no value stands in the command line or in what --dry-run prints.
for name in WANDB_API_KEY HF_TOKEN HF_HUB_OFFLINE CUDA_VISIBLE_DEVICES RAY_ADDRESS RAY_AUTH_MODE RAY_AUTH_TOKEN; do
    [[ -z ${!name:-} ]] || command+=(--env "$name")
done
read -r -a options <<<"${RL_ROCM_OPTIONS:-}"
command+=("${options[@]}" --entrypoint bash "$image" -c "$script" rl "${inside[@]}")

if $dry_run; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi
for device in /dev/kfd /dev/dri; do
    [[ -e $device ]] || { echo "rocm_container.sh: $device is not here: this machine shows no AMD GPU." >&2; exit 1; }
done
mkdir -p "$hub"  # docker would make it, and as root
exec "${command[@]}"
