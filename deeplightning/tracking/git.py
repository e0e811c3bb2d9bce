"""Every call of git. A repository may have come with somebody else's folder, and its settings name programs: none is
run. Git itself refuses a repository of another user (`safe.directory`). Standard library only.
"""

import os
import shutil
import subprocess
from pathlib import Path

SECONDS = 10.0
"""How long one git command may take; a repository on a slow network disk is then left out."""

_SETTINGS = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.sshCommand": "false",
    "core.attributesFile": os.devnull,
    "core.quotePath": "false",
}
_VARIABLES = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ALLOW_PROTOCOL": "none",  # a partial clone would fetch what it lacks, by a program that it names
    "GIT_NO_LAZY_FETCH": "1",
    "LC_ALL": "C",
}


def run_git(folder: Path, *arguments: str) -> bytes | None:
    """Return git's output, or None if it fails, takes too long or is missing. It locks nothing and fetches nothing."""
    git = shutil.which("git")
    if git is None:
        return None
    variables: dict[str, str] = {}
    if arguments[0] == "status":
        # Inside a submodule none of these settings would hold, so that nobody looks into its files.
        arguments = (arguments[0], "--ignore-submodules=dirty", *arguments[1:])
        variables = _without_filters(folder)
    settings = [word for name, value in _SETTINGS.items() for word in ("-c", f"{name}={value}")]
    try:
        done = subprocess.run(
            [git, "-C", str(folder), *settings, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | _VARIABLES | variables,
            timeout=SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _without_filters(folder: Path) -> dict[str, str]:
    """Return variables that disable the filters of the repository's settings; those of the user's settings, such as Git
    LFS, stay."""
    names = r"^filter\..*\.(clean|smudge|process)$"
    output = run_git(folder, "config", "-z", "--show-scope", "--name-only", "--get-regexp", names) or b""
    words = [os.fsdecode(word) for word in output.split(b"\0")]
    programs = [name for scope, name in zip(words[::2], words[1::2], strict=False) if scope in ("local", "worktree")]
    settings = dict.fromkeys(programs, "") | {f"{name.rpartition('.')[0]}.required": "false" for name in programs}
    first = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    found = {"GIT_CONFIG_COUNT": str(first + len(settings))}
    for number, (name, value) in enumerate(settings.items(), first):
        found |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
    return found if settings else {}
