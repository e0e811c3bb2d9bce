"""Serve a run's checkpoint with torch: `python -m deeplightning.torch_server RUN` replaces `python -m serve` for
networks that ONNX cannot express.

The run's own code is imported; the code of a foreign run is first checked against the allowed modules
(`deeplightning.config.trust`). Letters: N images or texts, C channels, H height, W width, L tokens, K classes.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deeplightning.process.terminal import say

if __name__ == "__main__":
    # One thread per forward pass, set before torch is imported: workers are forked after the model is loaded, and
    # OpenMP threads do not survive a fork.
    os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import nn

from deeplightning.config.packages import TORCH_BUILD
from deeplightning.faults import CheckpointError, UserError
from deeplightning.kinds import KINDS, labels_of
from deeplightning.run.load import trained_task
from deeplightning.run.make_bundle import origin_of
from deeplightning.run.own_module import servable
from deeplightning.runfolder import RunFolder
from deeplightning.words import InputError, first_line
from serve.__main__ import options_parser, serve
from serve.bundle import GPU_TOLERANCE
from serve.device import CPU, Device, DeviceError
from serve.model import Model


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Model):
    """Loaded network of a run, with samples from the run's validation set.

    Attributes:
        network: maps prepared inputs (N, …) to answers.
    """

    network: nn.Module

    @classmethod
    def open(cls, folder: RunFolder, allow: Sequence[str] = (), device: Device = CPU) -> "Checkpoint":
        """Load the best weights of a run.

        Args:
            allow: further modules that the run's config may name.
            device: device that computes. CUDA does not survive a fork, so a process that opens a checkpoint on a GPU
                must serve it itself.

        Raises:
            UserError: the config names foreign code or is wrong, or there are no readable weights or samples.
            DeviceError: the GPU cannot be used, or its answers differ from those of the CPU.
        """
        task, _, checkpoint = trained_task(folder, allow, "serve")
        task = servable(task, folder)
        if getattr(task, "kind", None) not in KINDS:
            raise CheckpointError(f"{type(task).__name__} cannot be served; these tasks can: {', '.join(KINDS)}")
        kind = KINDS[task.kind]
        try:
            with np.load(folder.samples, allow_pickle=False) as file:
                samples = file[kind.nouns]
        except Exception as error:  # numpy, zipfile and zlib each have their own
            message = f"{folder.samples} cannot be read ({error}); remove it and run `deeplightning export`"
            raise CheckpointError(message) from error
        network = task.inference_model()  # must be called before the text spec is read
        spec, examples = getattr(task, kind.spec), []
        if kind.takes != "image":
            readers: dict[str, Callable[[Any], Any]] = {"text": str, "table": json.loads, "array": np.asarray}
            given = [readers[kind.takes](sample) for sample in samples]
            samples = spec.stack([spec.prepare(one) for one in given])
            examples = [(given[0] + 0).tolist() if kind.takes == "array" else given[0]]
        on_cpu = cls(
            folder=folder.path,
            task=task.kind,
            spec=spec,
            labels=labels_of(task),
            run=origin_of(folder, checkpoint),
            samples=samples,
            output=getattr(task, "answer_details", dict)(),
            examples=examples,
            network=network,
        )
        return on_cpu.moved_to(device) if device.on_gpu else on_cpu

    def moved_to(self, device: Device) -> "Checkpoint":
        """Return the same network on a GPU, after comparing its answers to the samples with those of the CPU.

        Raises:
            DeviceError: the GPU cannot be used, or its answers differ.
        """
        expected = self.predict(self.samples)
        torch.backends.cudnn.allow_tf32 = False  # torch's default is True; fp32 must mean 32 bits
        try:
            moved = replace(self, network=self.network.to(str(device)), device=device)
            difference = float(np.abs(moved.predict(self.samples) - expected).max())
        except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError for CUDA
            raise DeviceError(
                f"{device} ({device.name}) cannot be used by torch {torch.__version__}: {first_line(error)}"
            ) from error
        allowed = GPU_TOLERANCE * max(1.0, float(np.abs(expected).max()))
        if not difference <= allowed:
            raise DeviceError(
                f"{device} ({device.name}) and the CPU give different answers to the run's samples: they differ by up "
                f"to {difference:.3g}; the limit is {allowed:g}; use serve.device=cpu"
            )
        return moved

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        try:
            with torch.inference_mode():
                return self.network(torch.tensor(inputs, device=str(self.device))).cpu().numpy()
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        except torch.AcceleratorError as error:
            if "device-side assert" in str(error):  # such as for an index outside an embedding
                os._exit(1)  # CUDA is lost in this process; the pool starts another one
            raise
        except IndexError as error:
            raise InputError(f"The network does not take these values: {first_line(error)}.") from error


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
            _reason_without_gpu,
        )
    except UserError as error:
        say(f"error: {error}", err=True)
        return error.exit_code


def _reason_without_gpu() -> str | None:
    """Return why this build of torch cannot use a GPU, or None if it can.

    It does not look for a GPU, which would start CUDA in this process and make it unusable in forked workers.
    """
    if torch.version.cuda is not None:
        return None
    return f"torch {torch.__version__} is built without CUDA; {TORCH_BUILD} installs a build with it"


if __name__ == "__main__":
    sys.exit(main())
