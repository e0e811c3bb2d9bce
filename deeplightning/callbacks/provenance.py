"""Record what makes a run reproducible: its code and a digest of its data.

Runs on rank 0; a failure here does not end the run. A low-priority thread hashes the data during training.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from deeplightning.callbacks.describe import data_name
from deeplightning.config.machine import world_size
from deeplightning.config.own_runs import note_own
from deeplightning.config.schema import Config
from deeplightning.config.secret_scan import REDACTED
from deeplightning.config.secrets import redact
from deeplightning.runfolder import RunFolder, from_start, write_whole
from deeplightning.tracking.code import Code, collect, describe_program, versions_of
from deeplightning.tracking.datafiles import describe_files, paths_of
from deeplightning.tracking.entities import Dataset
from deeplightning.tracking.store import locate
from deeplightning.version import __version__
from deeplightning.words import is_address

log = logging.getLogger("deeplightning")

DIGEST_TIMEOUT_SECONDS = 10.0
"""How long the end of a run waits for the digest of its data."""


class Provenance:
    """Recorder of the code and the data of a run.

    Args:
        cfg: the resolved config.
        folder: the run's folder.
        on_digest: called from another thread with the description of the data when their digest is computed.
    """

    def __init__(self, cfg: Config, folder: RunFolder, on_digest: Callable[[Dataset], None] = lambda dataset: None):
        self.cfg, self.folder, self.on_digest = cfg, folder, on_digest
        values = cfg.secrets.values if cfg.secrets else {}
        # Short words and small numbers are not secrets: they occur throughout most code.
        values = {value: words for value, words in values.items() if len(value) >= (6 if value.isdecimal() else 4)}
        # Reproducing a run restores only secrets in plain form.
        self._redact = partial(redact, values=values, other=REDACTED)
        root = cfg.data.root
        self._root = None if root is None or is_address(root) else root
        self._code: Code | None = None
        self._hasher: threading.Thread | None = None
        self._program: dict[str, str] = {}
        self._stop_digest = threading.Event()
        self._stored = b""
        self._has_ended = False

    def begin(self, data: pl.LightningDataModule | None, began_from: Path | None) -> None:
        """Store the code as it is now, and start hashing the data.

        Args:
            data: the data module, or None if the run has none.
            began_from: the checkpoint of another run that this one starts from.
        """
        try:
            self._code = collect(self._redact)
            redact_code_secrets(self.cfg, self._code)
            with _warn_on_error(self.folder.code):
                self._keep_code(self._code)
            for place in self._code.concealed:
                log.warning(
                    "code       %s looks like a secret and is not kept: when the run is reproduced, *** replaces it. "
                    "${oc.env:NAME} in the config keeps secrets out of code",
                    place,
                )
            if self._code.left_out:
                some = ", ".join(f"{path} ({why})" for path, why in list(self._code.left_out.items())[:3])
                log.warning("code       not stored completely, %d left out: %s", len(self._code.left_out), some)
            paths = paths_of(data, self._root, self.cfg.data.module.params)
            weights = [from_start(name) for name in (began_from, self.cfg.model.init_from) if name is not None]
            paths += [path for path in weights if path.is_file()]  # initial weights are data too
            self._hasher = threading.Thread(target=self._hash_data, args=(data, paths), name="digests", daemon=True)
            self._hasher.start()
        except Exception as error:
            log.warning("code       code and data of the run cannot be recorded: %s", error)

    def end(self, was_interrupted: bool) -> None:
        """Record what is complete only now: modules that were imported late, the digest of the data.

        Args:
            was_interrupted: do not wait for the digest.
        """
        if self._has_ended:
            return
        self._has_ended = True
        if self._hasher is not None:
            self._hasher.join(0 if was_interrupted else DIGEST_TIMEOUT_SECONDS)
            self._stop_digest.set()
            self._hasher.join()
        if self._code is not None:
            with _warn_on_error(self.folder.code):
                code = collect(self._redact, self._code)
                code.packages = versions_of(code.imported)
                code.program |= self._program
                self._keep_code(code)

    def _keep_code(self, code: Code) -> None:
        packed, path = code.pack(self._redact), self.folder.code
        if packed == self._stored:
            return
        if not self._stored and path.exists() and (former := path.read_bytes()) != packed:  # by a resumed run
            write_whole(self.folder.former(path), former)
        write_whole(path, packed)
        note_own(path)
        self._stored = packed

    def _hash_data(self, data: pl.LightningDataModule | None, paths: list[Path]) -> None:
        try:
            if hasattr(os, "setpriority"):  # affects only this thread, on Linux
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)  # 19 might starve it
            self._program = describe_program()
            of_a_package = type(data).__module__.startswith("deeplightning.data.") or data is None
            if not paths:
                if data is not None and of_a_package:  # the package version determines the data
                    module = self.cfg.data.module
                    settings = json.dumps([module.type, self.cfg.data.dataset, module.params], default=str)
                    self._describe_data({settings: [0, version("scikit-learn")]})
                return
            store = locate(self.cfg.logger.params.get("tracking_uri")).artifact_root
            without = [self.folder.path, *([store] if store is not None else [])]
            found = describe_files(paths, self._root, without=without, stop=self._stop_digest.is_set)
            if found["incomplete"]:
                log.warning("data       %s", found["incomplete"])
            self._describe_data(found["files"])
            write_whole(self.folder.data, json.dumps(found, indent=1))
        except Exception as error:
            log.warning("data       no digest is stored: %s", error)

    def _describe_data(self, files: Mapping[str, list[Any]]) -> None:
        """Describe the data for the tracker, unless there are no files."""
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
        self.on_digest(Dataset(data_name(self.cfg), digest, kind, self._redact(json.dumps(source)), json.dumps(size)))


@contextlib.contextmanager
def _warn_on_error(path: Path) -> Iterator[None]:
    """Warn if a file cannot be written, instead of ending the run."""
    try:
        yield
    except Exception as error:
        log.warning("code       %s is not written: %s", path.name, error)


def redact_code_secrets(cfg: Config, code: Code | None = None) -> None:
    """Redact secrets found in the code of this process in later messages; without `code`, collect it."""
    if cfg.secrets:
        code = collect() if code is None else code
        cfg.secrets.values = dict.fromkeys(code.secrets, REDACTED) | cfg.secrets.values


def engine_of(cfg: Config) -> dict[str, object]:
    """Return the engine settings that determine the order of summation and the rounding."""
    engine = cfg.engine
    return {
        "backend": engine.backend,
        "processes": world_size(engine),
        "precision": str(engine.precision),
        "device": "CPU" if engine.gpus is None else "GPU",
    }


def versions() -> dict[str, str]:
    """Return the versions of the software that computes."""
    return {
        "deeplightning": __version__,
        "torch": str(torch.__version__),  # otherwise a subclass of str
        "pytorch_lightning": pl.__version__,
        "python": platform.python_version(),
    }
