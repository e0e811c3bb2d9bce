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
    """The artifacts of one run. Where the disk is full, the run loses the artifact and gets a warning.

    Args:
        top: the run's folder.
        sender: sends them to a server that keeps them; None: they stay in the folder.
    """

    def __init__(self, top: Path, sender: Sender | None = None):
        self.top, self._sender = top, sender

    def put(self, source: Path, folder: str | None) -> None:
        """Copy a file or folder, unless it is there already. A server gets it later: it must stay until the run is
        finalized.

        Args:
            source: absolute.
            folder: relative to the artifacts; None: their top.
        """
        place = inside(folder or ".")
        if self._sender is not None:
            to = place / source.name if source.is_dir() else place
            self._sender.say({"artifact": [str(source), None if to == Path() else to.as_posix()]})
            return
        target = self.top / place / source.name
        if target.exists() and target.samefile(source):
            return
        with self._writing(target) as partial:
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(source, partial)  # with the permissions of the run, not those of the source
                partial.replace(target)

    def save(self, name: str, content: bytes) -> None:
        """Replace a file at once, complete; `name` is relative to the artifacts."""
        target = self.top / inside(name)
        with self._writing(target) as partial:
            partial.write_bytes(content)
            partial.replace(target)
        if self._sender is not None:
            self.put(target, Path(name).parent.as_posix())

    @contextlib.contextmanager
    def _writing(self, target: Path) -> Iterator[Path]:
        try:
            with permissions_of(self.top):
                target.parent.mkdir(parents=True, exist_ok=True)
                yield target.with_name(f".{target.name}.partial")
        except OSError as error:
            log.warning("Not tracked in %s: %s (%s)", self.top, target.name, error)
