"""Every call of git. A repository may have come with somebody else's folder, and its settings name programs: none is
run. Git itself refuses a repository of another user (`safe.directory`). Standard library only.
"""

import os
import shutil
import subprocess
import threading
from pathlib import Path

SECONDS = 10.0
"""How long one git command may take; a repository on a slow network disk is then left out."""

_SETTINGS = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.sshCommand": "false",
    "core.attributesFile": os.devnull,
    "core.quotePath": "false",
    "diff.external": "",
}
_VARIABLES = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ALLOW_PROTOCOL": "none",  # a partial clone would fetch what it lacks, by a program that it names
    "GIT_NO_LAZY_FETCH": "1",
    "LC_ALL": "C",
}


def run_git(folder: Path, *arguments: str, limit: int | None = None) -> bytes | None:
    """Return git's output, or None if it fails, takes too long or is missing. It locks nothing and fetches nothing.

    Args:
        limit: bytes after which no more is read.
    """
    git = shutil.which("git")
    if git is None:
        return None
    variables: dict[str, str] = {}
    if arguments[0] in ("status", "diff"):
        # Inside a submodule none of these settings would hold, so that nobody looks into its files.
        arguments = (arguments[0], "--ignore-submodules=dirty", *arguments[1:])
        variables = _without_drivers(folder)
    settings = [word for name, value in _SETTINGS.items() for word in ("-c", f"{name}={value}")]
    try:
        process = subprocess.Popen(
            [git, "-C", str(folder), *settings, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | _VARIABLES | variables,
        )
    except OSError:
        return None
    timer = threading.Timer(SECONDS, process.kill)
    timer.start()
    is_cut = False
    try:
        with process:
            assert process.stdout is not None
            if limit is None:
                output = process.stdout.read()
            else:
                output = process.stdout.read(limit)
                is_cut = len(output) == limit
                process.kill()
    finally:
        timer.cancel()
    return output if process.returncode == 0 or is_cut else None


def _without_drivers(folder: Path) -> dict[str, str]:
    """Return variables that disable the filters and diff drivers of the repository's settings; those of the user's
    settings, such as Git LFS, stay."""
    names = r"^(filter|diff)\..*\.(clean|smudge|process|command|textconv)$"
    output = run_git(folder, "config", "-z", "--show-scope", "--name-only", "--get-regexp", names) or b""
    words = [os.fsdecode(word) for word in output.split(b"\0")]
    programs = [name for scope, name in zip(words[::2], words[1::2], strict=False) if scope in ("local", "worktree")]
    filters = {name.rpartition(".")[0] for name in programs if name.startswith("filter.")}
    settings = dict.fromkeys(programs, "") | {f"{name}.required": "false" for name in filters}
    first = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    found = {"GIT_CONFIG_COUNT": str(first + len(settings))}
    for number, (name, value) in enumerate(settings.items(), first):
        found |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
    return found if settings else {}
