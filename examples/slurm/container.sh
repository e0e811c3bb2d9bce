#!/bin/bash
# The same in a container: IMAGE has Deep Lightning installed; the working directory and DATA are seen inside by the same
# names. No command of Slurm is needed inside: this script sends the job back into the queue.
#   IMAGE=deeplightning.sif sbatch examples/slurm/container.sh [CONFIG] [key=value …]
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=60
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue

run=${CONTAINER:-apptainer}         # or singularity
inside=(exec --bind "$PWD" --pwd "$PWD")
[ -z "${DATA:-}" ] || inside+=(--bind "$DATA")
# inside+=(--nv)                    # where the nodes have GPUs
[ $# -gt 0 ] || set -- configs/digits_ddp.yaml engine.processes=1 engine.num_nodes=2
export DEEPLIGHTNING_REQUEUE=$PWD/requeue-$SLURM_JOB_ID
trap : TERM

srun "$run" "${inside[@]}" "${IMAGE:-deeplightning.sif}" python -m deeplightning train "$@"
code=$?

if [ -e "$DEEPLIGHTNING_REQUEUE" ] || [ $code = 138 ] || [ $code = 140 ]; then
    rm -f "$DEEPLIGHTNING_REQUEUE"
    # at most 100 times: a start that takes longer than the time would never come to an end
    [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ] && scontrol requeue "$SLURM_JOB_ID" && exit
fi
exit $code
