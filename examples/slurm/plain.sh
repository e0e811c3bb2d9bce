#!/bin/bash
# A run on two nodes. `deeplightning` is on the PATH that sbatch is called with:
#   sbatch examples/slurm/plain.sh [CONFIG] [key=value …]
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=60
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# Two minutes before the time is over, and where another job comes first: save, go back into the queue, go on.
#SBATCH --signal=USR1@120
#SBATCH --requeue

[ $# -gt 0 ] || set -- configs/digits_ddp.yaml engine.processes=1 engine.num_nodes=2
export DEEPLIGHTNING_REQUEUE=$PWD/requeue-$SLURM_JOB_ID
trap : TERM

srun deeplightning train "$@"
code=$?

if [ -e "$DEEPLIGHTNING_REQUEUE" ] || [ $code = 138 ] || [ $code = 140 ]; then  # 128 + SIGUSR1, SIGUSR2
    rm -f "$DEEPLIGHTNING_REQUEUE"
    # at most 100 times: a start that takes longer than the time would never come to an end
    [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ] && scontrol requeue "$SLURM_JOB_ID" && exit
fi
exit $code
