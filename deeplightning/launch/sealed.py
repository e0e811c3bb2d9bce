"""Seal the user's code and configs, so that all processes of a launch run what was submitted.

A seal is a folder. `code` has copies of the folders with the user's code, at their paths: files that a run could import
are copied, and all other entries are links to the originals, so a module still finds the data next to it. `configs` has
the config files. `seal.json` maps originals to copies and has the SHA-256 of each copy. The processes of the launch get
the folder in an environment variable, and `deeplightning.own_code` imports the copies instead of the originals.

The copies are executed, so unlike a run's `code.zip` they keep secrets that are written in the code. Only the owner can
read a seal, and it is never uploaded. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from deeplightning import own_code
from deeplightning.faults import SetupError
from deeplightning.own_code import SEAL
from deeplightning.tracking.code import TEXT_SUFFIXES, Code, collect
from deeplightning.tracking.environment import GIT

log = logging.getLogger("deeplightning")

MAX_LINKS = 10_000
"""Maximum number of entries linked per folder; in a larger folder no other files are next to the modules."""

PREFIX = "deeplightning-sealed-"
"""Prefix of the names of temporary folders that contain a seal."""


def own_code_now() -> Code:
    """Collect the user's code of this process for execution elsewhere; all its roots are import roots."""
    code = collect(verbatim=True)
    code.roots += [root for root in own_code.original_roots() if root not in code.roots]
    for path, why in ((path, why) for path, why in code.left_out.items() if not path.endswith(TEXT_SUFFIXES)):
        log.warning("%-10s %s (%s): processes that start later see edits of it", "not sealed", path, why)
    return code


def seal(
    folder: Path,
    configs: Iterable[Path] = (),
    *,
    code: Code | None = None,
    linked: Iterable[str] | None = None,
    git: Mapping[str, str | None] | None = None,
) -> Path:
    """Freeze code and configs in a folder, and return it.

    Args:
        folder: the seal, created completely or not at all. It must not exist.
        configs: files to freeze.
        code: the code to freeze; None for the user's code in this process.
        linked: the roots whose other entries are linked; None for all.
        git: the result of `git_state`, for runs that record the commit; without it they call git themselves.

    Raises:
        SetupError: the folder cannot be written.
    """
    code = own_code_now() if code is None else code
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)
        roots = _copy_code(code, partial / "code", code.roots if linked is None else [*linked])
        files = _copy_configs(configs, partial / "configs")
        if git is not None:
            (partial / GIT).write_text(json.dumps(git))
        digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files_of(partial)}
        content = {
            "roots": {root: os.path.relpath(copy, partial) for root, copy in roots.items()},
            "configs": {path: os.path.relpath(copy, partial) for path, copy in files.items()},
            "digests": {path.relative_to(partial).as_posix(): digest for path, digest in digests.items()},
        }
        (partial / SEAL).write_text(json.dumps(content, indent=1, sort_keys=True))
        partial.rename(folder)
    except OSError as error:
        where = error.filename or folder
        raise SetupError(f"{where}: the code of this launch cannot be sealed: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


# ---- the files of a seal


def _copy_code(code: Code, into: Path, linked: Sequence[str]) -> dict[str, str]:
    """Write copies of the roots of some code, each at its own path below `into`, so that `..` still leads from one root
    into another that contains it; return the copy of each root."""
    copies = {root: os.path.join(into, os.path.normpath(root).lstrip(os.sep)) for root in code.roots}  # noqa: PTH118
    for copy in copies.values():
        Path(copy).mkdir(parents=True, exist_ok=True)
    for (number, path), content in code.files.items():
        file = Path(copies[code.roots[number]], path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.write_bytes(content)
            file.chmod(0o400)
    for folder in [top for top, _, _ in os.walk(into)]:
        origin = os.path.normpath(f"{os.sep}{os.path.relpath(folder, into)}")
        if any(origin == root or _is_below(origin, root) for root in map(os.path.normpath, linked)):
            _link(Path(folder), origin, into)
    return copies


def _is_below(path: str, folder: str) -> bool:
    return path != folder and path.startswith(f"{folder.rstrip(os.sep)}{os.sep}")


def _link(folder: Path, origin: str, into: Path) -> None:
    """Link entries of the original that its copy lacks, except Deep Lightning itself, and except the entry that
    contains the seal, whose link would form a cycle."""
    ours = {f"{entry.rstrip(os.sep)}" for entry in own_code.OURS}
    try:
        entries = sorted(os.listdir(origin))  # noqa: PTH208
    except OSError:
        return
    if len(entries) > MAX_LINKS:
        log.warning(
            "%-10s %s has more than %d entries: modules find no other files next to them",
            *("not sealed", origin, MAX_LINKS),
        )
        return
    for name in entries:
        path = os.path.join(origin, name)  # noqa: PTH118
        if name == "__pycache__" or path in ours or _is_below(str(into), path):
            continue
        if not os.path.lexists(folder / name):
            (folder / name).symlink_to(path)


def _copy_configs(configs: Iterable[Path], into: Path) -> dict[str, str]:
    """Copy config files; return the path of each copy by the absolute path of its original."""
    copies = {}
    for number, path in enumerate(configs):
        copy = into / f"{number}-{path.name}"
        into.mkdir(exist_ok=True)
        shutil.copyfile(own_code.frozen(path), copy)
        copies[os.path.abspath(path)] = str(copy)  # noqa: PTH100 (without `..`)
    return copies


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of a seal that are not links, except `seal.json`."""
    for top, _, names in os.walk(folder):
        yield from (path for name in sorted(names) if not (path := Path(top, name)).is_symlink() and name != SEAL)
