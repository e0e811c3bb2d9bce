"""Write the lines of a batch script that follow its tasks, and read times in the notation of sbatch."""

from __future__ import annotations

import re
import shlex

REQUEUE_FILE = "DEEPLIGHTNING_REQUEUE"
"""Variable with the path of a file. If a task has written it, the batch script requeues the job: a task in a container
cannot call Slurm. The file holds the number of batches since this start, or `preempted`; empty means unknown."""

FOLDER, NUMBER = "deeplightning_folder", "deeplightning_job"
"""Variables of the script: the folder of this job, or of this task of an array, and its number in Slurm.
`SLURM_JOB_ID` of an array's last task is the number of the whole array."""

VARIABLES = "variables.sh"
"""File in the folder of an array's task: lines of shell that set the environment of its trial."""

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
    """Return the lines of shell after the tasks, which requeue the job or end it with their exit code."""
    counter, idle, requeues = (f'"${FOLDER}/{name}"' for name in ("restarts", "idle", "requeues"))
    in_vain = (
        f"error: the job was started {IDLE_STARTS} times in a row, and no batch was trained before it had to end: its "
        "time is shorter than a start takes. Give engine.launcher.params.time more, or a smaller warning"
    )
    used_up = (
        f"error: the job has returned to the queue {max_requeues} times, as often as "
        "engine.launcher.params.max_requeues allows; train.resume_ckpt=auto resumes from its latest checkpoint"
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
        f"    echo {shlex.quote(in_vain)} >&2",
        "    exit 5",
        "  fi",
    ]
    if max_requeues is not None:
        lines += [
            f"  requeues=$(($(cat {requeues} 2>/dev/null || echo 0) + 1))",
            f"  echo $requeues >{requeues}",
            f"  if [ $requeues -gt {max_requeues} ]; then",
            f"    echo {shlex.quote(used_up)} >&2",
            "    exit 5",
            "  fi",
        ]
    lines += ['  scontrol requeue "$' + NUMBER + '" && exit', "fi"]
    if restarts:
        lines += [
            "case $code in",
            "130|143) ;;  # somebody ended them",
            f"5|13[0-9]|14[0-9])  # a worker was lost; engine.max_restarts: {restarts}",
            f"  lost=$(($(cat {counter} 2>/dev/null || echo 0) + 1))",
            f"  if [ $lost -le {restarts} ]; then",
            f"    echo $lost >{counter}",
            f'    echo "a worker was lost (exit code $code); restart $lost of {restarts}" >&2',
            '    scontrol requeue "$' + NUMBER + '" && exit',
            "  fi ;;",
            "esac",
        ]
    return [*lines, "exit $code"]
