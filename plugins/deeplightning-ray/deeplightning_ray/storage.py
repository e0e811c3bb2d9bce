"""Store the checkpoints of a run in a directory or a bucket, for workers that share no folder.

Each launch has a folder there with everything that resuming needs: config, environment, checkpoints, and `run.json`,
which contains the path of the run's folder. Files are atomic: in a directory each is renamed after it is written, and
objects of a bucket appear when they are complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.faults import CheckpointError, Fault, SetupError
from deeplightning.runfolder import RunFolder

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

POOL = "DEEPLIGHTNING_POOL"
"""Variable with JSON for a worker: `launch`, its name, and `storage`, an address or null."""

RESIZE_EXIT_CODE = 75
"""Exit code of a worker that ended so that the group can grow: EX_TEMPFAIL of sysexits.h."""

CARD = "run.json"


def opened(uri: str) -> tuple[Any, str]:
    """Open an address with pyarrow; return the file system and the path in it.

    Raises:
        SetupError: its scheme is unknown, or it cannot be reached.
    """
    from pyarrow import ArrowException, fs

    try:
        return fs.FileSystem.from_uri(uri)
    except (ArrowException, OSError, ValueError) as error:
        message = f"{uri!r} is not a storage: {error}. Use an absolute path, or an address such as s3://BUCKET/FOLDER"
        raise SetupError(Fault(message, "engine.launcher.params.storage_path")) from error


class Storage:
    """Copy the run of a launch to a storage and back.

    Args:
        uri: an absolute path, or an address such as s3://BUCKET/FOLDER.
        launch: unique name of the launch.
        experiment: the name of the run's experiment.
        root: absolute folder in which the tracker stores the folders of its runs; the working directory if it stores
            them elsewhere.

    Raises:
        SetupError: (from every method) the storage cannot be read or written.
    """

    def __init__(self, uri: str, launch: str, experiment: str, root: Path):
        self.uri, self.launch, self.experiment, self.root = uri, launch, experiment, root
        self._stored: dict[str, tuple[int, int]] | None = None  # stored file → size, modification time in nanoseconds

    def put(self, folder: Path, everything: bool = False) -> None:
        """Copy the changed files of a run to the storage, checkpoints last.

        Args:
            folder: the run's folder, absolute.
            everything: copy all its files, not only those that resuming needs.
        """
        kept = RunFolder(folder)
        paths = [kept.config, kept.environment, kept.best_score, *sorted(folder.glob("*.pieces/*"))]
        if everything:
            paths += sorted(path for path in folder.rglob("*") if path not in kept.checkpoints())
        if self._stored is None:
            self._stored = self._stored_files()
        changed: dict[Path, tuple[int, int]] = {}
        for path in dict.fromkeys([*paths, *reversed(kept.checkpoints())]):
            try:
                stat = path.stat()
            except OSError:  # missing or removed
                continue
            now = (stat.st_size, stat.st_mtime_ns)
            if path.is_file() and not path.name.startswith(".") and self._stored.get(_name_in(path, folder)) != now:
                changed[path] = now
        if not changed:
            return
        system, base = opened(self.uri)
        for path, now in changed.items():
            name = _name_in(path, folder)
            self._write(system, f"{base}/{self.launch}/{name}", path)
            self._stored[name] = now
        removed = [name for name in self._stored if not (folder / name).exists()]
        for name in removed:
            del self._stored[name]
        self._write(system, f"{base}/{self.launch}/{CARD}", self._card_content(folder))
        for name in removed:
            with contextlib.suppress(OSError):
                system.delete_file(f"{base}/{self.launch}/{name}")

    def _stored_files(self) -> dict[str, tuple[int, int]]:
        """Return the stored files of this launch: name → size, modification time."""
        system, base = opened(self.uri)
        found = self._read_card(system, f"{base}/{self.launch}")
        return {name: (size, changed) for name, (size, changed) in found[1]["files"].items()} if found else {}

    def _card_content(self, folder: Path) -> bytes:
        is_tracked = folder.name == "artifacts" and folder.is_relative_to(self.root)
        inside = folder.relative_to(self.root).as_posix() if is_tracked else f"runs/{folder.name}"
        card = {"experiment": self.experiment, "inside": inside, "files": self._stored}
        return json.dumps(card, indent=1).encode()

    def _write(self, system: AbstractFileSystem, target: str, source: Path | bytes) -> None:
        from pyarrow import ArrowException, fs

        is_local = isinstance(system, fs.LocalFileSystem)
        temporary = f"{target}.{os.getpid()}.partial" if is_local else target
        try:
            if is_local:
                system.create_dir(target.rpartition("/")[0], recursive=True)
            content = BytesIO(source) if isinstance(source, bytes) else source.open("rb")
            with content, system.open_output_stream(temporary) as stream:
                shutil.copyfileobj(content, stream, 1 << 22)
            if is_local:
                system.move(temporary, target)
        except (ArrowException, OSError) as error:
            message = f"{self.uri}: a checkpoint cannot be stored: {error}"
            raise SetupError(Fault(message, "engine.launcher.params.storage_path")) from error

    def fetch(self, which: str | None = None) -> Path | None:
        """Copy a run's folder to where the tracker looks for it, except files that already exist there.

        Args:
            which: None: the run of this launch; `newest`: that of the experiment's launch that wrote last.

        Returns:
            The folder, or None if the storage has no such run.

        Raises:
            CheckpointError: the run's `run.json` is damaged, or leads out of the folder.
        """
        from pyarrow import ArrowException

        try:
            system, base = opened(self.uri)
            found = self._read_card(system, f"{base}/{self.launch}") if which is None else self._newest(system, base)
            if found is None:
                return None
            source, card = found
            folder = (self.root / card["inside"]).absolute()
            if not re.fullmatch(r"runs/[^/.][^/]*|(?:[^/.][^/]*/){2,}artifacts", str(card["inside"])):
                raise CheckpointError(f"{self.uri}: {source}/{CARD} leads out of {self.root}")
            for name, (size, changed) in card["files"].items():
                target = folder / name
                if ".." in target.parts or not target.is_relative_to(folder):
                    raise CheckpointError(f"{self.uri}: {source}/{CARD} leads out of {folder}")
                if not _is_same(target, size, changed):
                    _copy(system, f"{source}/{name}", target, changed)
        except (ArrowException, OSError) as error:
            message = f"{self.uri}: the run cannot be fetched: {error}"
            raise SetupError(Fault(message, "engine.launcher.params.storage_path")) from error
        return folder

    def _read_card(self, system: AbstractFileSystem, folder: str) -> tuple[str, dict[str, Any]] | None:
        if not system.get_file_info(f"{folder}/{CARD}").is_file:
            return None
        try:
            with system.open_input_stream(f"{folder}/{CARD}") as stream:
                card = json.loads(stream.read())
            return (folder, card) if card["experiment"] == self.experiment else None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.uri}: {folder}/{CARD} is damaged: {error}") from error

    def _newest(self, system: AbstractFileSystem, base: str) -> tuple[str, dict[str, Any]] | None:
        from pyarrow import fs

        if system.get_file_info(base).type == fs.FileType.NotFound:
            return None
        cards = [
            info
            for entry in system.get_file_info(fs.FileSelector(base))
            if entry.type == fs.FileType.Directory and (info := system.get_file_info(f"{entry.path}/{CARD}")).is_file
        ]
        for info in sorted(cards, key=lambda info: info.mtime_ns, reverse=True):
            if (found := self._read_card(system, info.path.rpartition("/")[0])) is not None:
                return found
        return None


def _name_in(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _is_same(path: Path, size: int, changed: int) -> bool:
    try:
        stat = path.stat()
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (size, changed)


def _copy(system: AbstractFileSystem, source: str, target: Path, changed: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    with system.open_input_stream(source) as stream, temporary.open("wb") as file:
        shutil.copyfileobj(stream, file, 1 << 22)
    os.utime(temporary, ns=(changed, changed))
    temporary.replace(target)
