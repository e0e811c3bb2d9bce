"""Generate the end of a batch script, which requeues the job, and parse times in the notation of sbatch."""

from __future__ import annotations

import re
import shlex

REQUEUE_FILE = "DEEPLIGHTNING_REQUEUE"
"""Environment variable with the path of a file. If a task wrote it, the batch script requeues the job, because a task
in a container cannot call Slurm. It contains the number of batches since this start, or `preempted`, or nothing. The
folder with `.causes` after this path is for the first failure cause of each node, an empty file `lost` or `error`."""

FOLDER, NUMBER = "deeplightning_folder", "deeplightning_job"
"""Shell variables of the script: the folder of this job, or of this task of an array, and its number in Slurm.
`SLURM_JOB_ID` of an array's last task is the number of the whole array."""

VARIABLES = "variables.sh"
"""File in the folder of an array task: shell lines that set the environment of its trial."""

IDLE_STARTS = 3
"""Consecutive starts without a trained batch after which a job is not requeued."""


def seconds_of(time: str | int | None) -> int | None:
    """Convert a time of sbatch, such as `90` (minutes), `1:30:00` or `2-12`; return None for no limit or an unknown
    form."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(time))
    if found is None:
        return None
    days, *parts = found.groups()
    given = [int(part) for part in parts if part is not None]
    # hours come first after days, or if there are three numbers; else minutes come first
    hours, minutes, seconds = [*given, 0, 0][:3] if days or len(given) == 3 else [0, *given, 0][:3]
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds or None


def after_tasks(restarts: int, max_requeues: int | None) -> list[str]:
    """Return the shell lines after the tasks, which requeue the job or end it with the exit code of the tasks."""
    counter, idle, requeues = (f'"${FOLDER}/{name}"' for name in ("restarts", "idle", "requeues"))
    idle_message = (
        f"error: the job started {IDLE_STARTS} times in a row without training a batch: its time is shorter than a "
        "start takes. Increase engine.launcher.params.time, or reduce engine.launcher.params.warning"
    )
    limit_message = (
        f"error: the job was requeued {max_requeues} times, the limit set by "
        "engine.launcher.params.max_requeues; train.resume_ckpt=auto resumes from its latest checkpoint"
    )
    lines = [
        "code=$?",
        "# requested by a task, or killed by SIGUSR1 or SIGUSR2 before it could do so",
        f'if [ -e "${REQUEUE_FILE}" ] || [ $code = 138 ] || [ $code = 140 ]; then',
        "  batches=0",
        f'  [ -e "${REQUEUE_FILE}" ] && batches=$(cat "${REQUEUE_FILE}")',
        f'  rm -f "${REQUEUE_FILE}"',
        f"  idle=$(($(cat {idle} 2>/dev/null || echo 0) + 1))",
        '  [ "$batches" = 0 ] || idle=0',
        f"  echo $idle >{idle}",
        f"  if [ $idle -ge {IDLE_STARTS} ]; then",
        f"    echo {shlex.quote(idle_message)} >&2",
        "    exit 5",
        "  fi",
    ]
    if max_requeues is not None:
        lines += [
            f"  requeues=$(($(cat {requeues} 2>/dev/null || echo 0) + 1))",
            f"  echo $requeues >{requeues}",
            f"  if [ $requeues -gt {max_requeues} ]; then",
            f"    echo {shlex.quote(limit_message)} >&2",
            "    exit 5",
            "  fi",
        ]
    lines += ['  scontrol requeue "$' + NUMBER + '" && exit', "fi"]
    if restarts:
        lines += [
            "# an error on one node is a loss for the others, which exit with 5, or NCCL aborts them (134)",
            f'case "$code "$(ls "${REQUEUE_FILE}.causes") in',
            '130*|143*|"5 "*error*|134*error*) ;;  # interrupted, terminated, or an error of the run',
            f'"5 "*lost*|13[0-9]*|14[0-9]*)  # a worker was lost; engine.max_restarts: {restarts}',
            f"  lost=$(($(cat {counter} 2>/dev/null || echo 0) + 1))",
            f"  if [ $lost -le {restarts} ]; then",
            f"    echo $lost >{counter}",
            f'    echo "a worker was lost (exit code $code); restart $lost of {restarts}" >&2',
            '    scontrol requeue "$' + NUMBER + '" && exit',
            "  fi ;;",
            "esac",
        ]
    return [*lines, "exit $code"]
