#!/bin/bash
# The same in a virtual environment, which all nodes see (VENV, or .venv where sbatch is called):
#   sbatch examples/slurm/venv.sh [CONFIG] [key=value …]
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=60
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue

# module load python cuda           # where the cluster has modules
source "${VENV:-.venv}/bin/activate" || exit 3
[ $# -gt 0 ] || set -- configs/digits_ddp.yaml engine.processes=1 engine.num_nodes=2
export DEEPLIGHTNING_REQUEUE=$PWD/requeue-$SLURM_JOB_ID
trap : TERM

srun python -m deeplightning train "$@"
code=$?

if [ -e "$DEEPLIGHTNING_REQUEUE" ] || [ $code = 138 ] || [ $code = 140 ]; then
    rm -f "$DEEPLIGHTNING_REQUEUE"
    # at most 100 times: a start that takes longer than the time would never come to an end
    [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ] && scontrol requeue "$SLURM_JOB_ID" && exit
fi
exit $code
