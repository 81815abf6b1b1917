#!/usr/bin/env bash
# One Ray cluster per Slurm job. In the project's folder, with its environment active, both on the
# disk that all nodes share:
#   sbatch clusters/slurm.sh sweeps/dfrost_eps.py --scale paper --workers 4
#SBATCH --job-name=fedscale
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-task=1
#SBATCH --time=12:00:00
set -euo pipefail
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
ray get-auth-token --generate > /dev/null

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
on() { srun --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"; }
head=$(on "${nodes[0]}" hostname -I | awk '{print $1}')
address=$head:$((20000 + SLURM_JOB_ID % 20000))
count_nodes() { ray status --address "$address" 2> /dev/null | grep -c ' node_' || true; }

on "${nodes[0]}" ray start --head --node-ip-address="$head" --port="${address##*:}" \
    --dashboard-host=127.0.0.1 --num-cpus="$SLURM_CPUS_PER_TASK" --block &
for started in $(seq "${#nodes[@]}"); do
    for _ in $(seq 60); do [[ $(count_nodes) -lt $started ]] || break; sleep 2; done
    [[ $(count_nodes) -ge $started ]] || { echo "node $started did not start" >&2; exit 1; }
    [[ $started -eq ${#nodes[@]} ]] || on "${nodes[$started]}" ray start --address="$address" \
        --num-cpus="$SLURM_CPUS_PER_TASK" --block &
done
# Slurm ends Ray with this script.
python "$@" --address "$address" --shared-path
