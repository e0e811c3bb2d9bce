"""`engine.compile` compiles a training step once: its results are those of eager mode, and later runs find it compiled.

On the CPU most tests take a backend that compiles nothing: what is asked of a compiler is the same for each of them.
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
EPOCHS = "train.num_epochs=2"  # of eight batches of 16 and one of 6; then 16 and 150 samples are judged


class Counting:
    """A backend that runs a graph as it is, and counts the graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture
def backend(monkeypatch):
    """`backend.use(other)` is what `torch.compile` gives its graphs to, Counting at first."""
    torch._dynamo.reset()
    real, chosen = torch.compile, Counting()

    def compiled(function, mode, dynamic):
        return real(function, backend=lambda *given: compiled.backend(*given), dynamic=dynamic)

    compiled.backend = chosen
    chosen.use = lambda other: setattr(compiled, "backend", other)
    monkeypatch.setattr(torch, "compile", compiled)
    yield chosen
    torch._dynamo.reset()


def last_of(fitted):
    return fitted.folder / "last.ckpt"


@pytest.fixture
def write(place):
    """`write(name, text)` puts a module into the working directory, for one test."""
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
        pytest.param("true", "train.max_steps=8", id="before a short batch", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_compiles_once_and_ends_like_one_that_was_not_stopped(mode, stopped, fit, backend):
    """One graph for epochs with a short last batch, validation and test; weights bit for bit; the first batch that is
    seen does not decide what is compiled, if it is an epoch's last."""
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
        ("random", "graphs", 0),  # which a GPU would record
        *(
            pytest.param(name, mode, 1, marks=pytest.mark.slow)
            for name, mode in zip([*SETTINGS][2:], ("true", "reduce-overhead", "true"), strict=True)
        ),
    ],
)
def test_what_is_compiled_is_the_step_that_runs_eagerly(name, mode, graphs, fit, backend):
    """With a backend that computes as eager mode does, weights and logged points are the same, bit for bit."""
    settings = SETTINGS[name]
    eager, compiled = fit(EPOCHS, *settings), fit(EPOCHS, *settings, f"engine.compile={mode}")
    assert backend.graphs == graphs
    assert digest(last_of(compiled)) == digest(last_of(eager))
    names = [name for name in (eager.folder / "metrics.csv").read_text().splitlines()[0].split(",") if "train" in name]
    assert {name: compiled.series(name) for name in names} == {name: eager.series(name) for name in names}


# ---- recorded steps, without a compiler


class Counts(torch.nn.Linear):
    """Drops itself out in turn, by a counter of Python's."""

    calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs) * (self.calls % 2)


class Draws(torch.nn.Linear):
    """Drops itself out at random, by a generator of the CPU's."""

    def __init__(self, draw):
        super().__init__(4, 2)
        self.draw = draw

    def forward(self, inputs):
        return super().forward(inputs) * (self.draw() < 0.5)


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (Counts(4, 2), "Counts changes its `calls` at each call"),
        (Draws(random.random), "draws random numbers on the CPU"),
        (Draws(np.random.rand), "draws random numbers on the CPU"),
        (Draws(lambda: float(torch.rand(()))), "draws random numbers on the CPU"),
    ],
    ids=["a counter", "Python's numbers", "NumPy's", "torch's"],
)
def test_what_a_recorded_step_would_not_repeat_is_refused(network, reason):
    """A graph would repeat what Python has decided in the first batch, without a word."""
    with pytest.raises(MisfitError, match=reason) as refused:
        check_recordable(lambda inputs: network(inputs).sum(), torch.nn.ModuleList([network]), (torch.ones(3, 4),))
    assert "set engine.compile=reduce-overhead" in str(refused.value)


def test_a_network_that_computes_with_tensors_alone_is_recorded():
    """Batch norm and dropout too, whose numbers are drawn where the tensors are."""
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
    """What a graph took for granted; a step of the optimizer and of batch norm changes values alone."""
    network = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.1))
    state = ModuleState(torch.nn.ModuleList([network]))
    network(torch.rand(3, 4)).sum().backward()
    torch.optim.SGD(network.parameters(), lr=0.1).step()
    assert not state.has_changed()
    CHANGES[change](network)
    assert state.has_changed()


class Pretended(contextlib.nullcontext):
    """Stands in for CUDA's stream, graph and recording: a recording computes once, a replay does nothing."""

    def __init__(self, *args, **options):
        super().__init__()

    def replay(self, *_):
        pass

    pool = wait_stream = replay


def test_a_replay_gives_what_the_function_gives_and_its_gradients(monkeypatch):
    """Values in the same tuples and dicts, and the gradients of inputs and of the parameters that are used."""
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
    own, parts, expected = step(inputs, labels)
    expected.backward()
    wanted = [inputs.grad, network["used"].weight.grad, network["used"].bias.grad]
    inputs.grad = network["used"].weight.grad = network["used"].bias.grad = None
    replay = _Replay(step, network, (inputs, labels))
    assert replay.trained_names == {"used.weight", "used.bias"}
    found, found_parts, loss = replay(inputs, labels)
    assert torch.equal(found["logits"], own["logits"])
    assert torch.equal(found_parts["a"], parts["a"])
    assert torch.equal(loss, expected)
    assert not found["logits"].requires_grad
    loss.backward()
    given = [inputs.grad, network["used"].weight.grad, network["used"].bias.grad]
    assert all(torch.equal(one, other) for one, other in zip(given, wanted, strict=True))
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
    """Nobody knows what such a step computes beside network and losses; likewise engines with hooks in the network."""
    write("stepping.py", STEPPING)
    with pytest.raises(MisfitError, match="Own has a training_step of its own"):
        fit("model.module={type: stepping.Own}", "engine.compile=graphs")
    with pytest.raises(ConfigError, match=r"engine\.compile=reduce-overhead"):
        load_config(CONFIGS / "base.yaml", ["engine.compile=graphs", "engine.backend=fsdp"])


def overwriting():
    """A backend whose graphs write what they give into the same memory each time, as CUDA graphs do, and make it
    not-a-number in between: when the next step begins with the first graph, what the step before has given is lost."""
    given, first = [], []

    def graph(module, inputs):
        first.append(module)
        own = {}

        def run(*arguments):
            if module is first[0]:
                for tensor in given:
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))
            values = module(*arguments)
            for number, value in enumerate(values):
                if isinstance(value, torch.Tensor):
                    if number not in own:
                        given.append(own.setdefault(number, value.clone()))
                    own[number].copy_(value)
            return [own.get(number, value) for number, value in enumerate(values)]

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=graph, bw_compiler=graph)


def section(config, name, **changes):
    """Overrides that take a section of another config for the tiny one's."""
    return [f"~{name}", f"{name}={json.dumps(yaml.safe_load(config)[name] | changes)}"]


@pytest.mark.parametrize(("mode", "graphs"), [pytest.param("true", 2, marks=pytest.mark.slow), ("reduce-overhead", 1)])
def test_texts_of_all_lengths_take_two_compilations_or_one_graph(mode, graphs, fit, backend, tmp_path):
    """Of one length, then of any; CUDA graphs are for the first length alone. Weights as in eager mode."""
    for name in ("train", "dev", "test"):
        rows = "".join(f"{text} {'very ' * (n % 7)}good\t{label}\n" for n, (text, label) in enumerate(reviews(128)))
        (tmp_path / f"{name}.tsv").write_text(f"sentence\tlabel\n{rows}")
    settings = [*section(TEXT, "data", root=str(tmp_path), batch_size=4), *section(TEXT, "model"), EPOCHS]
    compiled = fit(*settings, f"engine.compile={mode}")
    assert backend.graphs == graphs
    assert digest(last_of(compiled)) == digest(last_of(fit(*settings)))


KEEPING = '''\
"""Keeps what a step gives."""

import pytorch_lightning as pl
import torch
from torchmetrics import Metric


class Kept(Metric):
    """Mean of all outputs, which it keeps as they are."""

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
    """Values that callbacks and metrics keep are those of eager mode, though each step writes over the last's."""
    write("keeping.py", KEEPING)
    settings = [EPOCHS, "train.callbacks=[{type: keeping.Keeps}]", "model.metrics={kept: {type: keeping.Kept}}"]
    eager = fit(*settings)
    backend.use(overwriting())
    compiled = fit(*settings, "engine.compile=reduce-overhead")
    means = [[value for _, value in each.series("train_kept_epoch")] for each in (eager, compiled)]
    assert means[1] == pytest.approx(means[0], abs=1e-4)
    callbacks = [[c for c in each.trainer.callbacks if type(c).__name__ == "Keeps"] for each in (eager, compiled)]
    kept = [torch.tensor(each.losses) for (each,) in callbacks]
    assert kept[0].shape == (18, 2)
    torch.testing.assert_close(*kept, atol=1e-4, rtol=0)


def test_gradients_that_wait_for_the_next_batch_are_not_in_the_memory_of_a_graph(fit, backend):
    """Where batches are accumulated, each but the first begins with gradients that no graph has given."""
    fitted = fit("train.max_steps=1", "train.accumulator_factor=2", "engine.compile=reduce-overhead")
    parameter = next(fitted.task.network.parameters())
    parameter.grad = torch.ones_like(parameter)
    given = parameter.grad
    fitted.task._compiled.begin_step(fitted.task, torch.device("cpu"), accumulates=True)
    assert torch.equal(parameter.grad, given)
    assert parameter.grad.data_ptr() != given.data_ptr()


def test_a_graph_is_for_one_shape_and_the_log_says_what_runs_without(caplog):
    """Pictures of another size in the middle of an epoch: eager, one warning with both shapes and what to set."""
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


def test_a_wrong_label_in_the_first_batch_is_told_as_without_a_compiler(fit, backend, write):
    """By label and outputs; a compiled loss would end with an index out of bounds."""
    write("stepping.py", STEPPING)
    with pytest.raises(LabelError, match=r"the data holds label 1[67], the network has 10 outputs"):
        fit("model.module.type=stepping.Wrong", "engine.compile=true")


# ---- what the machine has to have


@pytest.fixture
def variables(monkeypatch):
    """An environment in which nothing is said about compilers."""
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
def test_without_a_compiler_the_remedy_is_told_before_anything_is_trained(gpus, given, message, variables, tmp_path):
    """Exit code 3: torch would say so after the data were read, with a traceback."""
    variables.setenv("PATH", str(tmp_path))
    for name, value in given.items():
        variables.setenv(name, value)
    with pytest.raises(SetupError, match=message) as caught:
        compute.prepare_to_compile(Engine(compile=True, gpus=gpus))
    assert caught.value.exit_code == 3
    assert "engine.compile" in str(caught.value)


# ---- with torch's own compiler

NOTES = '''\
"""Notes what the compiler did."""

import json
import pathlib

import pytorch_lightning as pl


class Notes(pl.Callback):
    def on_train_end(self, trainer, module):
        from torch._dynamo.utils import counters

        found = {"graphs": counters["stats"]["unique_graphs"], **counters["inductor"]}
        pathlib.Path(f"notes-{trainer.global_rank}.json").write_text(json.dumps(found))
'''


@pytest.fixture
def compiled_run(tiny, tmp_path):
    """`compiled_run(override, …)` trains in a process of its own, with the compiler's cache in `tmp_path`; gives the
    outcome, and what the compiler did on rank 0."""
    (tmp_path / "notes.py").write_text(NOTES)

    def run(*overrides):
        words = ("train", tiny, "train.callbacks=[{type: notes.Notes}]", *overrides)
        outcome = real(*words, cwd=tmp_path, limit=600, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), code=0)
        return outcome, json.loads((tmp_path / "notes-0.json").read_text())

    return run


def assert_close(found, expected):
    """The weights of two runs."""
    torch.testing.assert_close(
        weights(found.folder / "last.ckpt"), weights(expected.folder / "last.ckpt"), atol=1e-4, rtol=1e-4
    )


@pytest.mark.slow
def test_a_second_run_finds_what_the_first_has_compiled_and_both_learn_what_eager_mode_does(compiled_run, tmp_path):
    """The graphs come from the cache, in a fresh process; a short batch, validation and test compile nothing."""
    settings = [EPOCHS, "stages=[train, test]"]
    eager, _ = compiled_run(*settings)
    first, made = compiled_run(*settings, "engine.compile=true")
    second, found = compiled_run(*settings, "engine.compile=true")
    assert (made["graphs"], made["fxgraph_cache_miss"]) == (1, 2)  # forwards and backwards
    assert (found["graphs"], found["fxgraph_cache_hit"]) == (1, 2)
    assert "fxgraph_cache_miss" not in found
    assert digest(first.folder / "last.ckpt") == digest(second.folder / "last.ckpt")
    assert_close(first, eager)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_learn_what_eager_mode_does(engine, compiled_run):
    """Under ddp with one graph of network and losses, or as many as its buckets; under fsdp the network is compiled."""
    settings = [EPOCHS, f"engine={{backend: {engine}, processes: 2}}", "data.batch_size=8"]
    eager, _ = compiled_run(*settings)
    done, made = compiled_run(*settings, "engine.compile=true")
    assert made["graphs"] >= 1
    assert_close(done, eager)
