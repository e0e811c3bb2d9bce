"""Where a run's artifacts go: into its folder at once, or to a server in the background."""

import contextlib
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from deeplightning.runfolder import permissions_of
from deeplightning.tracking.metric_names import inside
from deeplightning.tracking.sender import Sender

log = logging.getLogger("deeplightning.tracking")


class Artifacts(ABC):
    """The artifacts of one run."""

    @abstractmethod
    def put(self, source: Path, folder: str | None) -> None:
        """Add a copy of a file or folder.

        Args:
            source: absolute.
            folder: relative to the artifacts; None: their top.
        """

    @abstractmethod
    def save(self, name: str, content: bytes) -> None:
        """Write a file; `name` is relative to the artifacts."""


class LocalArtifacts(Artifacts):
    """Artifacts in a folder of this machine. Where the disk is full, the run loses the artifact and gets a warning."""

    def __init__(self, top: Path):
        self.top = top

    def put(self, source: Path, folder: str | None) -> None:
        """Copy it, unless the source is there already."""
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
        """Replace the file at once, complete."""
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
    """Artifacts that a server keeps: written below a folder of this machine, and sent by the run's thread.

    Args:
        sender: of the run.
        top: the folder.
    """

    def __init__(self, sender: Sender, top: Path):
        self._sender, self._top = sender, top

    def put(self, source: Path, folder: str | None) -> None:
        """Send it later: the source must stay until the run is finalized."""
        path = inside(folder or ".")
        target = path / source.name if source.is_dir() else path
        self._sender.say({"artifact": [str(source), None if target == Path() else target.as_posix()]})

    def save(self, name: str, content: bytes) -> None:
        """Write it, and send it later."""
        LocalArtifacts(self._top).save(name, content)
        path = inside(name)
        self.put(self._top / path, None if path.parent == Path() else path.parent.as_posix())
