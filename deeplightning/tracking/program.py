"""Deep Lightning itself, as code that a run was made by: its digest, its commit, and what somebody has changed in it.

Who works in a clone of it has code of theirs inside it, such as a new network in `deeplightning/model/`. A run then
keeps what that clone has beyond its commit, and `rebuild` puts both together again. Standard library only.
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from deeplightning.tracking.environment import ask_git
from deeplightning.tracking.git import archive, extract, is_commit
from deeplightning.version import __version__

TOP = Path(__file__).resolve().parents[2]
"""The folder that Deep Lightning's packages lie in: a clone, or that of all installed packages."""
PACKAGES = ("deeplightning", "serve")
MAX_FILES, MAX_FILE = 200, 1_000_000
"""Changed files that are kept, and bytes of one."""


@cache
def describe_program() -> dict[str, str]:
    """Describe this Deep Lightning: `version`, `digest` of its files and, for a clone, its `commit`."""
    found = {"version": __version__, "digest": digest_of(TOP)}
    commit = ask_git("rev-parse", "--verify", "--quiet", "HEAD", folder=TOP) if _is_clone() else None
    return found | ({"commit": commit.strip()} if commit else {})


def digest_of(top: Path) -> str:
    """Return the SHA-256 of the sources of Deep Lightning in a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for name in PACKAGES for path in (top / name).rglob("*.py")):
        with suppress(OSError):
            digest.update(path.relative_to(top).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def changed_files() -> dict[str, bytes]:
    """Return the content of files that differ from the clone's commit or are untracked, by path; {} without a clone."""
    if not _is_clone():
        return {}
    options = ("--porcelain", "-z", "--no-renames", "--untracked-files=all")
    status = ask_git("status", *options, "--", *PACKAGES, folder=TOP) or ""
    found: dict[str, bytes] = {}
    for name in sorted(entry[3:] for entry in status.split("\0") if entry):
        path = TOP / name
        with suppress(OSError):
            if path.is_file() and path.stat().st_size <= MAX_FILE and len(found) < MAX_FILES:
                found[name] = path.read_bytes()
    return found


def rebuild(program: Mapping[str, str], changed: Mapping[str, bytes], into: Path, say: Callable[[str], None]) -> bool:
    """Rebuild the Deep Lightning of a run in a folder where it differs from this one, and log that.

    Returns:
        Whether to use the rebuilt one instead of this one.
    """
    wanted, commit = program.get("digest"), program.get("commit")
    commit = commit if is_commit(commit) else None
    if wanted is None or wanted == describe_program()["digest"]:
        return False
    packed = archive(TOP, commit, *PACKAGES) if _is_clone() else None
    for of_commit in (True, False) if packed is not None else (False,):
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        if of_commit:
            assert packed is not None
            extract(packed, into)
        else:
            for name in PACKAGES:
                shutil.copytree(TOP / name, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name, content in changed.items():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).write_bytes(content)
        if digest_of(into) == wanted:
            what = f"commit {commit}" if of_commit else f"version {program.get('version')}"
            files = f", with {', '.join(list(changed)[:10])}" if changed else ""
            say(f"code: Deep Lightning itself as it was then: {what}{files}")
            return True
    what = f"version {program.get('version')}" + (f", commit {commit}" if commit else "")
    if changed:
        say(f"warning: Deep Lightning is not what it was then ({what}): its files of now, with {', '.join(changed)}")
        return True
    say(f"warning: Deep Lightning itself is not what it was then ({what}), and that is not to be had here")
    return False


def _is_clone() -> bool:
    return (TOP / ".git").exists()
