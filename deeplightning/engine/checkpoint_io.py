"""Write checkpoints, completely or not at all, with nothing in them that reading would execute.

A checkpoint is one file. If its tensors are sharded, each process writes its shards to its own file next to it
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

from deeplightning.faults import FREE_SPACE_HINT, CheckpointError, ConfigError, Fault, SetupError, free_space, is_full
from deeplightning.runfolder import shards_folder, sync_names, whole
from deeplightning.words import first_line

log = logging.getLogger("deeplightning")

_SHARD = "deeplightning.engine.shards.Shard"  # removed before a checkpoint is written


class SafeCheckpointIO(TorchCheckpointIO):
    """Write to a temporary file, sync, rename; read plain types only.

    Kills destroyed 40 of 40 checkpoints written in place, and none of 100 written this way (November 2026).
    """

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Any = None  # set later: the trainer whose modules `restore_left_out` reads
        self._unsafe: dict[tuple[str, object], bool | None] = {}  # by entry, see `_is_unsafe`

    def save_checkpoint(self, checkpoint: dict[str, object], path: str | Path, storage_options: object = None) -> None:
        """Save the result of `without_unsafe` atomically.

        Raises:
            SetupError: the folder cannot be written, or the disk is full; an older file at `path` is kept.
        """
        write_file(self.without_unsafe(checkpoint), Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint of Lightning's ModelCheckpoint with its shards."""
        remove_checkpoint(Path(path))

    def without_unsafe(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint without entries from hooks that could not be loaded again; warn about each once.

        Its key `left_out` lists the entries for `restore_left_out`, each as a key, and a key of the dict there or None.
        """
        own = getattr(self.trainer, "own_entries", {}) if "callbacks" in checkpoint else {}  # none with weights alone
        if taken := [key for key in own if checkpoint.get(key) is not own[key]]:
            message = f"a hook `on_save_checkpoint` sets {taken[0]!r}, which the run sets; use another key"
            raise ConfigError(Fault(message, "model.module"))
        entries = _user_entries(checkpoint)
        # A safe value may be replaced by an unsafe one, such as None by an object. Large ones are tried once.
        new = {entry: _is_unsafe(*entry, checkpoint) for entry in entries if self._unsafe.get(entry, False) is False}
        self._unsafe |= new
        if any(new.values()):
            log.warning(
                "checkpoints of this run leave out %s: only plain values can be restored. In `on_save_checkpoint` "
                "and `state_dict`, save numbers, texts, tensors, and lists and dicts of these instead. Otherwise a "
                "resumed run uses the values of its newly built module",
                ", ".join(key if name is None else f"{key}[{name!r}]" for (key, name), unsafe in new.items() if unsafe),
            )
        left_out = [entry for entry in entries if self._unsafe[entry]]
        named = [[*entry] for entry in left_out if type(entry[1]) in (str, int, type(None))]
        checkpoint = checkpoint | ({"left_out": named} if named else {})
        for key, name in left_out:
            value = checkpoint.pop(key)
            if name is not None:
                checkpoint[key] = {other: inner for other, inner in value.items() if other != name}
        return checkpoint

    def load_checkpoint(
        self, path: str | Path, map_location: object = "cpu", weights_only: bool | None = True
    ) -> dict[str, object]:
        """Load plain types only, whatever `weights_only` is."""
        from deeplightning.engine.checkpoint_reading import read_checkpoint

        return self.with_left_out(read_checkpoint(path))

    def with_left_out(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Add the entries that `without_unsafe` left out of a checkpoint that was read; see `restore_left_out`."""
        from deeplightning.engine.checkpoint_reading import restore_left_out

        trainer = self.trainer
        return restore_left_out(checkpoint, trainer and trainer.lightning_module, trainer and trainer.datamodule)


def _user_entries(checkpoint: dict[str, Any]) -> list[tuple[str, object]]:
    """Return the entries that users' code may have added, each as a key, and a key of the dict there or None."""
    from deeplightning.engine.checkpoint_reading import TYPES

    others = {key: value for key, value in checkpoint.items() if key not in TYPES or key == "callbacks"}
    return [(key, name) for key, value in others.items() for name in (value if isinstance(value, dict) else [None])]


def _is_unsafe(key: str, name: object, checkpoint: dict[str, Any]) -> bool | None:
    """Return whether an entry cannot be saved, or could not be loaded again; None if it can and has over 1 MiB."""
    stream = io.BytesIO()
    try:
        torch.save(_plain(checkpoint[key] if name is None else {name: checkpoint[key][name]}), stream)
    except Exception:  # users' objects raise anything; a value that contains itself raises RecursionError
        return True
    stream.seek(0)
    is_unsafe = not {_SHARD}.issuperset(torch.serialization.get_unsafe_globals_in_checkpoint(stream))
    return is_unsafe or (None if stream.getbuffer().nbytes > 2**20 else False)


def write_file(content: dict[str, object], target: Path) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}")  # the temporary file of `whole`
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
            written = partial.stat().st_size if partial.exists() else 0
            reason += f"; {free_space(target.parent, written)}; {FREE_SPACE_HINT}"
        raise SetupError(f"{target}: the checkpoint cannot be written: {reason}") from error
    finally:
        with contextlib.suppress(OSError):  # must not hide the original error
            partial.unlink()


def _plain(value: Any) -> Any:
    """Convert NumPy's numbers and arrays, which `weights_only` refuses, to Python's numbers and tensors, and arrays of
    texts to lists."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value.copy())
        except (TypeError, ValueError):  # texts, or another byte order
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
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    try:
        os.link(source, partial)
    except OSError:
        shutil.copyfile(source, partial)
    partial.replace(target)
    sync_names(target.parent)
    partial.unlink(missing_ok=True)  # still exists if both were already names of one file


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
    with contextlib.suppress(OSError):  # not empty, or missing
        folder.rmdir()
