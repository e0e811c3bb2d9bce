"""Serve a run's checkpoint with torch: `python -m deeplightning.torch_server RUN` is `python -m serve` for networks
that ONNX cannot express.

The run's own code is imported; the code of a foreign run is first compared with what is allowed
(`deeplightning.checks.trust`). Letters: N images or texts, C channels, H height, W width, L tokens, K classes.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deeplightning.process.terminal import say

if __name__ == "__main__":
    # One thread for each pass, set before torch is imported: workers are forked when the model is loaded, without the
    # threads of OpenMP.
    os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import nn

from deeplightning.array_spec import ArraySpec
from deeplightning.config.packages import TORCH_BUILD
from deeplightning.faults import CheckpointError, UserError
from deeplightning.image_spec import ImageSpec
from deeplightning.kinds import KINDS
from deeplightning.run.load import trained_task
from deeplightning.run.make_bundle import SAMPLES_OF, origin_of
from deeplightning.run.own_module import servable
from deeplightning.runfolder import RunFolder
from deeplightning.table_spec import TableSpec
from deeplightning.text_spec import TextSpec
from deeplightning.words import first_line
from serve.__main__ import options_parser, serve
from serve.bundle import GPU_TOLERANCE, prepared
from serve.device import CPU, Device, DeviceError, Runtime


@dataclass(frozen=True)
class Checkpoint:
    """Loaded network of a run: the counterpart of `serve.bundle.Bundle`.

    Attributes:
        folder: the run's folder.
        task: its kind, one of `deeplightning.kinds.KINDS`.
        image_spec: how a picture is prepared for it; None: it does not take pictures.
        labels: the K class names, in the order of the probabilities; empty if it answers with pictures.
        run: its origin, as in a bundle.
        samples: of the run's validation set, uint8 (N, C, H, W) or int64 (N, L), to warm up with.
        model: from uint8 (N, C, H, W) or int64 (N, L) to answers.
        precision: the number format that it computes in.
        text_spec: how a text is prepared for it; None: it does not take texts.
        row_spec: how a row of a table, or an array, is prepared for it; None: it takes neither.
        output, example: as for `serve.bundle.Bundle`.
        device: where it computes.
    """

    folder: Path
    task: str
    image_spec: ImageSpec | None
    labels: list[str]
    run: dict[str, object]
    samples: np.ndarray
    model: nn.Module
    precision: str = "fp32"
    text_spec: TextSpec | None = None
    row_spec: TableSpec | ArraySpec | None = None
    output: dict[str, object] = field(default_factory=dict)
    example: object = None
    device: Device = CPU

    @classmethod
    def open(cls, folder: RunFolder, allow: Sequence[str] = (), device: Device = CPU) -> "Checkpoint":
        """Load the best weights of a run.

        Args:
            allow: further modules that the run's config may name.
            device: where it computes. CUDA does not survive a fork: a process that opens a checkpoint on a GPU serves
                it itself.

        Raises:
            UserError: the config names foreign code or is wrong, or there are no readable weights or samples.
            DeviceError: the GPU cannot be used, or its answers differ from those of the CPU.
        """
        task, _, checkpoint = trained_task(folder, allow, "serve")
        task = servable(task, folder)
        if getattr(task, "kind", None) not in KINDS:
            raise CheckpointError(f"{type(task).__name__} is no task that can be served: {', '.join(KINDS)}")
        kind = KINDS[task.kind]
        labels = [str(name) for name in task.class_names] if kind.has_labels else []
        try:
            with np.load(folder.samples, allow_pickle=False) as file:
                samples = file[SAMPLES_OF[kind.takes]]
        except (OSError, ValueError, KeyError) as error:
            message = f"{folder.samples} cannot be read ({error}); `deeplightning export RUN` keeps some"
            raise CheckpointError(message) from error
        model, origin = task.inference_model(), origin_of(folder, checkpoint)
        specs = {name: getattr(task, name, None) for name in ("text_spec", "row_spec")}
        example = None
        if kind.takes != "image":
            given = [json.loads(row) for row in samples] if kind.takes == "table" else list(samples)
            if kind.takes != "text":
                example = given[0] if kind.takes == "table" else given[0].tolist()
            spec: Any = specs["text_spec"] or specs["row_spec"]
            samples = spec.stack([spec.prepare(str(one) if kind.takes == "text" else one) for one in given])
        image_spec = task.image_spec if kind.takes == "image" else None
        output: dict[str, Any] = getattr(task, "answer_details", dict)()
        on_cpu = cls(
            folder.path,
            task.kind,
            image_spec,
            labels,
            origin,
            samples,
            model,
            output=output,
            example=example,
            text_spec=specs["text_spec"],
            row_spec=specs["row_spec"],
        )
        return on_cpu.moved_to(device) if device.on_gpu else on_cpu

    def moved_to(self, device: Device) -> "Checkpoint":
        """Return the same network on a GPU, whose answers to the samples must match those of the CPU.

        Raises:
            DeviceError: the GPU cannot be used, or its answers differ.
        """
        expected = self.predict(self.samples)
        torch.backends.cudnn.allow_tf32 = False  # torch's default is True; fp32 must mean 32 bits
        try:
            moved = replace(self, model=self.model.to(str(device)), device=device)
            difference = float(np.abs(moved.predict(self.samples) - expected).max())
        except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError for CUDA
            reason = first_line(error)
            raise DeviceError(
                f"{device} ({device.name}) cannot be used by torch {torch.__version__}: {reason}"
            ) from error
        if not difference <= GPU_TOLERANCE:
            raise DeviceError(
                f"{device} ({device.name}) answers the run's samples otherwise than the CPU: answers differ by up to "
                f"{difference:.3g}, allowed are {GPU_TOLERANCE:g}; use serve.device=cpu"
            )
        return moved

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Answer prepared images, uint8 (N, C, H, W), or texts, int64 (N, L).

        Answers are probabilities, float32 (N, K), or pictures, float32 (N, C, H, W) from 0 to 1.

        Raises:
            MemoryError: the GPU has too little memory for this batch.
        """
        with torch.inference_mode():
            if not self.device.on_gpu:
                return self.model(torch.tensor(images)).numpy()
            try:
                # The GPU copies from page-locked memory by itself, and torch reuses that for the next batch.
                given = torch.from_numpy(images).pin_memory().to(str(self.device), non_blocking=True)
                return self.model(given).cpu().numpy()
            except torch.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                raise MemoryError(str(error)) from error

    def prepare(self, data: bytes, max_pixels: int, max_side: int | None = None) -> np.ndarray:
        """Prepare one encoded picture for the network, uint8 (C, H, W).

        Raises:
            deeplightning.image_spec.ImageError: it is not a picture, damaged, or too large.
        """
        assert self.image_spec is not None, "it takes pictures"
        return prepared(self.image_spec, data, max_pixels, max_side)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stopped; return the exit code."""
    parser = options_parser()
    parser.prog, parser.description = "python -m deeplightning.torch_server", "Answer HTTP from a run's checkpoint."
    parser.add_argument("run", type=RunFolder, help="a run folder")
    parser.add_argument("--allow", metavar="ROOT", action="append", default=[], help="a module to import; repeatable")
    options = parser.parse_args(arguments)
    folder = options.run
    torch.set_num_threads(1)
    try:
        return serve(
            lambda device: Checkpoint.open(folder, options.allow, device),
            options,
            lambda: [path for path in (folder.best, folder.last) if path.is_file()][:1],
            folder.path,
            Runtime("torch", _torch_lacks, lambda: torch.version.cuda or ""),
        )
    except UserError as error:
        say(f"error: {error}", err=True)
        return error.exit_code


def _torch_lacks() -> str | None:
    """Return why this build of torch cannot use a GPU, or None if it can.

    It does not look for a GPU: that would start CUDA in this process, and its forked workers could not use CUDA then.
    """
    if torch.version.cuda is not None:
        return None
    return f"torch {torch.__version__} is built without CUDA; {TORCH_BUILD} installs a build with it"


if __name__ == "__main__":
    sys.exit(main())
