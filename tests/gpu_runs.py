"""Train small networks on GPUs, each in new processes, and summarize the runs by engine and precision.

CUDA does not survive a fork, so runs share only the tracking store. They also work on CPU processes, which tests this
file on a machine without a GPU. They use only torch, torchvision, Lightning, numpy and the packages of
`tools/gpu_wheels.sh`.
"""

import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commands import Outcome, real
from tiny import digest

LIMIT_SECONDS = 75.0  # per run; the slowest took 35 on an H100
KILL_AT = "13"  # optimizer step in the second epoch, after the checkpoint of step 12

CONFIG = """\
seed: 7
stages: [train, test]
data: {module: {type: gpu_own.Synthetic}, batch_size: 16}     # 240 train, 30 validate, 30 test
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: gpu_own.mixed}
  optimizer:
    type: torch.optim.Adam
    params: {lr: 0.003, weight_decay: 0.01}
    groups: [{match: bias, weight_decay: 0}]
  scheduler:
    type: torch.optim.lr_scheduler.OneCycleLR
    params: {max_lr: 0.01, total_steps: auto}
    call: {interval: step}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 2, callbacks: [{type: gpu_own.Killed}]}
logger: {params: {tracking_uri: STORE, system_metrics: false}, log_every_n_steps: 1, pictures: null}
"""

ENGINES = ["null", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
PRECISIONS = ["32", "bf16", "16"]


def lacks(engine: str | None) -> str | None:
    """Return why an engine cannot be run here, or None."""
    needs_deepspeed = engine is not None and engine.startswith("deepspeed")
    return "deepspeed is not installed" if needs_deepspeed and importlib.util.find_spec("deepspeed") is None else None


def precision_of(engine: str | None, precision: str, on_gpu: bool = True) -> str:
    """Return the value of `engine.precision`: fsdp has no loss scaling, and trains entirely in 16 bits on a GPU."""
    return "16-true" if (engine, precision, on_gpu) == ("fsdp", "16", True) else precision


@dataclass
class Cell:
    """Result of the runs of one engine in one precision.

    Attributes:
        devices: `1 GPU`, `2 CPU processes`.
        train: whether a run of two epochs and its test ends with exit code 0.
        test: its test_acc.
        resumed: whether a run that is killed within an epoch and resumed ends with the same weights and results.
        exported: whether the run exports a bundle, which the export compares with the checkpoint.
        seconds: duration of all three runs.
        reason: the last line of a run that failed.
    """

    engine: str
    precision: str
    devices: str
    train: bool = False
    test: float | None = None
    resumed: bool = False
    exported: bool = False
    seconds: float = 0.0
    reason: str = ""

    @property
    def right(self) -> bool:
        return self.train and self.resumed and self.exported


class Runs:
    """Start runs in a working directory that has `gpu_own.py` and a tracking store.

    Args:
        place: an empty folder.
        run: starts a command, like `commands.real`.
    """

    def __init__(self, place: Path, run: Callable[..., Outcome] = real):
        self.place, self.run = place, run
        self.config = place / "gpu.yaml"
        self.store = place / "mlruns"
        shutil.copy(Path(__file__).with_name("gpu_own.py"), place)
        self.config.write_text(CONFIG.replace("STORE", json.dumps(str(self.store))))

    def start(
        self, *overrides: str, config: Path | None = None, limit: float = LIMIT_SECONDS, **variables: str
    ) -> Outcome:
        """Run `deeplightning train CONFIG override …`; any exit code is accepted.

        Raises:
            AssertionError: it timed out.
        """
        return self.run("train", config or self.config, *overrides, cwd=self.place, limit=limit, **variables)

    def train(self, *overrides: str, code: int = 0, **options: Any) -> Outcome:
        """Call `start`, and assert the exit code."""
        outcome = self.start(*overrides, **options)
        assert outcome.code == code, outcome
        return outcome

    def cell(self, engine: str, precision: str, gpus: int | None = 1, processes: int = 1) -> Cell:
        """Train, test and export; then do the same with a kill in the second epoch and a resume."""
        number = gpus or processes
        kind = "GPU" if gpus else "CPU process"
        cell = Cell(engine, precision, f"{number} {kind}{'' if number == 1 else 'es' if kind[0] == 'C' else 's'}")
        settings = [*spread(engine, gpus, processes), "engine.deterministic=true", "train.accumulator_factor=2"]
        settings += [f"engine.precision={precision_of(engine, precision, gpus is not None)}"]
        settings += [f"data.batch_size={16 // number}", "train.checkpoint.every_n_steps=3", "train.resume_ckpt=auto"]
        if precision == "16":  # Adam's eps of 1e-8 is 0 in half precision
            settings += ["model.optimizer.params.eps=0.0001"]
        straight, killed = ("logger.params.experiment_name=" + name for name in ("straight", "killed"))
        options = {"limit": LIMIT_SECONDS if gpus else 4 * LIMIT_SECONDS}  # CPUs may be shared
        begun = time.monotonic()
        try:
            done = self.start(*settings, straight, **options)
            cell.train = done.code == 0
            if not cell.train:
                cell.reason = f"exit code {done.code}: {last_line(done.err)}"
                return cell
            results = json.loads((done.folder / "test_results.json").read_text())
            cell.test, cell.exported = results["test_acc"], (done.folder / "bundle" / "model.onnx").is_file()
            broken = self.start(*settings, killed, **options, KILL_AT=KILL_AT)
            resumed = self.start(*settings, killed, **options)
            if broken.code == 0 or resumed.code or "resumes " not in resumed.out:
                cell.reason = f"exit codes {broken.code}, {resumed.code}: {last_line(resumed.err)}"
                return cell
            same = json.loads((resumed.folder / "test_results.json").read_text()) == results
            cell.resumed = same and digest(resumed.folder / "last.ckpt") == digest(done.folder / "last.ckpt")
            cell.reason = "" if cell.resumed else "the resumed run has other weights or results"
        except AssertionError as error:
            cell.reason = str(error).splitlines()[0]
        finally:
            cell.seconds = round(time.monotonic() - begun, 1)
        return cell


def spread(engine: str | None, gpus: int | list[int] | None, processes: int = 1) -> list[str]:
    """Return overrides for an engine on `gpus` (a number or indices), or on CPU processes if that is None."""
    return [f"engine.backend={engine or 'null'}", f"engine.gpus={json.dumps(gpus)}", f"engine.processes={processes}"]


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error")), lines[-1] if lines else "no message")[:160]


def note(cell: Cell) -> None:
    """Append a line to the file that GPU_CELLS names; `benchmarks/gpu.py` builds its table from it."""
    if path := os.environ.get("GPU_CELLS"):
        with Path(path).open("a") as file:
            file.write(json.dumps(asdict(cell)) + "\n")
