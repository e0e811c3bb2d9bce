"""Write checkpoints: complete or not at all, with nothing in them that reading would execute.

A checkpoint is one file. If processes share the tensors, each writes its shards into its own file next to it
(`last.pieces/TOKEN-RANK.pt` for `last.ckpt`); the checkpoint, which names them, is written when all of them exist.
"""

import contextlib
import io
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO

from deeplightning.faults import FREE_SOME, CheckpointError, SetupError, is_full, no_room
from deeplightning.runfolder import shards_folder, sync_names, whole
from deeplightning.words import first_line

log = logging.getLogger("deeplightning")

_SHARD = "deeplightning.engine.shards.Shard"  # which is taken out before a checkpoint is written


class SafeCheckpointIO(TorchCheckpointIO):
    """Write to a temporary file, sync, rename; read plain types only.

    Writing in place lost 40 of 40 checkpoints to kills, this way none of 100 (November 2026).
    """

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Any = None  # set when there is one: of the modules that `refill` asks
        self._unsafe: dict[tuple[str, object], bool] = {}  # by place

    def save_checkpoint(self, checkpoint: dict[str, object], path: str | Path, storage_options: object = None) -> None:
        """Save atomically what `readable` returns.

        Raises:
            SetupError: the folder cannot be written, or the disk is full; an older file at `path` stays.
        """
        write_file(self.readable(checkpoint), Path(path))

    def readable(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint without what hooks have added that would not be read again; the first time, warn of it.

        Its key `left_out` has the places, a key and a key of the dict that lies there or None, for `refill`.
        """
        places = _added(checkpoint)
        new = {place: _is_unsafe(*place, checkpoint) for place in places if place not in self._unsafe}
        self._unsafe |= new
        if any(new.values()):
            log.warning(
                "checkpoints of this run leave out %s: only plain values can be restored. In `on_save_checkpoint` "
                "and `state_dict`, put numbers, texts, tensors, and lists and dicts of these instead. Otherwise a "
                "resumed run has those of its newly built module",
                ", ".join(key if name is None else f"{key}[{name!r}]" for (key, name), unsafe in new.items() if unsafe),
            )
        left_out = [place for place in places if self._unsafe[place]]
        named = [[*place] for place in left_out if type(place[1]) in (str, int, type(None))]
        checkpoint = checkpoint | ({"left_out": named} if named else {})
        for key, name in left_out:
            value = checkpoint.pop(key)
            if name is not None:
                checkpoint[key] = {other: inner for other, inner in value.items() if other != name}
        return checkpoint

    def load_checkpoint(
        self, path: str | Path, map_location: object = "cpu", weights_only: bool | None = True
    ) -> dict[str, object]:
        """Load with `weights_only=True`, regardless of the argument."""
        from deeplightning.engine.checkpoint_reading import read_checkpoint

        return self.refilled(read_checkpoint(path))

    def refilled(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint that was read with what `readable` left out, see `refill`."""
        from deeplightning.engine.checkpoint_reading import refill

        trainer = self.trainer
        return refill(checkpoint, trainer and trainer.lightning_module, trainer and trainer.datamodule)


def _added(checkpoint: dict[str, Any]) -> list[tuple[str, object]]:
    """Return the places of what users' code may have added: a key, and a key of the dict that lies there or None."""
    from deeplightning.engine.checkpoint_reading import TYPES

    others = {key: value for key, value in checkpoint.items() if key not in TYPES or key == "callbacks"}
    return [(key, name) for key, value in others.items() for name in (value if isinstance(value, dict) else [None])]


def _is_unsafe(key: str, name: object, checkpoint: dict[str, Any]) -> bool:
    """Return whether the value at a place would not be read again, or cannot be saved."""
    stream = io.BytesIO()
    try:
        torch.save(_plain(checkpoint[key] if name is None else {name: checkpoint[key][name]}), stream)
    except Exception:  # objects of users raise anything; a value that contains itself a RecursionError
        return True
    stream.seek(0)
    return not {_SHARD}.issuperset(torch.serialization.get_unsafe_globals_in_checkpoint(stream))


def write_file(content: dict[str, object], target: Path) -> None:
    beside = target.with_name(f".{target.name}.{os.getpid()}")  # the partial file of `whole`
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole(target) as file:
            torch.save(_plain(content), file)
    except (OSError, RuntimeError) as error:
        first: BaseException = error
        while first.__context__ is not None:  # closing torch's archive after a failed write fails too
            first = first.__context__
        reason = getattr(first, "strerror", None) or first_line(first)
        if isinstance(first, OSError) and is_full(first):
            written = beside.stat().st_size if beside.exists() else 0
            reason += f"; {no_room(target.parent, written)}; {FREE_SOME}"
        raise SetupError(f"{target}: the checkpoint cannot be written: {reason}") from error
    finally:
        with contextlib.suppress(OSError):  # must not hide the error before
            beside.unlink()


def _plain(value: Any) -> Any:
    """Return numpy's numbers and arrays, which `weights_only` refuses, as Python's numbers and as tensors; arrays of
    texts as lists."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value.copy())
        except (TypeError, ValueError):  # texts, or another order of bytes
            return value.tolist()
    if type(value) is dict:
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def copy_checkpoint(source: Path, target: Path) -> None:
    """Link a checkpoint and its shards to a second name; copy them if the file system has no links."""
    token = _token(source)
    for file in sorted(shards_folder(source).glob(f"{token}-*.pt")) if token else ():
        (folder := shards_folder(target)).mkdir(exist_ok=True)
        _link(file, folder / file.name)
    _link(source, target)
    remove_shards(target, but=token)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint and its shards, if there are any."""
    path.unlink(missing_ok=True)
    remove_shards(path)


def _link(source: Path, target: Path) -> None:
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    try:
        os.link(source, beside)
    except OSError:
        shutil.copyfile(source, beside)
    beside.replace(target)
    sync_names(target.parent)
    beside.unlink(missing_ok=True)  # remains if both were already names of one file


def _token(path: Path) -> str | None:
    """Return the prefix of the shard files of a checkpoint; None if it is one file or cannot be read."""
    if not shards_folder(path).is_dir():
        return None
    from deeplightning.engine.checkpoint_reading import read_file, token_in

    try:
        manifest = read_file(path).get("pieces")
    except CheckpointError:
        return None
    return token_in(manifest) if isinstance(manifest, dict) else None


def remove_shards(path: Path, but: str | None = None) -> None:
    folder = shards_folder(path)
    for file in folder.glob("*"):
        if but is None or but not in file.name:
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty, or not there
        folder.rmdir()
