#!/usr/bin/env bash
#SBATCH --job-name=rl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# One run over all nodes of a Slurm job: a Ray head on the first, the others join, the run starts on the first.
#
#     sbatch --nodes=4 --gpus-per-node=8 scripts/slurm_run.sh experiment=NAME hardware=NAME output_dir=SHARED_FOLDER
#
# Submit it from the project's folder, in the run's environment. What is exposed, and to whom: see ray_cluster.sh.
set -euo pipefail

[[ $# -ge 1 ]] || { echo "give the words of the run: sbatch scripts/slurm_run.sh experiment=NAME ..." >&2; exit 2; }
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
port=$((20000 + SLURM_JOB_ID % 20000))  # two jobs of one machine do not meet
on_head=(srun --overlap --nodes=1 --ntasks=1 -w "$head")
address=$("${on_head[@]}" bash scripts/ray_cluster.sh address)

# The token of this job alone: every task gets it by the environment, and no file keeps it.
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

# Each Ray runs within a step that lasts: where Slurm tracks processes by cgroup, what a step started ends with it.
rays=()
stop() {
    kill "${rays[@]}" 2>/dev/null || true
    wait
}
trap stop EXIT

"${on_head[@]}" bash scripts/ray_cluster.sh head "$address" "$port" --block &
rays+=($!)
if ((${#nodes[@]} > 1)); then
    others=$(IFS=,; echo "${nodes[*]:1}")
    srun --overlap --kill-on-bad-exit=1 --nodes=$((${#nodes[@]} - 1)) --ntasks-per-node=1 -w "$others" \
        bash scripts/ray_cluster.sh join "$address" "$port" --block &
    rays+=($!)
fi

"${on_head[@]}" bash scripts/ray_cluster.sh wait "$address" "$port" "${#nodes[@]}" &
waiting=$!
status=0
wait -n "$waiting" "${rays[@]}" || status=$?
if kill -0 "$waiting" 2>/dev/null; then
    kill "$waiting"
    echo "slurm_run.sh: Ray has ended on a machine before all ${#nodes[@]} had joined; see its step's output above." >&2
    exit 1
fi
((status == 0)) || exit "$status"

# ray_cluster.sh has let the machines' device variables pass, as naming every GPU; a run wants them unset.
"${on_head[@]}" env -u HIP_VISIBLE_DEVICES -u ROCR_VISIBLE_DEVICES \
    rl "$@" ray.address="$address:$port" hardware.nodes="${#nodes[@]}"
