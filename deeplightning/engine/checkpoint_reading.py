"""Read checkpoints without executing anything in them, and report what is damaged."""

import contextlib
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from deeplightning.engine import shards
from deeplightning.faults import CheckpointError
from deeplightning.runfolder import shards_of
from deeplightning.words import first_line

TYPES: dict[str, type] = {
    **dict.fromkeys(("state_dict", "loops", "callbacks", "config", "run", "engine", "versions"), dict),
    **dict.fromkeys(("gradients", "monitored", "plateaus"), dict),
    **dict.fromkeys(("epoch", "global_step", "threads"), int),
    **dict.fromkeys(("optimizer_states", "lr_schedulers", "points", "frozen", "left_out", "lost"), list),
}
"""Types of the values of keys that are read here; all keys except `state_dict` may be missing or None."""

_TOKEN = re.compile(r"[0-9a-f]{8}")
_MAX_PROCESSES = 2**16


def read_checkpoint(path: str | Path, whole: bool = True) -> dict[str, Any]:
    """Return the content of a checkpoint, on the CPU: tensors, numbers, texts, lists and dicts.

    Args:
        path: the checkpoint file; shards that it names are read too.
        whole: assemble sharded tensors; otherwise each is a `shards.Scattered`, which is read on access.

    Raises:
        CheckpointError: a file is missing, damaged, or contains more than plain types, none of which is executed.
    """
    path = Path(path)
    content = read_file(path, mapped=not whole)
    if "state_dict" not in content:
        raise CheckpointError(
            f"{path}: a checkpoint holds a `state_dict`; this file holds {', '.join(map(str, content)) or 'nothing'}"
        )
    for key, wanted in TYPES.items():
        if (value := content.get(key)) is None and key != "state_dict":
            continue
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise _damaged(path, f"`{key}` is {described(value)}, but must be {_NAMES[wanted]}")
    for name in content["state_dict"]:
        if not isinstance(name, str):
            raise _damaged(path, f"`state_dict` has the key {described(name)}, but its keys must be texts")
    if "pieces" not in content:
        return content
    files = _shard_files(path, content.pop("pieces"))
    try:
        content = shards.join_shards(content, [_read_shards(file) for file in files])
        return shards.assembled(content) if whole else content
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its shards do not match: {first_line(error)}") from None


_NAMES = {dict: "a dict", int: "a whole number", list: "a list"}


def described(value: object) -> str:
    """Return a short description of a value and its type."""
    return f"{type(value).__name__} {value!r:.40}" if isinstance(value, str | int | float) else type(value).__name__


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged, or not written by Deep Lightning: {what}; use another checkpoint")


def token_in(manifest: dict[str, Any]) -> str | None:
    token = manifest.get("token")
    return token if isinstance(token, str) and _TOKEN.fullmatch(token) else None


def _shard_files(path: Path, manifest: object) -> list[Path]:
    """Return the shard files that a checkpoint names, in order of rank; raise if some are missing."""
    if not isinstance(manifest, dict) or (token := token_in(manifest)) is None:
        raise _damaged(path, "`pieces` has no token of 8 hexadecimal digits")
    number = manifest.get("processes")
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= _MAX_PROCESSES:
        raise _damaged(path, f"`pieces.processes` is {described(number)}, but must be from 1 to {_MAX_PROCESSES}")
    files = [shards_of(path, token, rank) for rank in range(number)]
    if missing := [f"{file.parent.name}/{file.name}" for file in files if not file.is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{path}: {len(missing)} of its {number} pieces are missing: {', '.join(missing[:3])}{more}. They must be "
            "next to the checkpoint: copy both, or use another checkpoint"
        )
    return files


def _read_shards(file: Path) -> dict[str, object]:
    """Return the shards that one process wrote: {key: {"start", "values"}}."""
    own = read_file(file).get("pieces")
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
        raise _damaged(file, "it does not contain shards of tensors")
    return own


def read_weights(path: Path) -> dict[str, Any]:
    """Return the tensors of a checkpoint, or of a file with only a network's `state_dict`, by name.

    Raises:
        CheckpointError: as `read_checkpoint`.
    """
    content = read_file(path)
    plain = content and all(isinstance(value, torch.Tensor) for value in content.values())
    return content if plain else read_checkpoint(path)["state_dict"]


def read_file(path: Path, mapped: bool = True) -> dict[str, Any]:
    """Return the content of a file; if `mapped`, tensors are read on access."""
    if path.is_dir():
        raise CheckpointError(
            f"{path}: this is a folder, not a checkpoint file. For a run, give its folder or its last.ckpt; a folder "
            "in DeepSpeed's or FSDP's own format cannot be read"
        )
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not notice a flipped bit
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or (
                sum(entry.file_size for entry in entries) > path.stat().st_size
            ):  # torch never compresses; a zip bomb does
                raise _damaged(path, "its parts are compressed or overlap")
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
            warnings.simplefilter("ignore")  # they concern kinds of tensors that our checkpoints do not contain
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), "")
        message = f"{path}: holds more than plain values; it was not loaded, and nothing in it was executed. {found}"
        raise CheckpointError(message.strip()) from None
    except Exception as error:  # torch has no common base class either
        raise CheckpointError(f"{path}: cannot be read ({first_line(error)})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a checkpoint holds a `state_dict`; this file holds {type(content).__name__}")
    return content


def whole_shapes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict of a module with at least the full `shape` of each tensor, even if it is sharded."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found = module.state_dict()
    for name, value in found.items():
        shape = getattr(parameters.get(name), "ds_shape", None)  # DeepSpeed's; the values are on several processes
        found[name] = torch.empty(shape, dtype=value.dtype, device="meta") if shape is not None else value
    return found


def load_weights(module: torch.nn.Module, checkpoint: dict[str, Any], path: str | Path) -> None:
    """Load a checkpoint's weights into a module of the same architecture, those of both if it does not load strictly.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape; gives their number and the first three.
    """
    ours, theirs, strict = module.state_dict(), checkpoint["state_dict"], getattr(module, "strict_loading", True)
    both = ours.keys() | theirs.keys() if strict else ours.keys() & theirs.keys()
    raise_for_differences({n: ours[n] for n in ours if n in both}, {n: theirs[n] for n in theirs if n in both}, path)
    module.load_state_dict(theirs, strict=strict)


def raise_for_differences(ours: dict[str, Any], theirs: dict[str, Any], path: str | Path) -> None:
    """Compare the names and shapes of two state dicts; raise a CheckpointError if they differ."""
    differences = [f"{n} is missing" for n in ours if n not in theirs]
    differences += [f"{n} is unknown to the network" for n in theirs if n not in ours]
    for name, tensor in ours.items():
        if name not in theirs or not isinstance(tensor, torch.Tensor) or torch.nn.parameter.is_lazy(tensor):
            continue
        value = theirs[name]
        shape = getattr(value, "shape", None)
        if shape is None:
            differences.append(f"{name} is {described(value)}, not a tensor")
        elif tuple(shape) != tuple(tensor.shape):
            differences.append(f"{name} is {tuple(shape)}, the network expects {tuple(tensor.shape)}")
        elif isinstance(value, torch.Tensor) and (
            value.device.type == "meta" or value.layout != torch.strided or value.is_quantized
        ):
            differences.append(f"{name} is a tensor without plain values")
    if differences:
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        message = f"{path}: of another network: {len(differences)} tensors differ: {'; '.join(differences[:3])}{more}"
        raise CheckpointError(message)


def restore_left_out(checkpoint: dict[str, Any], module: Any, data: Any = None) -> dict[str, Any]:
    """Add the entries that were left out of a checkpoint, because hooks may read them; return the checkpoint. Their
    values are those that the module and the data module would save now.

    Args:
        checkpoint: the content that was read; changed in place.
        module: a LightningModule; None to add nothing.
        data: a LightningDataModule.
    """
    entries = [entry for entry in checkpoint.pop("left_out", None) or () if _may_be_left_out(entry)]
    if not entries or module is None:
        return checkpoint
    saved = {key: {**value} if isinstance(value, dict) else value for key, value in checkpoint.items()}
    with contextlib.suppress(Exception):  # an untrained module may have nothing to save
        if data is not None:
            saved[type(data).__qualname__] = data.state_dict()
        module.on_save_checkpoint(saved)
    for key, name in entries:
        value = saved.get(key)
        if name is None and key in saved:
            checkpoint[key] = value
        elif isinstance(value, dict) and name in value:
            checkpoint.setdefault(key, {})[name] = value[name]
    return checkpoint


def _may_be_left_out(value: object) -> bool:
    """Return whether a value of a checkpoint, which may be untrusted, is an entry that `without_unsafe` may drop."""
    match value:
        case [str() as key, str() | int() | None]:
            return key not in TYPES
    return False
