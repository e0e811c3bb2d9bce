"""Run `deeplightning check` in processes forked from one that has imported everything.

The kernel kills a process that exceeds its CPU time or memory.
"""

import contextlib
import gc
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from commands import end_with

from deeplightning.config.examine import check
from deeplightning.config.schema import Config

CPU_SECONDS = 2  # including the imports
MEMORY_BYTES = 500_000_000  # of address space, which is more than resident memory
LIMIT_SECONDS = 30  # wall clock: a check that blocks is killed
SECRET = "s3cr3t-of-this-test"

BASE = """\
_base_: other.yaml
seed: 7
stages: [train, test]
data:
  module: {type: some_parts.anything, params: {a: [1, {b: c}], d: {type: some_parts.anything, params: {e: 1e-3}}}}
  batch_size: 4
  root: ~/data
model:
  module: {type: some_parts.anything}
  network:
    one: {type: some_parts.anything, params: {f: {ref: some_parts.anything}}}
    two: {type: some_parts.anything}
  optimizer:
    type: some_parts.anything
    params: &params {lr: 0.1, weight_decay: "${data.batch_size}"}
    groups: [{match: 'bias|norm', weight_decay: 0}]
  scheduler: {type: some_parts.anything, params: {<<: *params}, call: {interval: step, monitor: val_loss}}
  loss: {type: some_parts.anything, weight: 0.5}
  metrics: {acc: {type: some_parts.anything}}
engine: {gpus: null, precision: bf16-mixed, env: {A: B}}
train:
  num_epochs: 2
  callbacks:
  - {type: some_parts.anything}
  early_stop: {metric: val_loss, delta: 0.1}
  checkpoint: {every_n_epochs: 0.5, monitor: val_loss}
logger:
  type: some_parts.anything
  params: {token: "${oc.env:SOME_SECRET}"}
  log_every_n_steps: {per_epoch: 3}
serve: {port: 5000}
"""

GOOD = """\
data:
  module: {type: deeplightning.data.digits.Digits}
  batch_size: 32
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1, image_size: 8}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.1}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 1}
"""


def write_mnist(root: Path, images: Any, labels: Any, split: int | None = None) -> Path:
    """Write images (N, H, W) and labels (N,), 0 to 255, as an MNIST below `root`.

    Args:
        split: number of training images, the others are for testing; None: all are in both sets.
    """
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, rows in (("train", slice(split)), ("t10k", slice(split, None))):
        for name, array in (("images-idx3", images[rows]), ("labels-idx1", labels[rows])):
            shape = b"".join(size.to_bytes(4, "big") for size in array.shape)
            content = bytes([0, 0, 8, array.ndim]) + shape + array.astype("uint8").tobytes()
            (raw / f"{part}-{name}-ubyte").write_bytes(content)
    return root


class Checker:
    """Run `deeplightning check` many times."""

    def __init__(self, folder: Path):
        self.folder = folder
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL") if name in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env={**kept, "PYTHONPATH": str(Path(__file__).resolve().parents[1]), "SOME_SECRET": SECRET},
        )

    def __call__(self, *arguments: str) -> str:
        """Check a config, assert that the command ends properly, and return its stderr."""
        end = self._ask(arguments)
        for _ in range(5):
            if end["seconds"] > CPU_SECONDS:  # only other load slows it down, so try again
                end = self._ask(arguments)
        out, err = ((self.folder / name).read_bytes().decode() for name in ("out", "err"))
        assert end["code"] in (0, 2, 3), f"ended with {end['code']}: {err}"
        assert end["seconds"] <= CPU_SECONDS, err[:1000]
        assert "Traceback" not in err
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out + err), "control characters are escaped"
        assert SECRET not in out + err
        assert max(map(len, err.split("\n"))) < 10_000, "a message fits on a screen"
        assert bool(re.search("^error: ", err, re.MULTILINE)) == (end["code"] != 0), err[:1000]
        return err

    def _ask(self, arguments: tuple[str, ...]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(arguments).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


def load(path: Any, overrides: list[str] | None = None) -> Config:
    """Load a config file with overrides, unresolved; import everything that it names.

    Raises:
        UserError: it lists every error.
    """
    return check(path, overrides, importing=True).checked()


def _serve() -> None:
    """Check the configs that stdin names, each in a forked process; print exit code and CPU seconds."""
    from deeplightning import cli

    for name in ("out", "err"):
        Path(name).touch()
    Path("some_parts.py").write_text("def anything(cfg=None, *args, **kwargs): ...\n")
    Path("c.yaml").write_text(BASE)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cli.cli.main(["check", "c.yaml"], standalone_mode=False)  # imports everything
    begin = time.process_time()
    gc.freeze()  # otherwise a collection in a child copies every page
    for line in iter(sys.stdin.buffer.readline, b""):
        child = os.fork()
        if child == 0:
            _check(cli, json.loads(line))
        _, status, used = os.wait4(child, 0)
        seconds = begin + used.ru_utime + used.ru_stime
        print(json.dumps({"code": os.waitstatus_to_exitcode(status), "seconds": seconds}), flush=True)


def _check(cli: Any, arguments: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS + 1, CPU_SECONDS + 1))
    signal.alarm(LIMIT_SECONDS)  # noqa: TID251  (it has no handler: the child ends)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(("out", "err"), 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_TRUNC), number)
    sys.argv = ["deeplightning", "check", *arguments]
    end_with(cli.main)


if __name__ == "__main__":
    _serve()
