"""Add the network to a bundle as `model.pt2`, for programs that use torch instead of ONNX.

`torch.export.save` writes it and `torch.export.load` reads it. It takes the inputs of the ONNX graph, in batches of any
size, and texts of any length. No server opens it: untrusted files are not safe to read. Letters: N samples.
"""

import contextlib
import io
import warnings
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
from deeplightning.runfolder import RunFolder


def add_pt2(task: Exportable, folder: RunFolder) -> Path:
    """Add the network to the bundle of its task as a program of torch; on failure, leave the bundle as it was.

    The file is loaded again, and its answers to the golden samples are compared with the network's, in batches of
    several sizes, within `TOLERANCE`. `bundle.json` gets the file's digest.

    Args:
        task: the task that was exported to the bundle.
        folder: a run folder with a bundle.

    Returns:
        the file.

    Raises:
        CheckpointError: the bundle is damaged.
        FormatError: the network cannot be expressed in this format.
        SetupError: the folder cannot be written.
    """
    card, model = card_of(folder), task.inference_model()
    (samples,) = golden_inputs(folder, card).values()  # (N, …), texts (N, L)
    free: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
    longer = samples
    if KINDS[card["task"]].takes == "text":
        spec = task.text_spec
        free[1] = torch.export.Dim("length", min=1, max=spec.limit)
        length = min(samples.shape[1] + EXTRA_TOKENS, spec.limit or samples.shape[1] + EXTRA_TOKENS)
        longer = np.pad(samples, ((0, 0), (0, length - samples.shape[1])), constant_values=spec.padding)
    example = torch.from_numpy(np.resize(longer, (2, *longer.shape[1:])))
    remedy = f"The bundle {folder.bundle} has it as ONNX; leave pt2 out of train.export."
    with added(folder, card, folder.bundle_pt2.name) as file:
        try:
            # torch prints the partial graph if it fails
            with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
                program = program_of(model, example, free)
                for node in program.graph.nodes:
                    node.meta.pop("stack_trace", None)  # paths of this machine
                torch.export.save(program, file)
                again = torch.export.load(file).module()
                sizes = [(inputs, size) for inputs in (samples, longer) for size in (len(samples), *BATCH_SIZES)]
                batches = [np.resize(inputs, (size, *inputs.shape[1:])) for inputs, size in sizes]
                worst = max(_difference(model, again, batch) for batch in batches)
        except OSError:
            raise
        except Exception as error:  # whatever torch raises, the network cannot be expressed
            why = reason(error).rstrip(".")
            raise FormatError(f"The network cannot be exported as pt2: {why}. {remedy}") from error
        with torch.inference_mode():
            allowed = TOLERANCE * max(1.0, float(model(torch.from_numpy(samples)).abs().max()))
        if not worst <= allowed:  # so that nan is refused as well
            raise FormatError(
                "The network exported as pt2 and the checkpoint give different answers: they differ by up to "
                f"{worst:.3g}; the limit is {allowed:g}. {remedy}"
            )
    return folder.bundle_pt2


def _difference(model: nn.Module, other: Any, batch: np.ndarray) -> float:
    """Return the maximum difference of two models' answers to a batch, or infinity if their shapes differ."""
    with torch.inference_mode():
        expected, given = (one(torch.from_numpy(batch.copy())) for one in (model, other))
    return float((expected - given).abs().max()) if expected.shape == given.shape else float("inf")
