#!/bin/bash
# sbatch docs/launch/slurm.sh recipes/powerclip_r_b16_cc12m.yaml runs/powerclip-r
#
# One process for each GPU, started by Slurm itself, so that its signals reach the run: three minutes before the time is
# up, or when the job is preempted, the run finishes its step, writes a checkpoint and ends with code 75. The job then
# puts itself back into the queue and goes on from there, on as many nodes as it gets.
#SBATCH --job-name=powerclip
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail

recipe=${1:?name a recipe}
output=${2:?name a run folder that all nodes see}
shift 2 # the rest are settings: optim.lr=5e-4 …

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=29500

# shellcheck disable=SC2016  # each task expands its own
srun --kill-on-bad-exit=0 bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  exec python -m powerclip train --recipe "$0" --output "$1" --resume auto "${@:2}"
' "$recipe" "$output" "$@" &
wait $!
code=$?
if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
