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

TIMEOUT_SECONDS = 60.0


def check_slurm() -> None:
    """Check that Slurm is installed and answers.

    Raises:
        SetupError: Slurm's commands are missing, or it does not answer.
    """
    if missing := [name for name in ("sbatch", "scontrol") if shutil.which(name) is None]:
        message = (
            f"`{missing[0]}` is not installed here: submit from a machine with Slurm, usually a login node; "
            "`engine.launcher=null` runs on this machine"
        )
        raise SetupError(Fault(message, "engine.launcher"))
    code, output = run_command("scontrol", "ping")
    if code != 0:
        raise SetupError(Fault(f"Slurm does not answer: {output or 'no output'}", "engine.launcher"))


def run_command(*command: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command of Slurm; return its exit code, 124 after a timeout, and its output in one line.

    Args:
        environment: environment of the command; None: that of this process.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            start_new_session=True,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]} did not answer within {TIMEOUT_SECONDS:.0f} s"
    except OSError as error:
        return 127, f"{command[0]}: {error.strerror}"
    return done.returncode, " ".join((done.stdout if done.returncode == 0 else done.stderr or done.stdout).split())


def submit(script: str, folder: Path) -> str:
    """Write a batch script into a folder and submit it; return the number of its job.

    The job gets the environment of this process, without the variables of a job that this process runs in.

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
        job_variables = re.compile(r"(SLURMD?|SRUN|SBATCH)_(?!CONF$)|(MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE))$")
        environment = {name: value for name, value in environment.items() if not job_variables.match(name)}
    code, output = run_command("sbatch", str(file), environment=environment)
    if (found := re.search(r"job (\d+)", output)) is None or code != 0:
        reason = "; ".join(part.strip() for part in output.split("sbatch: error:") if part.strip())
        raise SetupError(Fault(f"Slurm refuses the job: {reason or f'exit code {code}'}", "engine.launcher"))
    return found[1]


def state_of(number: str) -> dict[str, str] | None:
    """Return Slurm's record of a job, such as JobState, Reason, ExitCode, Restarts, NodeList, or None if it has none.

    Raises:
        TimeoutError: Slurm does not answer.
    """
    code, output = run_command("scontrol", "show", "job", "-o", number)
    if code == 0:
        return dict(re.findall(r"(\w+)=(\S*)", output))
    if "Invalid job id" not in output:
        raise TimeoutError(output)
    code, output = run_command("sacct", "-j", number, "-X", "-n", "-P", "-o", "State,ExitCode")
    found = re.match(r"(\w+)[^|]*\|(\d+:\d+)", output) if code == 0 else None
    return {"JobState": found[1], "ExitCode": found[2]} if found else None


def max_array_size() -> int:
    """Return the maximum number of tasks of an array, or 0 if Slurm has no arrays or does not report it."""
    found = re.search(r"\bMaxArraySize\s*=\s*(\d+)", run_command("scontrol", "show", "config")[1])
    return int(found[1]) if found and int(found[1]) > 1 else 0
