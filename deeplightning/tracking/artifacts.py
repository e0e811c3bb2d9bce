"""Where a run's artifacts go: into its folder at once, or to a server in the background."""

import contextlib
import logging
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from deeplightning.runfolder import permissions_of
from deeplightning.tracking.metric_names import inside
from deeplightning.tracking.tracker import Tracker
from deeplightning.tracking.writer import Writer

log = logging.getLogger("deeplightning.tracking")


class Artifacts(ABC):
    """The artifacts of one run."""

    @abstractmethod
    def put(self, source: Path, folder: str | None) -> None:
        """Adds a copy of a file or folder.

        Args:
            source: absolute.
            folder: relative to the artifacts; None: their top.
        """

    @abstractmethod
    def save(self, name: str, content: bytes) -> None:
        """Writes a file; `name` is relative to the artifacts."""


class LocalArtifacts(Artifacts):
    """Artifacts in a folder of this machine. Where the disk is full, the run loses the artifact and gets a warning."""

    def __init__(self, top: Path):
        self.top = top

    def put(self, source: Path, folder: str | None) -> None:
        """Copies nothing where the source is there already."""
        target = self.top / inside(folder or ".") / source.name
        if target.exists() and target.samefile(source):
            return
        with self._writing(source.name):
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)
            else:
                partial = target.with_name(f".{target.name}.partial")
                shutil.copyfile(source, partial)  # with the permissions of the run, not those of the source
                partial.replace(target)

    def save(self, name: str, content: bytes) -> None:
        """Replaces the file at once, complete."""
        target = self.top / inside(name)
        with self._writing(name):
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.partial")
            partial.write_bytes(content)
            partial.replace(target)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            with permissions_of(self.top):
                yield
        except OSError as error:
            log.warning("Not tracked in %s: %s (%s)", self.top, name, error)


class RemoteArtifacts(Artifacts):
    """Artifacts that a server keeps, sent by the run's writer."""

    def __init__(self, writer: Writer, tracker: Tracker, run_id: str):
        self._writer, self._tracker, self._run_id = writer, tracker, run_id

    def put(self, source: Path, folder: str | None) -> None:
        """Sends it later: the source must stay until the run is finalized."""
        path = inside(folder or ".")
        target = path / source.name if source.is_dir() else path
        parent = None if target == Path() else target.as_posix()
        self._writer.do(
            f"the artifact {source.name}",
            lambda: self._tracker.upload(self._run_id, source, parent),
            ("artifact", str(source), parent),
        )

    def save(self, name: str, content: bytes) -> None:
        """Sends it later, from memory."""
        path = inside(name)

        def upload() -> None:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / path.name).write_bytes(content)
                parent = None if path.parent == Path() else path.parent.as_posix()
                self._tracker.upload(self._run_id, Path(folder) / path.name, parent)

        self._writer.do(f"the artifact {name}", upload)
