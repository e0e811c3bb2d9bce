"""Keep what makes a run reproducible: its code and the digest of its data.

All of it happens on rank 0, and no failure here ends the run. A thread of low priority hashes the data while the
network learns.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.callbacks.describe import data_name
from deeplightning.config.own_runs import note_own
from deeplightning.config.schema import Config
from deeplightning.config.secret_scan import BLOT
from deeplightning.config.secrets import redact
from deeplightning.runfolder import RunFolder, from_start, write_whole
from deeplightning.tracking.code import Code, collect, describe_program, versions_of
from deeplightning.tracking.datafiles import describe_files, paths_of
from deeplightning.tracking.entities import Dataset
from deeplightning.tracking.store import locate
from deeplightning.words import is_address

if TYPE_CHECKING:
    import pytorch_lightning as pl

log = logging.getLogger("deeplightning")

PATIENCE = 10.0
"""Seconds that the end of a run waits for the digest of its data."""


class Origin:
    """Keep what a run comes from.

    Args:
        cfg: the settled config.
        folder: the run's.
        tell: called with the data, by another thread, when their digest is known.
    """

    def __init__(self, cfg: Config, folder: RunFolder, tell: Callable[[Dataset], None] = lambda dataset: None):
        self.cfg, self.folder, self.tell = cfg, folder, tell
        values = cfg.secrets.values if cfg.secrets else {}
        values = {value: instead for value, instead in values.items() if is_worth_hiding(value)}
        # Only plain forms are put back when the run is made again.
        self._redact = partial(redact, values=values, other=BLOT)
        root = cfg.data.root
        self._root = None if root is None or is_address(root) else root
        self._code: Code | None = None
        self._digesting: threading.Thread | None = None
        self._program: dict[str, str] = {}
        self._enough = threading.Event()
        self._stored = b""
        self._has_ended = False

    def begin(self, data: "pl.LightningDataModule | None", began_from: Path | None) -> None:
        """Keep the code as it is now, and begin to hash the data.

        Args:
            data: the data module; None: the run has none.
            began_from: the checkpoint of another run that this one began from.
        """
        try:
            self._code = collect(self._redact)
            keep_out(self.cfg, self._code)
            with _or_warned(self.folder.code):
                self._keep_code(self._code)
            for place in self._code.concealed:
                log.warning(
                    "code       %s looks like a secret and is not kept: when the run is reproduced, *** replaces it. "
                    "${oc.env:NAME} in the config keeps secrets out of code",
                    place,
                )
            if self._code.left_out:
                some = ", ".join(f"{path} ({why})" for path, why in list(self._code.left_out.items())[:3])
                log.warning("code       not all of it is kept: %s", some)
            paths = paths_of(data, self._root, self.cfg.data.module.params)
            weights = [from_start(name) for name in (began_from, self.cfg.model.init_from) if name is not None]
            paths += [path for path in weights if path.is_file()]  # what the run began with is data too
            self._digesting = threading.Thread(target=self._digest, args=(data, paths), name="digests", daemon=True)
            self._digesting.start()
        except Exception as error:
            log.warning("code       what the run is made of cannot be kept: %s", error)

    def end(self, was_interrupted: bool) -> None:
        """Keep what is known only now: modules that were imported late, the digest of the data.

        Args:
            was_interrupted: somebody waits for the process to end.
        """
        if self._has_ended:
            return
        self._has_ended = True
        if self._digesting is not None:
            self._digesting.join(0 if was_interrupted else PATIENCE)
            self._enough.set()
            self._digesting.join()
        if self._code is not None:
            with _or_warned(self.folder.code):
                code = collect(self._redact, self._code)
                code.packages = versions_of(code.imported)
                code.program |= self._program
                self._keep_code(code)

    def _keep_code(self, code: Code) -> None:
        packed, path = code.pack(self._redact), self.folder.code
        if packed == self._stored:
            return
        if not self._stored and path.exists() and (former := path.read_bytes()) != packed:  # a continued run
            write_whole(self.folder.former(path), former)
        write_whole(path, packed)
        note_own(path)
        self._stored = packed

    def _digest(self, data: "pl.LightningDataModule | None", paths: list[Path]) -> None:
        try:
            if hasattr(os, "setpriority"):  # of this thread alone, on Linux
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)  # at 19 it may starve
            self._program = describe_program()
            of_a_package = type(data).__module__.startswith("deeplightning.data.") or data is None
            if not paths:
                if data is not None and of_a_package:  # what the data are follows from the package's version
                    module = self.cfg.data.module
                    settings = json.dumps([module.type, self.cfg.data.dataset, module.params], default=str)
                    self._tell({settings: [0, version("scikit-learn")]})
                return
            store = locate(self.cfg.logger.params.get("tracking_uri")).artifact_root
            without = [self.folder.path, *([store] if store is not None else [])]
            found = describe_files(paths, self._root, without=without, stop=self._enough.is_set)
            self._tell(found["files"])
            write_whole(self.folder.data, json.dumps(found, indent=1))
        except Exception as error:
            log.warning("data       no digest of them is kept: %s", error)

    def _tell(self, files: Mapping[str, list[Any]]) -> None:
        """Describe the data for the tracker, if anything is known of them."""
        if not files:
            return
        content = json.dumps(dict(files), sort_keys=True)
        source: dict[str, object]
        if self._root is not None:
            kind, source = "local", {"uri": str(from_start(self._root))}
        else:
            name = self.cfg.data.module.type
            kind, source = "code", {"tags": {"mlflow.source.name": name, "mlflow.source.type": "LOCAL"}}
        size = {"files": len(files), "bytes": sum(int(one[0]) for one in files.values())}
        size = size if size["bytes"] else {}
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        self.tell(Dataset(data_name(self.cfg), digest, kind, self._redact(json.dumps(source)), json.dumps(size)))


@contextlib.contextmanager
def _or_warned(path: Path) -> Iterator[None]:
    """Warn instead of ending the run if a file cannot be written."""
    try:
        yield
    except Exception as error:
        log.warning("code       %s is not written: %s", path.name, error)


def keep_out(cfg: Config, code: Code | None = None) -> None:
    """Remove the secrets that are written in the code of this process from later messages.

    Args:
        code: this code; None: it is read.
    """
    if cfg.secrets:
        code = collect() if code is None else code
        cfg.secrets.values = dict.fromkeys(code.secrets, BLOT) | cfg.secrets.values


def is_worth_hiding(value: str) -> bool:
    """Return whether a value of the environment may be a secret: not a short word, and not a small number, which would
    be found all over some code."""
    return len(value) >= (6 if value.isdecimal() else 4)
