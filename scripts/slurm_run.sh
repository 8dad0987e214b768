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
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 20000))  # two jobs of one machine do not meet

# The token of this job alone: every task gets it by the environment, and no file keeps it.
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

stop() { srun --overlap --ntasks-per-node=1 bash scripts/ray_cluster.sh stop || true; }
trap stop EXIT

srun --overlap --nodes=1 --ntasks=1 -w "$head" bash scripts/ray_cluster.sh head "$address" "$port"
if ((${#nodes[@]} > 1)); then
    others=$(IFS=,; echo "${nodes[*]:1}")
    srun --overlap --nodes=$((${#nodes[@]} - 1)) --ntasks-per-node=1 -w "$others" bash scripts/ray_cluster.sh join "$address" "$port"
fi
srun --overlap --nodes=1 --ntasks=1 -w "$head" rl "$@" ray.address="$address:$port" hardware.nodes="${#nodes[@]}"
