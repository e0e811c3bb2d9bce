"""Every call of git. A repository may have come with somebody else's folder, and its settings name programs: none is
run. Git itself refuses a repository of another user (`safe.directory`). Standard library only.

Files of a commit are read as they are stored, without attributes and filters, so that of a file in Git LFS only the
pointer is found.
"""

import io
import os
import re
import shutil
import subprocess
import tarfile
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


def is_commit(text: object) -> bool:
    """Return whether this is a full commit id; anything else could be an option."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", text) is not None


def run_git(
    folder: Path,
    *arguments: str,
    given: bytes = b"",
    limit: int | None = None,
    seconds: float | None = None,
    **variables: str,
) -> bytes | None:
    """Return git's output, or None if it fails, takes too long or is missing. It locks nothing and fetches nothing.

    Args:
        given: on stdin.
        limit: bytes after which no more is read.
        seconds: how long it may take; None: `SECONDS`.
        variables: further ones of the environment.
    """
    git = shutil.which("git")
    if git is None:
        return None
    if arguments[0] in ("status", "diff"):
        # Inside a submodule none of these settings would hold, so that nobody looks into its files.
        arguments = (arguments[0], "--ignore-submodules=dirty", *arguments[1:])
        variables = _without_drivers(folder) | variables
    settings = [word for name, value in _SETTINGS.items() for word in ("-c", f"{name}={value}")]
    try:
        process = subprocess.Popen(
            [git, "-C", str(folder), *settings, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | _VARIABLES | variables,
        )
    except OSError:
        return None
    timer = threading.Timer(seconds or SECONDS, process.kill)
    timer.start()
    is_cut = False
    try:
        with process:
            assert process.stdout is not None
            if limit is None:
                output = process.communicate(given)[0]
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


def archive(folder: Path, commit: object, *paths: str) -> bytes | None:
    """Return the files of a commit as a tar, or None if git cannot read them.

    Args:
        folder: in the repository.
        commit: its whole id.
        paths: files and folders from the top on; none: all.
    """
    if not is_commit(commit):
        return None
    listed = run_git(folder, "ls-tree", "-r", "-z", "--full-tree", str(commit), "--", *paths, seconds=60)
    entries = [entry.partition(b"\t")[::2] for entry in (listed or b"").split(b"\0") if entry]
    files = [(*fields.split(), name) for fields, name in entries]
    files = [(mode, digest, name) for mode, kind, digest, name in files if kind == b"blob"]
    content = run_git(folder, "cat-file", "--batch", given=b"".join(d + b"\n" for _, d, _ in files), seconds=60)
    if not files or content is None:
        return None
    packed, read = io.BytesIO(), io.BytesIO(content)
    with tarfile.open(fileobj=packed, mode="w") as made:
        for mode, digest, name in files:
            found = read.readline().split()
            if found[:2] != [digest, b"blob"]:
                return None
            text = read.read(int(found[2]))
            read.read(1)
            entry = tarfile.TarInfo(os.fsdecode(name))
            if mode == b"120000":
                entry.type, entry.linkname = tarfile.SYMTYPE, os.fsdecode(text)
            else:
                entry.size, entry.mode = len(text), 0o755 if mode == b"100755" else 0o644
            made.addfile(entry, None if entry.issym() else io.BytesIO(text))
    return packed.getvalue()


def extract(packed: bytes, into: Path) -> None:
    """Write the files of an archive below a folder; none may lie outside.

    Raises:
        OSError: a name or a link in it leads elsewhere, or the folder cannot be written.
    """
    with tarfile.open(fileobj=io.BytesIO(packed)) as opened:
        try:
            if hasattr(tarfile, "data_filter"):
                opened.extractall(into, filter="data")
                return
            for entry in opened:  # Python 3.11.3 and older, as Debian 12 has
                places = [into / entry.name, *([(into / entry.name).parent / entry.linkname] if entry.issym() else [])]
                if not all(place.resolve().is_relative_to(into.resolve()) for place in places):
                    raise OSError(f"{entry.name} leads out of the folder")
                opened.extract(entry, into)
        except tarfile.TarError as error:
            raise OSError(str(error)) from error
