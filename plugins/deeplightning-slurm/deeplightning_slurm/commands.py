"""Call the commands of Slurm: sbatch, scontrol, sacct and scancel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from deeplightning.faults import Fault, SetupError
from deeplightning.process.identity import DECIDED

ANSWER_SECONDS = 60.0


def check_slurm() -> None:
    """Check that Slurm answers.

    Raises:
        SetupError: Slurm's commands are missing, or it does not answer.
    """
    if missing := [name for name in ("sbatch", "scontrol") if shutil.which(name) is None]:
        message = (
            f"there is no command {missing[0]} here: submit where Slurm is installed, a login node mostly; "
            "`engine.launcher=null` runs on this machine"
        )
        raise SetupError(Fault(message, "engine.launcher"))
    code, words = ask("scontrol", "ping")
    if code != 0:
        raise SetupError(Fault(f"Slurm does not answer: {words or 'no word'}", "engine.launcher"))


def ask(*command: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command of Slurm; return its exit code, 124 after a timeout, and its output in one line.

    Args:
        environment: of the command; None: that of this process.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            start_new_session=True,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]} gave no answer in {ANSWER_SECONDS:.0f} s"
    except OSError as error:
        return 127, f"{command[0]}: {error.strerror}"
    return done.returncode, " ".join((done.stdout if done.returncode == 0 else done.stderr or done.stdout).split())


def submit(script: str, folder: Path) -> str:
    """Write a batch script into a folder and submit it; return the number of its job.

    The job starts with the environment of this process, without the variables of a job that this process is in.

    Raises:
        SetupError: Slurm refuses the job, or the script cannot be written.
    """
    file = folder / "job.sh"
    try:
        file.write_text(script)
    except OSError as error:
        raise SetupError(Fault(f"{file}: {error.strerror}", "engine.launcher.params.folder")) from error
    environment = {name: value for name, value in os.environ.items() if name != DECIDED}
    if "SLURM_JOB_ID" in environment:
        of_a_job = re.compile(r"(SLURMD?|SRUN|SBATCH)_(?!CONF$)|(MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE))$")
        environment = {name: value for name, value in environment.items() if not of_a_job.match(name)}
    code, words = ask("sbatch", str(file), environment=environment)
    if (found := re.search(r"job (\d+)", words)) is None or code != 0:
        reason = "; ".join(part.strip() for part in words.split("sbatch: error:") if part.strip())
        raise SetupError(Fault(f"Slurm refuses the job: {reason or f'exit code {code}'}", "engine.launcher"))
    return found[1]


def state_of(number: str) -> dict[str, str] | None:
    """Return Slurm's record of a job, such as JobState, Reason, ExitCode, Restarts, NodeList, or None if it has none.

    Raises:
        TimeoutError: Slurm does not answer.
    """
    code, words = ask("scontrol", "show", "job", "-o", number)
    if code == 0:
        return dict(re.findall(r"(\w+)=(\S*)", words))
    if "Invalid job id" not in words:
        raise TimeoutError(words)
    code, words = ask("sacct", "-j", number, "-X", "-n", "-P", "-o", "State,ExitCode")
    found = re.match(r"(\w+)[^|]*\|(\d+:\d+)", words) if code == 0 else None
    return {"JobState": found[1], "ExitCode": found[2]} if found else None


def largest_array() -> int:
    """Return the most tasks that an array may have, or 0 if this Slurm has no arrays or does not say."""
    found = re.search(r"\bMaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config")[1])
    return int(found[1]) if found and int(found[1]) > 1 else 0
