"""Where a run's artifacts go: into its folder at once, or to a server in the background."""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from deeplightning.runfolder import permissions_of
from deeplightning.tracking.metric_names import inside
from deeplightning.tracking.sender import Sender

log = logging.getLogger("deeplightning.tracking")


class Artifacts:
    """The artifacts of one run, in a folder of this machine. Where the disk is full, the run loses the artifact and
    gets a warning."""

    def __init__(self, top: Path):
        self.top = top

    def put(self, source: Path, folder: str | None) -> None:
        """Copy a file or folder, unless it is there already.

        Args:
            source: absolute.
            folder: relative to the artifacts; None: their top.
        """
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
        """Replace a file at once, complete; `name` is relative to the artifacts."""
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
        super().__init__(top)
        self._sender = sender

    def put(self, source: Path, folder: str | None) -> None:
        """Send it later: the source must stay until the run is finalized."""
        path = inside(folder or ".")
        target = path / source.name if source.is_dir() else path
        self._sender.say({"artifact": [str(source), None if target == Path() else target.as_posix()]})

    def save(self, name: str, content: bytes) -> None:
        """Write it, and send it later."""
        super().save(name, content)
        path = inside(name)
        self.put(self.top / path, None if path.parent == Path() else path.parent.as_posix())
