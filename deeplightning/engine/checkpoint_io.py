"""Writing and reading checkpoints: complete or not at all, and nothing in them is executed.

A checkpoint is one file. If processes share the tensors, each writes its shards into its own file next to it
(`last.pieces/TOKEN-RANK.pt` for `last.ckpt`); the checkpoint, which names them, is written when all of them exist.
"""

import contextlib
import io
import logging
import os
import pickle
import re
import secrets
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import distributed

from deeplightning.engine import shards
from deeplightning.faults import FREE_SOME, CheckpointError, SetupError, is_full, no_room
from deeplightning.runfolder import sync_names, whole
from deeplightning.words import first_line

log = logging.getLogger("deeplightning")

_TYPES: dict[str, type] = {
    **dict.fromkeys(("state_dict", "loops", "callbacks", "config", "run", "engine", "versions"), dict),
    **dict.fromkeys(("gathered", "gradients", "monitored", "plateaus", "train_metrics"), dict),
    **dict.fromkeys(("epoch", "global_step", "threads"), int),
    **dict.fromkeys(("optimizer_states", "lr_schedulers", "points", "frozen", "left_out", "lost"), list),
}
"""Types of the values under the keys that are read here; all keys but the first may be missing or None."""

_TOKEN = re.compile(r"[0-9a-f]{8}")
_MAX_PROCESSES = 2**16


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
        _write(self.readable(checkpoint), Path(path))

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
        return self.refilled(read_checkpoint(path))

    def refilled(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint that was read with what `readable` left out, see `refill`."""
        trainer = self.trainer
        return refill(checkpoint, trainer and trainer.lightning_module, trainer and trainer.datamodule)


def _added(checkpoint: dict[str, Any]) -> list[tuple[str, object]]:
    """Return the places of what users' code may have added: a key, and a key of the dict that lies there or None."""
    others = {key: value for key, value in checkpoint.items() if key not in _TYPES or key == "callbacks"}
    return [(key, name) for key, value in others.items() for name in (value if isinstance(value, dict) else [None])]


def _is_unsafe(key: str, name: object, checkpoint: dict[str, Any]) -> bool:
    """Return whether the value at a place would not be read again, or cannot be saved."""
    stream = io.BytesIO()
    try:
        torch.save(_plain(checkpoint[key] if name is None else {name: checkpoint[key][name]}), stream)
    except Exception:  # objects of users raise anything; a value that contains itself a RecursionError
        return True
    stream.seek(0)
    return bool(torch.serialization.get_unsafe_globals_in_checkpoint(stream))


def refill(checkpoint: dict[str, Any], module: Any, data: Any = None) -> dict[str, Any]:
    """Return a checkpoint with what was left out of it, before hooks look for that: what module and data module, as
    they are now, save at these places.

    Args:
        checkpoint: as it was read; changed.
        module: a LightningModule; None: nothing is put back.
        data: a LightningDataModule.
    """
    places = [place for place in checkpoint.pop("left_out", None) or () if _is_place(place)]
    if not places or module is None:
        return checkpoint
    saved = {key: {**value} if isinstance(value, dict) else value for key, value in checkpoint.items()}
    with contextlib.suppress(Exception):  # what is not trained yet may have nothing to save
        if data is not None:
            saved[type(data).__qualname__] = data.state_dict()
        module.on_save_checkpoint(saved)
    for key, name in places:
        value = saved.get(key)
        if name is None and key in saved:
            checkpoint[key] = value
        elif isinstance(value, dict) and name in value:
            checkpoint.setdefault(key, {})[name] = value[name]
    return checkpoint


def _is_place(value: object) -> bool:
    """Return whether a value of a checkpoint, which may be untrusted, names a place that `readable` may leave out."""
    match value:
        case [str() as key, str() | int() | None]:
            return key not in _TYPES
    return False


def save_sharded(checkpoint: dict[str, object], path: str | Path) -> None:
    """Save a checkpoint that holds a `Shard` of each shared tensor. Call it on every process.

    The former checkpoint of that name stays until the new one is complete.

    Raises:
        SetupError: on every process, if one of them cannot write.
    """
    path, rank, world = Path(path), distributed.get_rank(), distributed.get_world_size()
    token = [secrets.token_hex(4)]
    distributed.broadcast_object_list(token, 0)
    index, own = shards.split(checkpoint)
    index["pieces"] = {"token": token[0], "processes": world}
    _on_all(lambda: _write({"pieces": own}, _shards_of(path, token[0], rank)))
    _on_all(lambda: _write(index, path) if rank == 0 else None)
    if rank == 0:
        _remove_shards(path, but=token[0])


def _on_all(write: Callable[[], None]) -> None:
    """Write on each process; fail on all if one fails."""
    failure: SetupError | None = None
    failures: list[Any] = [None] * distributed.get_world_size()
    try:
        write()
    except SetupError as error:
        failure = error
    distributed.all_gather_object(failures, failure and str(failure))
    if failure is not None or any(failures):
        raise failure or SetupError(next(filter(None, failures)))


def _write(content: dict[str, object], target: Path) -> None:
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
    if isinstance(value, shards.Shard):  # `_is_unsafe` judges its values
        return value.values
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value.copy())
        except (TypeError, ValueError):  # texts, or another order of bytes
            return value.tolist()
    if type(value) is dict:
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def read_checkpoint(path: str | Path, whole: bool = True) -> dict[str, Any]:
    """Return the content of a checkpoint, on the CPU: tensors, numbers, texts, lists and dicts.

    Args:
        path: the checkpoint file; shards that it names are read too.
        whole: assemble shared tensors; else each is a `shards.Scattered`, which is read on access.

    Raises:
        CheckpointError: a file is missing, damaged, or contains more than plain types. Nothing of it is executed.
    """
    path = Path(path)
    content = _read(path, mapped=not whole)
    if "state_dict" not in content:
        raise CheckpointError(
            f"{path}: a checkpoint holds a `state_dict`; this file holds {', '.join(map(str, content)) or 'nothing'}"
        )
    for key, wanted in _TYPES.items():
        if (value := content.get(key)) is None and key != "state_dict":
            continue
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise _damaged(path, f"`{key}` is {described(value)}, and has to be {_NAMES[wanted]}")
    for name in content["state_dict"]:
        if not isinstance(name, str):
            raise _damaged(path, f"`state_dict` names a tensor {described(name)}, and has to use texts")
    if "pieces" not in content:
        return content
    files = _shared_files(path, content.pop("pieces"))
    try:
        content = shards.joined(content, [_shares(file) for file in files])
        return shards.whole_of(content) if whole else content
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its shards do not match: {first_line(error)}") from None


_NAMES = {dict: "a dict", int: "a whole number", list: "a list"}


def described(value: object) -> str:
    """Return a short description of a value and its type."""
    return f"{type(value).__name__} {value!r:.40}" if isinstance(value, str | int | float) else type(value).__name__


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged, or not written by Deep Lightning: {what}; take another checkpoint")


def _shared_files(path: Path, manifest: object) -> list[Path]:
    """Return the shard files that a checkpoint names, by rank; raise if some are missing."""
    if not isinstance(manifest, dict) or (token := _token_in(manifest)) is None:
        raise _damaged(path, "`pieces` has no token of 8 hexadecimal digits")
    number = manifest.get("processes")
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= _MAX_PROCESSES:
        raise _damaged(path, f"`pieces` says {described(number)} processes; 1 to {_MAX_PROCESSES} are possible")
    files = [_shards_of(path, token, rank) for rank in range(number)]
    if missing := [f"{file.parent.name}/{file.name}" for file in files if not file.is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{path}: {len(missing)} of its {number} pieces are missing: {', '.join(missing[:3])}{more}. They belong "
            "beside the checkpoint: copy both, or take another checkpoint"
        )
    return files


def _shares(file: Path) -> dict[str, object]:
    """Return the shards that one process wrote: {key: {"start", "values"}}."""
    own = _read(file).get("pieces")
    if not isinstance(own, dict) or not all(
        isinstance(piece, dict)
        and isinstance(piece.get("start"), int)
        and isinstance(values := piece.get("values"), torch.Tensor)
        and values.layout == torch.strided
        and values.device.type == "cpu"
        and values.dim() == 1
        and values.is_contiguous()
        for piece in own.values()
    ):
        raise _damaged(file, "it does not hold the pieces of tensors")
    return own


def read_weights(path: Path) -> dict[str, Any]:
    """Return the tensors by name of a checkpoint, or of a file with only a network's `state_dict`.

    Raises:
        CheckpointError: as `read_checkpoint`.
    """
    content = _read(path)
    plain = content and all(isinstance(value, torch.Tensor) for value in content.values())
    return content if plain else read_checkpoint(path)["state_dict"]


def copy_checkpoint(source: Path, target: Path) -> None:
    """Link a checkpoint and its shards to a second name; copy them if the file system has no links."""
    token = _token(source)
    for file in sorted(_folder_of(source).glob(f"{token}-*.pt")) if token else ():
        (folder := _folder_of(target)).mkdir(exist_ok=True)
        _link(file, folder / file.name)
    _link(source, target)
    _remove_shards(target, but=token)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint and its shards, if there are any."""
    path.unlink(missing_ok=True)
    _remove_shards(path)


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


def _folder_of(path: Path) -> Path:
    return path.with_suffix(".pieces")


def _shards_of(path: Path, token: str, rank: int) -> Path:
    return _folder_of(path) / f"{token}-{rank}.pt"


def _token(path: Path) -> str | None:
    """Return the prefix of the shard files of a checkpoint; None if it is one file or cannot be read."""
    try:
        manifest = _read(path).get("pieces") if _folder_of(path).is_dir() else None
    except CheckpointError:
        return None
    return _token_in(manifest) if isinstance(manifest, dict) else None


def _token_in(manifest: dict[str, Any]) -> str | None:
    token = manifest.get("token")
    return token if isinstance(token, str) and _TOKEN.fullmatch(token) else None


def _remove_shards(path: Path, but: str | None = None) -> None:
    folder = _folder_of(path)
    for file in folder.glob("*"):
        if but is None or but not in file.name:
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty, or not there
        folder.rmdir()


def _read(path: Path, mapped: bool = True) -> dict[str, Any]:
    """Return the content of a file; if `mapped`, tensors are read on access."""
    if path.is_dir():
        raise CheckpointError(
            f"{path}: this is a folder, not a checkpoint file. Of a run name its folder or its last.ckpt; "
            "a folder that DeepSpeed or FSDP wrote by itself cannot be read"
        )
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not notice a flipped bit
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or (
                sum(entry.file_size for entry in entries) > path.stat().st_size
            ):  # torch never compresses; a zip bomb does
                raise _damaged(path, "its parts are compressed, or overlap")
            if any(entry.filename.endswith("/constants.pkl") for entry in entries):
                raise _damaged(path, "it is a TorchScript archive")
            damaged = archive.testzip()
    except CheckpointError:
        raise
    except Exception as error:  # zipfile has no common base class for its errors
        raise CheckpointError(f"{path}: damaged, or not a checkpoint ({first_line(error)})") from None
    if damaged is not None:
        raise CheckpointError(f"{path}: damaged: the checksum of {damaged} does not match")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kinds of tensors that our checkpoints do not contain
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), "")
        message = f"{path}: holds more than plain values; it was not loaded, and nothing of it was executed. {found}"
        raise CheckpointError(message.strip()) from None
    except Exception as error:  # neither has torch
        raise CheckpointError(f"{path}: cannot be read ({first_line(error)})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a checkpoint holds a `state_dict`; this file holds {type(content).__name__}")
    return content


def whole_shapes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict of the whole module, with at least the `shape` of each tensor."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found = module.state_dict()
    for name, value in found.items():
        shape = getattr(parameters.get(name), "ds_shape", None)  # DeepSpeed's; the values are on several processes
        found[name] = torch.empty(shape, dtype=value.dtype, device="meta") if shape is not None else value
    return found


def load_weights(module: torch.nn.Module, checkpoint: dict[str, Any], path: str | Path) -> None:
    """Load a checkpoint's weights into a module of the same architecture.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape; gives their number and the first three.
    """
    raise_for_misfits(module.state_dict(), checkpoint["state_dict"], path)
    module.load_state_dict(checkpoint["state_dict"])


def raise_for_misfits(ours: dict[str, Any], theirs: dict[str, Any], path: str | Path) -> None:
    """Compare the names and shapes of two state dicts; raise a CheckpointError if they differ."""
    misfits = [f"{n} is missing" for n in ours if n not in theirs]
    misfits += [f"{n} is unknown to the network" for n in theirs if n not in ours]
    for name, tensor in ours.items():
        if name not in theirs or not isinstance(tensor, torch.Tensor):
            continue
        shape = getattr(theirs[name], "shape", None)
        if shape is None:
            misfits.append(f"{name} is {described(theirs[name])}, not a tensor")
        elif tuple(shape) != tuple(tensor.shape):
            misfits.append(f"{name} is {tuple(shape)}, the network wants {tuple(tensor.shape)}")
        elif isinstance(theirs[name], torch.Tensor) and not has_values(theirs[name]):
            misfits.append(f"{name} is a tensor without plain values")
    if misfits:
        more = f"; and {len(misfits) - 3} more" if len(misfits) > 3 else ""
        message = f"{path}: of another network: {len(misfits)} tensors differ: {'; '.join(misfits[:3])}{more}"
        raise CheckpointError(message)


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements can be copied into a parameter: it is not meta, sparse or quantized."""
    return tensor.device.type != "meta" and tensor.layout == torch.strided and not tensor.is_quantized
