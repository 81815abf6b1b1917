#!/usr/bin/env bash
# One Ray cluster per Slurm job: `sbatch clusters/slurm.sh sweeps/dfrost_eps.py --scale paper \
#   --workers 4 gpus_per_worker=0.25`, from the project's folder with its environment active.
# The project and the results lie on the disk that all nodes share.
#SBATCH --job-name=fedscale
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-task=1
#SBATCH --time=12:00:00
set -euo pipefail
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 20000))

srun --nodes=1 --ntasks=1 -w "${nodes[0]}" \
    ray start --head --node-ip-address="$head" --port="$port" --dashboard-host=127.0.0.1 \
    --num-cpus="$SLURM_CPUS_PER_TASK" --block &
until ray status --address="$head:$port" >/dev/null 2>&1; do sleep 2; done
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 -w "$node" \
        ray start --address="$head:$port" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
done
python "$@" --address "$head:$port" --shared-path
