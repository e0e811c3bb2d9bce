"""`engine.compile` compiles a training step once, with the results of eager mode, and later runs use the cache.

Most tests replace the compiler by a backend that runs graphs as they are: every backend gets the same calls.
"""

import contextlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from commands import real
from conftest import digest, weights
from functorch.compile import make_boxed_func
from test_text_classif import CONFIG as TEXT
from test_text_classif import reviews
from torch._dynamo.backends.common import aot_autograd

from deeplightning.config.examine import load_config
from deeplightning.config.schema import Engine
from deeplightning.engine import compute
from deeplightning.faults import ConfigError, SetupError
from deeplightning.task.compiled import Compiled
from deeplightning.task.cuda_graphs import ModuleState, _Replay, check_recordable
from deeplightning.task.networks import LabelError, MisfitError

CONFIGS = Path(__file__).parents[2] / "configs"
EPOCHS = "train.num_epochs=2"  # of eight batches of 16 and one of 6; 16 samples validate, 150 test
SLOW = pytest.mark.slow


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture
def backend(monkeypatch):
    """The Counting backend of `torch.compile`; `backend.use(other)` replaces it."""
    torch._dynamo.reset()
    torch_compile, counting = torch.compile, Counting()

    def compiled(function, mode, dynamic):
        return torch_compile(function, backend=lambda *graph: compiled.backend(*graph), dynamic=dynamic)

    compiled.backend = counting
    counting.use = lambda other: setattr(compiled, "backend", other)
    monkeypatch.setattr(torch, "compile", compiled)
    yield counting
    torch._dynamo.reset()


def last_of(fitted):
    return fitted.folder / "last.ckpt"


@pytest.fixture
def write(place):
    """`write(name, text)` writes a module into the working directory for one test."""
    written = []

    def run(name, text):
        written.append(place / name)
        written[-1].write_text(text)

    yield run
    for path in written:
        path.unlink()


@pytest.mark.parametrize(
    ("mode", "stopped"),
    [
        pytest.param("reduce-overhead", "train.max_steps=5", id="inside an epoch"),
        pytest.param("true", "train.max_steps=8", id="before a short batch", marks=SLOW),
    ],
)
def test_a_resumed_run_compiles_once_and_ends_like_one_that_was_not_stopped(mode, stopped, fit, backend):
    """One graph serves training with short last batches, validation and test; weights are equal bit for bit. A run that
    resumes with a short batch does not compile for its shape."""
    compile = f"engine.compile={mode}"
    whole = fit(EPOCHS, compile)
    whole.trainer.test(whole.task, whole.data, verbose=False)
    assert backend.graphs == 1
    first = fit(EPOCHS, compile, stopped)
    torch._dynamo.reset()
    before = backend.graphs
    resumed = fit(EPOCHS, compile, f"train.resume_ckpt='{last_of(first)}'")
    assert backend.graphs == before + 1
    assert digest(last_of(resumed)) == digest(last_of(whole))
    assert mode != "true" or resumed.task._compiled._shapes[0][0] == 16


SETTINGS = {
    "plain": [],
    "accumulated": ["train.accumulator_factor=3", "train.gradient_clip={value: 0.1}"],
    "random": ["engine.precision=bf16", "model.network={type: own.Dropout}"],
    "one batch": ["engine.channels_last=true", "data.batch_size=200"],  # an epoch
    "losses": ["model.loss={a: {type: torch.nn.CrossEntropyLoss, weight: 2.0}, b: {type: torch.nn.MultiMarginLoss}}"],
}


@pytest.mark.parametrize(
    ("name", "mode", "graphs"),
    [
        ("plain", "true", 1),
        ("accumulated", "reduce-overhead", 1),
        ("random", "graphs", 0),  # recorded on a GPU only
        pytest.param("random", "true", 1, marks=SLOW),
        pytest.param("one batch", "reduce-overhead", 1, marks=SLOW),
        pytest.param("losses", "true", 1, marks=SLOW),
    ],
)
def test_what_is_compiled_is_the_step_that_runs_eagerly(name, mode, graphs, fit, backend):
    """With a backend that computes like eager mode, weights and logged points equal those of eager mode bit for bit."""
    settings = SETTINGS[name]
    eager, compiled = fit(EPOCHS, *settings), fit(EPOCHS, *settings, f"engine.compile={mode}")
    assert backend.graphs == graphs
    assert digest(last_of(compiled)) == digest(last_of(eager))
    names = [name for name in (eager.folder / "metrics.csv").read_text().splitlines()[0].split(",") if "train" in name]
    assert {name: compiled.series(name) for name in names} == {name: eager.series(name) for name in names}


# ---- recorded steps, without a compiler


class Counts(torch.nn.Linear):
    """Returns zeros at each second call, by a Python counter."""

    calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs) * (self.calls % 2)


class Draws(torch.nn.Linear):
    """Returns zeros at random, by a generator of the CPU."""

    def __init__(self, draw):
        super().__init__(4, 2)
        self.draw = draw

    def forward(self, inputs):
        return super().forward(inputs) * (self.draw() < 0.5)


class Averages(torch.nn.Linear):
    """Replaces its buffer by a new tensor."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, inputs):
        outputs = super().forward(inputs)
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs - self.mean


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (Averages(), "replaces its buffer `0.mean`"),
        (Counts(4, 2), "Counts changes its `calls` at each call"),
        (Draws(random.random), "draws random numbers on the CPU"),
        (Draws(np.random.rand), "draws random numbers on the CPU"),
        (Draws(lambda: float(torch.rand(()))), "draws random numbers on the CPU"),
    ],
    ids=["a buffer", "a counter", "Python's numbers", "NumPy's", "torch's"],
)
def test_what_a_recorded_step_would_not_repeat_is_refused(network, reason):
    """A network that depends on Python state or CPU random numbers is an error: a graph would replay its first step."""
    with pytest.raises(MisfitError, match=reason) as refused:
        check_recordable(lambda inputs: network(inputs).sum(), torch.nn.ModuleList([network]), (torch.ones(3, 4),))
    assert "set engine.compile=reduce-overhead" in str(refused.value)


def test_a_network_that_computes_with_tensors_alone_is_recorded():
    """A network with batch norm, which only computes with tensors, can be recorded."""
    network = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2), torch.nn.Softmax(1))
    learns = check_recordable(network, torch.nn.ModuleList([network]), (torch.rand(3, 4),))
    assert learns == {"0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"}


CHANGES = {
    "a dropout's probability": lambda n: setattr(n[2], "p", 0.9),
    "a layer in evaluation mode": lambda n: n[1].eval(),
    "a frozen layer": lambda n: n[0].weight.requires_grad_(False),
    "weights in other memory": lambda n: setattr(n[0].weight, "data", n[0].weight.data.clone()),
    "a buffer in other memory": lambda n: setattr(n[1].running_mean, "data", n[1].running_mean.data.clone()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_steps_shows_and_learning_does_not(change):
    """A change that a recorded graph would ignore is detected; steps of optimizer and batch norm are no change."""
    network = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.1))
    state = ModuleState(torch.nn.ModuleList([network]))
    network(torch.rand(3, 4)).sum().backward()
    torch.optim.SGD(network.parameters(), lr=0.1).step()
    assert not state.has_changed()
    CHANGES[change](network)
    assert state.has_changed()


class Pretended(contextlib.nullcontext):
    """Replaces CUDA's stream, graph and recording: a recording computes once, a replay does nothing."""

    def __init__(self, *args, **options):
        super().__init__()

    def replay(self, *_):
        pass

    pool = wait_stream = replay


def test_a_replay_gives_what_the_function_gives_and_its_gradients(monkeypatch):
    """A replay returns the function's nested values, and gradients of its inputs and the parameters that it uses."""
    for name in ("Stream", "stream", "graph", "CUDAGraph", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, Pretended)
    monkeypatch.setattr(torch.cuda, "current_stream", Pretended)
    monkeypatch.setattr(torch, "empty_like", torch.ones_like)  # the gradient of the loss
    network = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 2), "other": torch.nn.Linear(4, 2)})

    def step(inputs, labels):
        outputs = network["used"](inputs)
        loss = (outputs - labels).square().mean()
        return {"logits": outputs}, {"a": loss.detach() / 2}, loss

    inputs, labels = torch.rand(3, 4, requires_grad=True), torch.rand(3, 2)
    tensors = [inputs, *network["used"].parameters()]
    expected, expected_parts, expected_loss = step(inputs, labels)
    gradients = torch.autograd.grad(expected_loss, tensors)
    replay = _Replay(step, network, (inputs, labels))
    assert replay.trained_names == {"used.weight", "used.bias"}
    found, found_parts, loss = replay(inputs, labels)
    assert torch.equal(found["logits"], expected["logits"])
    assert torch.equal(found_parts["a"], expected_parts["a"])
    assert torch.equal(loss, expected_loss)
    assert not found["logits"].requires_grad
    loss.backward()
    assert all(torch.equal(tensor.grad, gradient) for tensor, gradient in zip(tensors, gradients, strict=True))
    assert network["other"].weight.grad is None
    alone = _Replay(lambda values: network["used"](values).sum(), network, (inputs,))
    assert torch.equal(alone(inputs), network["used"](inputs).sum())


STEPPING = """\
from deeplightning.task.img_classif import ImageClassification


class Own(ImageClassification):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class Wrong(ImageClassification):
    def truth(self, batch):
        return batch["label"] + 8
"""


def test_a_task_with_a_step_of_its_own_is_not_recorded(fit, write):
    """A task with its own `training_step`, and an engine with hooks in the network, are refused."""
    write("stepping.py", STEPPING)
    with pytest.raises(MisfitError, match="Own has a training_step of its own"):
        fit("model.module={type: stepping.Own}", "engine.compile=graphs")
    with pytest.raises(ConfigError, match=r"engine\.compile=reduce-overhead"):
        load_config(CONFIGS / "base.yaml", ["engine.compile=graphs", "engine.backend=fsdp"])


def overwriting():
    """Return a backend whose graphs return the same memory each time, as CUDA graphs do. When the first graph runs, a
    step begins, and all that earlier steps returned becomes NaN."""
    returned, graphs = [], []

    def graph(module, inputs):
        graphs.append(module)
        memory = {}

        def run(*arguments):
            if module is graphs[0]:
                for tensor in returned:
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))
            values = module(*arguments)
            for number, value in enumerate(values):
                if isinstance(value, torch.Tensor):
                    if number not in memory:
                        returned.append(memory.setdefault(number, value.clone()))
                    memory[number].copy_(value)
            return [memory.get(number, value) for number, value in enumerate(values)]

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=graph, bw_compiler=graph)


def section(config, name, **changes):
    """Return overrides that replace a section of the tiny config by that of another config."""
    return [f"~{name}", f"{name}={json.dumps(yaml.safe_load(config)[name] | changes)}"]


@pytest.mark.parametrize(("mode", "graphs"), [pytest.param("true", 2, marks=SLOW), ("reduce-overhead", 1)])
def test_texts_of_all_lengths_take_two_compilations_or_one_graph(mode, graphs, fit, backend, tmp_path):
    """Texts are compiled for one length, then for any; CUDA graphs serve the first only. Weights equal eager mode's."""
    for name in ("train", "dev", "test"):
        rows = "".join(f"{text} {'very ' * (n % 7)}good\t{label}\n" for n, (text, label) in enumerate(reviews(128)))
        (tmp_path / f"{name}.tsv").write_text(f"sentence\tlabel\n{rows}")
    settings = [*section(TEXT, "data", root=str(tmp_path), batch_size=4), *section(TEXT, "model"), EPOCHS]
    compiled = fit(*settings, f"engine.compile={mode}")
    assert backend.graphs == graphs
    assert digest(last_of(compiled)) == digest(last_of(fit(*settings)))


KEEPING = '''\
import pytorch_lightning as pl
import torch
from torchmetrics import Metric


class Kept(Metric):
    """Mean of all outputs, which it keeps without a copy."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx="cat")

    def update(self, outputs, truth):
        self.seen.append(outputs)

    def compute(self):
        return torch.cat(list(self.seen)).mean()


class Keeps(pl.Callback):
    """Keeps each step's loss."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append((trainer.callback_metrics["train_loss"], outputs["loss"]))
'''


def test_what_outlives_a_step_is_not_overwritten_by_the_next(fit, backend, write):
    """Values that callbacks and metrics keep equal those of eager mode, although each step reuses the memory."""
    write("keeping.py", KEEPING)
    settings = [EPOCHS, "train.callbacks=[{type: keeping.Keeps}]", "model.metrics={kept: {type: keeping.Kept}}"]
    eager = fit(*settings)
    backend.use(overwriting())
    compiled = fit(*settings, "engine.compile=reduce-overhead")
    means = [dict(each.series("train_kept_epoch")) for each in (eager, compiled)]
    assert means[1] == pytest.approx(means[0], abs=1e-4)
    callbacks = [[c for c in each.trainer.callbacks if type(c).__name__ == "Keeps"] for each in (eager, compiled)]
    kept = [torch.tensor(each.losses) for (each,) in callbacks]
    assert kept[0].shape == (18, 2)
    torch.testing.assert_close(*kept, atol=1e-4, rtol=0)


def test_accumulated_gradients_are_not_in_the_memory_of_a_graph(fit, backend):
    """While batches are accumulated, a step begins with a copy of the gradients, which no graph overwrites."""
    fitted = fit("train.max_steps=1", "train.accumulator_factor=2", "engine.compile=reduce-overhead")
    parameter = next(fitted.task.network.parameters())
    parameter.grad = gradient = torch.ones_like(parameter)
    fitted.task._compiled.begin_step(fitted.task, torch.device("cpu"), accumulates=True)
    assert torch.equal(parameter.grad, gradient)
    assert parameter.grad.data_ptr() != gradient.data_ptr()


def test_a_graph_is_for_one_shape_and_the_log_says_what_runs_without(caplog):
    """Batches of another shape run eagerly; one warning has both shapes and the setting for any length."""
    compiled = Compiled("reduce-overhead")
    first, other = torch.zeros(4, 10), torch.zeros(4, 12)
    assert [compiled.takes(x, may_be_short=False) for x in (first, other, first, other)] == [True, False, True, False]
    assert not compiled.takes(torch.zeros(3, 10), may_be_short=True)
    assert [record.getMessage() for record in caplog.records] == [
        "engine.compile: batches are compiled in the shape of the first, (4, 10); this one is (4, 12) and runs eagerly"
        ", as do all others of another shape. engine.compile=true compiles for any length"
    ]
    plain = Compiled(True)
    assert [plain.takes(x, may_be_short=False) for x in (first, other)] == [True, True]


def test_a_wrong_label_in_the_first_batch_is_reported_as_in_eager_mode(fit, backend, write):
    """The error has label and number of outputs, instead of a compiled loss's index out of bounds."""
    write("stepping.py", STEPPING)
    with pytest.raises(LabelError, match=r"the data holds label 1[67], the network has 10 outputs"):
        fit("model.module.type=stepping.Wrong", "engine.compile=true")


# ---- what the machine has to have


@pytest.fixture
def variables(monkeypatch):
    """`monkeypatch`, with an environment that names no compiler."""
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("gpus", "given", "message"),
    [
        (None, {}, r"no C\+\+ compiler: the PATH has no g\+\+; install one .* set CXX to its name"),
        (None, {"CXX": "icpc -O3"}, r"no C\+\+ compiler: CXX names icpc, which does not exist"),
        ([0], {}, r"no C compiler: the PATH has no gcc or clang; .* set CC to its name"),
    ],
)
def test_a_missing_compiler_is_reported_before_training(gpus, given, message, variables, tmp_path):
    """A missing compiler ends with exit code 3 and the remedy, before data are read; torch would raise later."""
    variables.setenv("PATH", str(tmp_path))
    for name, value in given.items():
        variables.setenv(name, value)
    with pytest.raises(SetupError, match=message) as caught:
        compute.prepare_to_compile(Engine(compile=True, gpus=gpus))
    assert caught.value.exit_code == 3
    assert "engine.compile" in str(caught.value)


# ---- with torch's own compiler

COUNTERS = """\
import json
import pathlib

import pytorch_lightning as pl


class Counters(pl.Callback):
    def on_train_end(self, trainer, module):
        from torch._dynamo.utils import counters

        found = {"graphs": counters["stats"]["unique_graphs"], **counters["inductor"]}
        pathlib.Path(f"counters-{trainer.global_rank}.json").write_text(json.dumps(found))
"""


@pytest.fixture
def compiled_run(tiny, tmp_path):
    """`compiled_run(override, …)` trains in a new process with its own compiler cache; returns outcome and counters."""
    (tmp_path / "graph_counters.py").write_text(COUNTERS)

    def run(*overrides):
        words = ("train", tiny, "train.callbacks=[{type: graph_counters.Counters}]", *overrides)
        outcome = real(*words, cwd=tmp_path, limit=600, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), code=0)
        return outcome, json.loads((tmp_path / "counters-0.json").read_text())

    return run


def assert_close(found, expected):
    """Assert that the weights of two runs are equal up to 1e-4."""
    ours, others = (weights(last_of(run)) for run in (found, expected))
    torch.testing.assert_close(ours, others, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_second_run_uses_the_cache_of_the_first_and_both_learn_what_eager_mode_does(compiled_run):
    """A new process takes the graphs from the cache; a short batch, validation and test compile nothing."""
    settings = [EPOCHS, "stages=[train, test]"]
    eager, _ = compiled_run(*settings)
    first, made = compiled_run(*settings, "engine.compile=true")
    second, found = compiled_run(*settings, "engine.compile=true")
    assert (made["graphs"], made["fxgraph_cache_miss"]) == (1, 2)  # forwards and backwards
    assert (found["graphs"], found["fxgraph_cache_hit"]) == (1, 2)
    assert "fxgraph_cache_miss" not in found
    assert digest(last_of(first)) == digest(last_of(second))
    assert_close(first, eager)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_learn_what_eager_mode_does(engine, compiled_run):
    """Under ddp the step, and under fsdp the network, is compiled, with the weights of eager mode."""
    settings = [EPOCHS, f"engine={{backend: {engine}, processes: 2}}", "data.batch_size=8"]
    eager, _ = compiled_run(*settings)
    done, made = compiled_run(*settings, "engine.compile=true")
    assert made["graphs"] >= 1
    assert_close(done, eager)
