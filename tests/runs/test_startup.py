"""Imports of each verb: they are the start-up time of a command, which must not grow."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from checks import write_mnist
from commands import python

CONFIG = """\
seed: 1
data: {root: ROOT, module: {type: deeplightning.data.mnist.MNIST}, batch_size: 16}
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1, image_size: 28}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.1, momentum: 0.9}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 1, export: false}
logger: {params: {tracking_uri: STORE}, pictures: null}
"""

# The number of modules that a verb may import, a tenth more than measured (November 2026, Python 3.11), and packages
# that it may not import.
COMPILER = ["torch._dynamo.utils", "torch._inductor", "sympy", "torch.onnx"]
TRACKED = [*COMPILER, "matplotlib", "torchvision", "onnx", "triton"]
"""MLflow is imported after the first step, see test_unsent.py."""
TABLES = ["mlflow", "sqlalchemy", "alembic", "pandas", "scipy", "sklearn"]
HEAVY = ["torch", "numpy", "pytorch_lightning", "PIL", *TRACKED, *TABLES]
BUDGETS = {
    "--help": (140, HEAVY),
    "schema": (219, HEAVY),  # importlib.metadata finds the sections of installed plug-ins
    "check CONFIG": (188, HEAVY),
    "explain CONFIG": (188, HEAVY),
    "train CONFIG": (3885, TRACKED),
    "test RUN": (3784, TRACKED),
    "diff RUN RUN": (220, HEAVY),
    "runs --tracking-uri STORE": (182, HEAVY),
}

PROGRAM = """\
import json, sys
from deeplightning.cli import cli
from deeplightning.cli.exit_codes import run_verb
code = run_verb(cli)
open({file!r}, "w").write(json.dumps([code, sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """`imported(words)` runs a verb in a new process, and returns the modules that it has imported."""
    place = tmp_path_factory.mktemp("place")
    images = np.random.default_rng(0).integers(0, 256, (40, 28, 28), np.uint8)
    write_mnist(place, images, np.arange(40, dtype=np.uint8) % 10)
    config = place / "c.yaml"
    config.write_text(CONFIG.replace("ROOT", str(place)).replace("STORE", str(place / "runs")))

    def modules(words: str) -> set[str]:
        run = next((place / "runs").glob("*/*/artifacts"), Path("none"))
        known = {"CONFIG": str(config), "STORE": str(place / "runs"), "RUN": str(run)}
        file = place / "modules.json"
        program = PROGRAM.format(file=str(file))
        done = python("-c", program, *(known.get(word, word) for word in words.split()), cwd=place)
        assert file.exists(), done.stderr
        code, found = json.loads(file.read_text())
        file.unlink()
        assert code == 0, done.stderr
        return set(found)

    modules("train CONFIG")  # creates the store and the run that other verbs read
    return modules


@pytest.mark.parametrize("words", [pytest.param(w, marks=[pytest.mark.slow] * (w == "test RUN")) for w in BUDGETS])
def test_a_verb_imports_no_more_than_it_did(imported, words):
    """A verb imports at most the recorded number of third-party modules, and none of the packages that it does not
    need. Our modules are not counted: they are small, and splitting one costs no time."""
    most, without = BUDGETS[words]
    most += 10 * (sys.version_info >= (3, 12))  # whose standard library has more modules
    found = {name for name in imported(words) if name.partition(".")[0] not in ("deeplightning", "serve")}
    assert not {name for name in found for package in without if f"{name}.".startswith(f"{package}.")}
    assert len(found) <= most, f"{len(found)} modules; a new import that is worth its time may raise the budget"


LAZY = "import sys, types; from deeplightning.private.lazy_imports import import_lazily\n"

STAND_INS = """\
import importlib.util
import_lazily()
import pytorch_lightning, torch, torchmetrics
from pytorch_lightning.utilities.compile import OptimizedModule
assert "matplotlib" not in sys.modules and type(sys.modules["torch._dynamo"]) is not types.ModuleType
assert "triton" not in sys.modules

from torch.utils import flop_counter
with flop_counter.FlopCounterMode(display=False) as counter:
    torch.ones(2, 3) @ torch.ones(3, 5)
assert counter.get_total_flops() == 60 and "triton" not in sys.modules
if importlib.util.find_spec("triton"):
    from triton.runtime.jit import JITFunction
    assert isinstance(object.__new__(JITFunction), flop_counter._JITFunction)
    assert not isinstance(JITFunction, flop_counter._JITFunction)

network = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
optimizer.step()
assert not isinstance(network, OptimizedModule)
assert "sympy" not in sys.modules, "an optimizer step in eager mode"

compiled = torch.compile(network, backend="eager")
assert isinstance(compiled, OptimizedModule) and not isinstance(network, OptimizedModule)
compiled(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
assert type(sys.modules["torch._dynamo"]) is types.ModuleType is type(torch._dynamo)
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"] and torch._dynamo.config.cache_size_limit

metric = torchmetrics.classification.MulticlassAccuracy(num_classes=2)
metric.update(torch.eye(2), torch.tensor([0, 1]))
assert metric.compute() == 1 and isinstance(metric, torchmetrics.Metric)
assert torchmetrics.functional.accuracy(torch.eye(2), torch.tensor([0, 1]), task="multiclass", num_classes=2) == 1
import matplotlib
matplotlib.use("agg")
figure, axes = metric.plot()
assert figure.axes == [axes]
"""

GROUP = """\
import_lazily()
import pytorch_lightning, torch
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
network = DistributedDataParallel(torch.nn.Linear(2, 2))
network(torch.ones(1, 2)).sum().backward()
assert "sympy" not in sys.modules, "a step of a group in eager mode"
answer = torch._dynamo.utils.get_optimize_ddp_mode()
assert torch._dynamo.trace_rules.SKIP_DIRS and "sympy" in sys.modules
assert torch._dynamo.utils.get_optimize_ddp_mode() == answer
torch.distributed.destroy_process_group()
"""

SUBMODULE_FIRST = """\
import_lazily()
from torch._dynamo.utils import is_compile_supported
import torch
assert type(torch._dynamo) is types.ModuleType and sys.modules["torch._dynamo.utils"] is torch._dynamo.utils
"""

INSPECTED = """\
import inspect
import_lazily()
import pytorch_lightning, torch, torchmetrics
assert inspect.getfile(torch._dynamo).endswith("__init__.py") and "sympy" not in sys.modules
from torch._dynamo import OptimizedModule
assert issubclass(OptimizedModule, torch.nn.Module)
from torchmetrics import *
assert Accuracy is torchmetrics.classification.Accuracy
"""

UNKNOWN = """\
sys.modules["torchmetrics.__about__"] = types.ModuleType("another version of it")
import_lazily()
import pytorch_lightning, torchmetrics
assert torchmetrics.__version__ and type(torchmetrics) is types.ModuleType
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [STAND_INS, GROUP, SUBMODULE_FIRST, INSPECTED, UNKNOWN],
    ids=["use", "process group", "submodule", "inspect", "unknown version"],
)
def test_lazy_modules_load_on_use(program):
    """Compiling, metrics and plots work despite lazy imports; an unknown version of a library is imported as usual."""
    done = python("-c", LAZY + program)
    assert done.returncode == 0, done.stderr
