"""Distinguish the run folders of this user from foreign ones.

A run that this user starts on this machine records the SHA-256 of its `cfg.yaml` in the user's state folder. It is
trusted wherever its folder is moved or copied.
"""

import hashlib
import logging
import os
from pathlib import Path

from deeplightning.runfolder import RunFolder

log = logging.getLogger("deeplightning")

_noted: set[str] = set()


def note_own(file: Path) -> None:
    """Record that this user wrote a run's config, or its saved code, on this machine. A register that cannot be
    written causes only a warning."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    _noted.add(digest)
    try:
        (register := _register()).mkdir(mode=0o700, parents=True, exist_ok=True)
        (register / digest).touch(mode=0o600)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        log.warning("your runs cannot be registered (%s): commands ask before they import the code of this one", error)


def note_launched(folder: str) -> None:
    """Record a run that a launcher started for this user on other machines, after its folder has arrived here."""
    run = RunFolder(folder)
    for file in (run.config, run.code):
        if file.is_file():
            note_own(file)


def is_own(folder: RunFolder) -> bool:
    """Return whether this user started the run on this machine, by the current digest of its config."""
    return is_noted(folder.config)


def is_own_code(folder: RunFolder) -> bool:
    """Return whether this user started the run on this machine with the code that its folder now contains."""
    return is_noted(folder.config) and is_noted(folder.code)


def is_noted(file: Path) -> bool:
    """Return whether this user wrote the current content of a file on this machine, see `note_own`."""
    try:
        return is_registered(hashlib.sha256(file.read_bytes()).hexdigest())
    except OSError:
        return False


def is_registered(digest: str) -> bool:
    if digest in _noted:
        return True
    try:
        register = _register().stat()
        return register.st_uid == os.geteuid() and not register.st_mode & 0o022 and (_register() / digest).is_file()
    except (OSError, RuntimeError):
        return False


def _register() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()) / "deeplightning" / "own"
