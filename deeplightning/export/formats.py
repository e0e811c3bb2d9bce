"""Add the network to a bundle in torch's own formats, for programs that use torch instead of ONNX.

`model.pt2` is written by `torch.export.save` and read by `torch.export.load`; `model.torchscript.pt` is written by
`torch.jit.trace` and read by `torch.jit.load`, also in C++. Both take the inputs of the ONNX graph, in batches of any
size, and texts of any length. No server opens them: untrusted files are not safe to read. Letters: N samples.
"""

import contextlib
import io
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from deeplightning.export.bundle import (
    BATCH_SIZES,
    EXTRA_TOKENS,
    TOLERANCE,
    Exportable,
    FormatError,
    added,
    card_of,
    golden_inputs,
    program_of,
    reason,
)
from deeplightning.kinds import KINDS
from deeplightning.private.lightning import traceable
from deeplightning.runfolder import RunFolder

Free = dict[int, Any]
"""Dimensions of any size: index to `torch.export.Dim`."""


def add_format(task: Exportable, folder: RunFolder, name: str) -> Path:
    """Add the network to the bundle of its task in one of `FORMATS`; on failure, leave the bundle as it was.

    The file is loaded again, and its answers to the golden samples are compared with the network's, in batches of
    several sizes, within `TOLERANCE`. `bundle.json` gets the file's digest.

    Args:
        task: the task that was exported to the bundle.
        folder: a run folder with a bundle.
        name: a key of `FORMATS`.

    Returns:
        the file.

    Raises:
        CheckpointError: the bundle is damaged.
        FormatError: the network cannot be expressed in this format.
        SetupError: the folder cannot be written.
    """
    file_name, write, read = FORMATS[name]
    card, model = card_of(folder), task.inference_model()
    (samples,) = golden_inputs(folder, card).values()  # (N, …), texts (N, L)
    free: Free = {0: torch.export.Dim("batch", min=1)}
    longer = samples
    if KINDS[card["task"]].takes == "text":
        spec = task.text_spec
        free[1] = torch.export.Dim("length", min=1, max=spec.limit)
        length = min(samples.shape[1] + EXTRA_TOKENS, spec.limit or samples.shape[1] + EXTRA_TOKENS)
        longer = np.pad(samples, ((0, 0), (0, length - samples.shape[1])), constant_values=spec.padding)
    example = torch.from_numpy(np.resize(longer, (2, *longer.shape[1:])))
    remedy = f"The bundle {folder.bundle} has it as ONNX; leave {name} out of train.export."
    with added(folder, card, file_name) as file:
        try:
            # TorchScript is deprecated, and a trace treats values as constants: comparing answers finds what matters.
            with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
                write(model, example, free, file)
                again = read(file)
                sizes = [(inputs, size) for inputs in (samples, longer) for size in (len(samples), *BATCH_SIZES)]
                batches = [np.resize(inputs, (size, *inputs.shape[1:])) for inputs, size in sizes]
                worst = max(_difference(model, again, batch) for batch in batches)
        except OSError:
            raise
        except Exception as error:  # whatever torch raises, the network cannot be expressed
            why = reason(error).rstrip(".")
            raise FormatError(f"The network cannot be exported as {name}: {why}. {remedy}") from error
        with torch.inference_mode():
            allowed = TOLERANCE * max(1.0, float(model(torch.from_numpy(samples)).abs().max()))
        if not worst <= allowed:  # so that nan is refused as well
            raise FormatError(
                f"The network exported as {name} and the checkpoint give different answers: they differ by up to "
                f"{worst:.3g}; the limit is {allowed:g}. {remedy}"
            )
    return folder.bundle / file_name


def _difference(model: nn.Module, other: Any, batch: np.ndarray) -> float:
    """Return the maximum difference of two models' answers to a batch, or infinity if their shapes differ."""
    with torch.inference_mode():
        expected, given = (one(torch.from_numpy(batch.copy())) for one in (model, other))
    return float((expected - given).abs().max()) if expected.shape == given.shape else float("inf")


def _write_pt2(model: nn.Module, example: torch.Tensor, free: Free, file: Path) -> None:
    program = program_of(model, example, free)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    torch.export.save(program, file)


def _write_torchscript(model: nn.Module, example: torch.Tensor, free: Free, file: Path) -> None:
    """Write TorchScript without `debug_pkl`, which contains source paths of this machine; torch does not need it."""
    content = io.BytesIO()
    with traceable():
        torch.jit.save(torch.jit.trace(model, example), content)
    with zipfile.ZipFile(content) as whole, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as kept:
        for entry in whole.infolist():
            if not entry.filename.endswith(".debug_pkl"):
                kept.writestr(zipfile.ZipInfo(entry.filename), whole.read(entry))


Write = Callable[[nn.Module, torch.Tensor, Free, Path], None]
_NAMES = RunFolder(".")
FORMATS: dict[str, tuple[str, Write, Callable[[Path], Any]]] = {
    "torchscript": (_NAMES.bundle_torchscript.name, _write_torchscript, torch.jit.load),
    "pt2": (_NAMES.bundle_pt2.name, _write_pt2, lambda file: torch.export.load(file).module()),
}
"""Formats that can be added to a bundle, by name: file name, writer and reader."""
