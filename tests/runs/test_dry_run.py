"""A dry run finds parts of a config that do not fit together, without data: `deeplightning.dry_run.try_config`."""

import re
from pathlib import Path

import pytest
from commands import python

from deeplightning.config.examine import load_config
from deeplightning.dry_run.try_config import dry_run
from deeplightning.faults import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/*/*.yaml")])

OF_DEVICES = re.compile("tried in one process on the CPU only|processes on the CPU could not be tried")
"""Note without the plug-in, or with it in a process that has computed gradients, as other tests here do."""

GOOD = """\
seed: 7
stages: [train, test]
data:
  module: {type: deeplightning.data.digits.Digits}
  root: nowhere
  batch_size: 16
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1, image_size: 8}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.05, momentum: 0.9}}
  scheduler: {type: torch.optim.lr_scheduler.StepLR, params: {step_size: 3}, call: {interval: epoch, frequency: 2}}
  loss: {type: torch.nn.CrossEntropyLoss}
  metrics: {acc: {type: deeplightning.task.metrics.Accuracy}}
train: {num_epochs: 2, checkpoint: {monitor: val_acc, mode: max}}
"""

OWN = '''\
"""A user's own code, with faults."""

import urllib.request

import pytorch_lightning as pl
import torch
from torch import nn

from deeplightning.config.target import build
from deeplightning.data.digits import Digits
from deeplightning.task.img_classif import ImageClassification


class Plateau(ImageClassification):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}


class Idle(ImageClassification):
    def configure_optimizers(self):
        return None


class Last(ImageClassification):
    def on_train_epoch_end(self):
        return 1 / 0


class Renamed(Digits):
    def example_batch(self, size):
        return {"pixels": super().example_batch(size)["image"]}


class Exampleless(Digits):
    def example_batch(self, size):
        raise KeyError("shape")


class Loads(ImageClassification):
    def train_dataloader(self):
        raise AssertionError("a dry run reads no data")


class Raises(ImageClassification):
    def training_step(self, batch, batch_idx):
        return self.cfg.no_such_section


class Refuses(ImageClassification):
    def __init__(self, cfg):
        raise KeyError("vocabulary")


class Misspelt(pl.LightningModule):
    def __init__(self, cfg):
        super().__init__()

    def trainingstep(self, batch, batch_idx):
        return None


class Detached(ImageClassification):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).detach()


class Lossless(ImageClassification):
    def training_step(self, batch, batch_idx):
        return None


class Manual(ImageClassification):
    """Steps two optimizers itself; its source does not show that it switches automatic optimization off."""

    def __init__(self, cfg):
        super().__init__(cfg)
        setattr(self, "automatic_" + "optimization", False)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [build(self.cfg.model.optimizer, [p]) for p in self.network.parameters()]


class NoNumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 10)
        self.second = nn.Linear(10, 10)

    def forward(self, images):
        return self.second(self.first(images.flatten(1)).sub(1e30).exp().log())


class Unused(nn.Module):
    """Has an unused layer."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, images):
        return self.used(images.flatten(1))


class Floats(nn.Module):
    def forward(self, images):
        return images / 255


class Fetched(nn.Sequential):
    """Downloads its weights."""

    def __init__(self, weights=None):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        if weights is not None:
            urllib.request.urlopen("https://example.org")


class Secret(nn.Module):
    """Has its password in its error message."""

    def __init__(self, word):
        super().__init__()
        self.word = word

    def forward(self, logits, labels):
        raise RuntimeError(f"the server refused {self.word}")


class Bare(pl.LightningDataModule):
    """Has no `example_batch`."""

    def __init__(self, cfg):
        super().__init__()


class Waits(pl.Callback):
    """Monitors a metric, and logs one whose name is known only at run time."""

    def __init__(self, monitor=None):
        self.monitor = {None: None, "val_luck": "val_luck", "val_f2": "val_f2"}[monitor]

    def on_validation_epoch_end(self, trainer, module):
        for name in ("luck",):
            module.log(f"val_{name}", 1.0)


class Refusing(torch.optim.SGD):
    def __init__(self, params, lr):
        raise ValueError("it refuses this rate")
'''


@pytest.fixture(autouse=True)
def here(here, monkeypatch):
    """A working directory with user code, in which no file may appear; reading the data fails."""
    monkeypatch.setattr("sklearn.datasets.load_digits", lambda: pytest.fail("the data were read"))
    (here / "own.py").write_text(OWN)
    (here / "good.yaml").write_text(GOOD)
    yield here
    assert {path.name for path in here.iterdir()} <= {"own.py", "good.yaml", "__pycache__"}


REFUSED = "model.optimizer={type: own.Refusing, params: {lr: 0.1}}"


def tried(*overrides: str, path: str | Path = "good.yaml") -> tuple[list[str], list[str]]:
    """Return `key: message` of each fault, and of each note about what was not tried."""
    try:
        cfg = load_config(path, list(overrides))
    except ConfigError as error:  # found without a dry run
        return [f"{fault.key}: {fault.message}" for fault in error.faults], []
    faults, untried = dry_run(cfg)
    return [f"{fault.key}: {fault.message}" for fault in faults], [f"{note.key}: {note.message}" for note in untried]


def test_a_right_config_has_no_faults():
    """The config that the other tests change has no faults, also with options of loader processes, which are unused."""
    assert tried() == ([], [])
    loader = "data.loader={prefetch_factor: 2, persistent_workers: true, multiprocessing_context: fork}"
    assert tried("data.num_workers=1", loader)[0] == []


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The tables of the example; its configs take their columns from the data."""
    folder = tmp_path_factory.mktemp("tables")
    python(ROOT / "examples" / "tables" / "write.py", folder).check_returncode()
    return folder


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=str(path.relative_to(ROOT)), marks=[pytest.mark.slow] * ("examples" in path.parts))
        for path in CONFIGS
    ],
)
def test_a_shipped_config_has_no_faults(path, request):
    """A shipped config passes a dry run without its data; only `tables` needs them, for the sizes of its network."""
    own = [f"data.root={request.getfixturevalue('tables')}"] if path.parent.name == "tables" else []
    faults, untried = tried("engine.gpus=null", *own, path=path)
    assert faults == []
    notes = [note for note in untried if not OF_DEVICES.search(note)]
    assert [note.partition(":")[0] for note in notes] == ["data.module"] * ("folder" in path.name)


MISSPELT = ["model.module.type=own.Misspelt", "train.checkpoint.monitor=null"]
OPEN = "train.callbacks=[{type: own.Waits}]"  # otherwise monitored names are checked before anything is imported
METRIC = "model.metrics.x={{type: torchmetrics.{}, params: {{{}}}}}"
LOSS = "model.loss={{type: {}, params: {{{}}}}}"
SCHEDULER = "model.scheduler={{type: torch.optim.lr_scheduler.{}, params: {{{}}}, call: {{{}}}}}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # data → network
        (
            ["model.network.params.num_channels=3"],
            "model.network: deeplightning.model.cnn.SimpleCNN does not take the data's pictures (1, 1, 8, 8): Given",
        ),
        (["data.module.params.image_size=16"], "give it image_size: [16, 16]"),
        # network → classes → loss
        (
            ["model.network.params.num_classes=7"],
            "model.network: the data has 10 classes (labels 0 to 9), the network 7 outputs; set "
            "model.network.params.num_classes=10",
        ),
        (
            [LOSS.format("torch.nn.MSELoss", "")],
            "model.loss: torch.nn.MSELoss given input float32 (5, 10), target int64 (5,) fails in the training step: "
            "UserWarning: Using a target size (torch.Size([5])) that is different to the input size",
        ),
        ([LOSS.format("torch.nn.CrossEntropyLoss", "reduction: none")], "model.loss: gives (5,), not a tensor of one"),
        ([LOSS.format("torch.nn.CrossEntropyLoss", "reduction: average")], "model.loss: torch.nn.CrossEntropyLoss"),
        (["model.network={type: own.NoNumber}"], "model.loss: the loss of the first training step is nan"),
        (["model.module.type=own.Detached"], "model.loss: the loss depends on no trainable parameter"),
        # trainable parameters
        (["model.trainable=[attention]"], "model.trainable: no parameter's name matches 'attention'; there are feat"),
        (
            ["model.optimizer.groups=[{match: norm, lr: 0.1}]"],
            "model.optimizer.groups: no parameter's name matches 'norm'; there are features.0.weight, features.0.bias",
        ),
        (
            ["model.network={type: own.Unused}", "engine={backend: ddp, processes: 2}"],
            "engine.params.find_unused_parameters: network.idle.weight, network.idle.bias got no gradient, and ddp",
        ),
        (
            ["engine.activation_checkpointing=[Convd2d]"],
            "engine.activation_checkpointing: no module has the name or class Convd2d. Did you mean Conv2d?",
        ),
        # optimizer and schedule
        (["model.optimizer.params.lr=-1.0"], "model.optimizer: torch.optim.SGD refuses its arguments: ValueError: Inv"),
        ([SCHEDULER.format("StepLR", "step_size: 0", "")], "model.scheduler: torch.optim.lr_scheduler.StepLR fails"),
        (
            [SCHEDULER.format("ReduceLROnPlateau", "", "")],
            "model.scheduler.call.monitor: ReduceLROnPlateau needs a metric, for example val_loss",
        ),
        (
            [OPEN, SCHEDULER.format("ReduceLROnPlateau", "mode: min", "monitor: val_los")],
            "model.scheduler.call.monitor: no metric is called 'val_los'; a training and a validation step log lr, ",
        ),
        # metrics
        (
            [METRIC.format("MeanSquaredError", "")],
            "model.metrics.x: torchmetrics.MeanSquaredError given preds float32 (5, 10), target int64 (5,) fails in",
        ),
        (
            [METRIC.format("classification.MulticlassAccuracy", "num_classes: 10, average: none")],
            "model.metrics.x: gives (10,), not one number; see its `average`",
        ),
        # monitored names
        ([OPEN, "train.checkpoint.monitor=val_accuracy"], "train.checkpoint.monitor: no metric is called 'val_accura"),
        ([OPEN, "train.early_stop={metric: test_loss}"], "train.early_stop.metric: no metric is called 'test_loss'"),
        (
            ["train.callbacks=[{type: own.Waits, params: {monitor: val_f2}}]"],
            "train.callbacks.0.params.monitor: no metric is called 'val_f2'",
        ),
        (
            ["train.callbacks=[{type: pytorch_lightning.callbacks.TQDMProgressBar}]"],
            "train.callbacks: Lightning refuses them: Trainer was configured with `enable_progress_bar=False` but",
        ),
        (
            ["train.callbacks=[{type: own.Waits}, {type: own.Waits, params: {monitor: 0.1}}]"],
            "train.callbacks.1: own.Waits cannot be built: KeyError: 0.1 (own.py:",
        ),
        # user-defined tasks
        (["model.module.type=own.Plateau"], "model.module: own.Plateau: `configure_optimizers` must include a monitor"),
        (["model.module.type=own.Refuses"], "model.module: own.Refuses cannot be built: KeyError: 'vocabulary' (own."),
        (MISSPELT, "No `training_step()` method defined"),
        (["model.module.type=own.Idle"], "model.module: own.Idle.configure_optimizers gives no optimizer: nothing"),
        (["model.module.type=own.Last"], "own.Last fails at the end of the epoch: ZeroDivisionError: division by zero"),
        (["model.module.type=own.Lossless"], "own.Lossless.training_step returned no loss"),
        # the data module
        (
            ["data.module.type=own.Renamed"],
            "own.Renamed gives batches of the form dict (pixels: uint8 (5, 1, 8, 8)), and ImageClassification needs",
        ),
        (["data.module.type=own.Exampleless"], "data.module: own.Exampleless.example_batch fails: KeyError: 'shape'"),
        (
            ["data.module.params.augment=[{type: own.Floats}]"],
            "data.module.params.augment: must return uint8 images, not torch.float32",
        ),
        (["data.module.params.image_size=0"], "data.module.params.image_size: must be a whole number of pixels of at"),
    ],
)
def test_what_does_not_fit_is_named(overrides, expected):
    """A fault names the config key, what was found and the next step, without a traceback."""
    found, _ = tried(*overrides)
    assert [note for note in found if expected in note] != [], "\n".join(found)
    assert not any("Traceback" in note for note in found)


def test_steps_after_the_first_fault_are_skipped():
    """The dry run ends at the first step that fails, and a note says that the others were not tried."""
    found, untried = tried("model.network.params.num_channels=3", REFUSED)
    assert [note.partition(": ")[0] for note in found] == ["model.network"]
    assert untried == ["None: the steps after the first fault were not tried"]


def test_a_fault_has_the_place_of_what_it_names(here):
    """A fault has the line of the config, and its message has the line of the user's code."""
    (fault,), _ = dry_run(load_config("good.yaml", ["model.module.type=own.Raises"]))
    assert fault.place == "override model.module.type=own.Raises"
    line = OWN.splitlines().index("        return self.cfg.no_such_section") + 1
    assert fault.message.endswith(f"(own.py:{line})")
    (here / "good.yaml").write_text(GOOD.replace("num_classes: 10", "num_classes: 7"))
    (fault,), _ = dry_run(load_config("good.yaml"))
    assert (fault.key, fault.place) == ("model.network", "good.yaml:9:13")


def test_nothing_is_read_written_or_changed(here):
    """A dry run writes no file, not even in the run's output folder, and does not change the config."""
    outside = here.parent / "outside"
    outside.mkdir()
    cfg = load_config(
        "good.yaml",
        [
            f"logger.params={{tracking_uri: '{outside}/mlruns'}}",
            "train.callbacks=[{type: pytorch_lightning.callbacks.ModelCheckpoint, params: {monitor: val_acc}},"
            "{type: pytorch_lightning.callbacks.LearningRateMonitor}]",
            "engine={backend: ddp, processes: 2, compile: true}",
        ],
    )
    before = cfg.to_dict()
    faults, untried = dry_run(cfg)
    notes = [str(note) for note in untried if not OF_DEVICES.search(str(note))]
    assert (faults, notes) == ([], ["engine.compile: a dry run does not compile"])
    assert cfg.to_dict() == before
    assert list(outside.iterdir()) == []


def test_a_task_may_step_its_optimizers_itself():
    """Manual optimization passes; settings that apply only to automatic optimization are refused."""
    manual = ["model.module.type=own.Manual", "~model.scheduler", "train.checkpoint.monitor=val_loss"]
    assert tried(*manual) == ([], [])
    found, _ = tried(*manual, "train.gradient_clip={value: 1.0}")
    assert "Automatic gradient clipping is not supported for manual optimization" in found[0]


def test_without_an_example_everything_is_built():
    """A data module without `example_batch` is reported; building the other parts still finds their faults."""
    bare = "data.module.type=own.Bare"
    note = "data.module: own.Bare offers no example_batch(size), so no step was tried; "
    note += "`deeplightning train … train.fast=true` runs one batch of its own loaders"
    assert tried(bare) == ([], [note])
    found, untried = tried(bare, REFUSED)
    assert [fault.partition(": ")[0] for fault in found] == ["model.optimizer"]
    assert note in untried


def test_classes_of_a_folder_are_its_folders(here):
    """The class count comes from the folders if the data exist; no picture is opened."""
    path = ROOT / "configs" / "image_folder.yaml"
    root = here.parent / "pictures"
    for name in ("cat", "dog", "owl"):
        (root / name).mkdir(parents=True)
    settings = [f"data.root={root}", "engine.gpus=null"]
    (fault,), _ = tried(*settings, path=path)
    assert "the data has 3 classes (labels 0 to 2), the network 10 outputs" in fault
    assert tried(*settings, "model.network.params.num_classes=3", path=path) == ([], [])


@pytest.mark.parametrize("precision", [16, 64, "16-true"])
def test_a_precision_of_gpus_is_tried_as_the_cpu_can(precision):
    """A CPU config is tried as it is; half precision of a GPU is tried as bf16, with a note."""
    cfg = load_config("good.yaml", [f"engine.precision={precision}"])
    assert dry_run(cfg) == ([], [])
    cfg.engine.gpus, cfg.engine.precision = [0], precision
    faults, untried = dry_run(cfg)
    half = {16: "bf16-mixed", "16-true": "bf16-true"}.get(precision)
    assert faults == []
    notes = [note.message for note in untried if not OF_DEVICES.search(note.message)]
    assert notes == ([f"{precision} needs a GPU; {half} was tried instead"] if half else [])


def test_weights_are_not_downloaded():
    """A pretrained network whose weights are not on the machine is tried with random ones, with a note."""
    found, untried = tried("model.network={type: own.Fetched, params: {weights: DEFAULT}}")
    assert "model.network.params.weights: these weights are not on this machine yet; random ones were tried" in untried
    assert found == []


def test_what_the_environment_gave_is_not_shown(monkeypatch):
    """A fault's message contains no value of an environment variable."""
    monkeypatch.setenv("WORD", "s3cret-w0rd")
    found, _ = tried("model.loss={type: own.Secret, params: {word: '${oc.env:WORD}'}}")
    assert "model.loss: own.Secret" in found[0]
    assert "s3cret" not in found[0]


def test_an_example_is_a_batch_as_loaders_give_it():
    """`example_batch` has the types and shapes of a loader's batch, with labels from the first class to the last; a
    missing folder has one class."""
    import torch

    from deeplightning.run.assemble import init_module

    for name, shape, last in (
        ("digits.Digits", (7, 1, 20, 10), 9),
        ("mnist.MNIST", (7, 1, 20, 10), 9),
        ("cifar.CIFAR10", (7, 3, 20, 10), 9),
        ("image_folder.ImageFolder", (7, 3, 20, 10), 0),
    ):
        module = f"data.module={{type: deeplightning.data.{name}, params: {{image_size: [20, 10]}}}}"
        batch = init_module(load_config("good.yaml", [module]), "data").example_batch(7)
        dtypes = {"image": torch.uint8, "label": torch.int64, "index": torch.int64}
        assert {key: value.dtype for key, value in batch.items()} == dtypes
        assert batch["image"].shape == shape
        assert (batch["label"][0], batch["label"].max(), len(batch["index"])) == (0, last, 7)


def test_a_task_with_its_own_loaders_is_built():
    """A task with its own loaders is built; its data are not read, and no step is tried."""
    found, untried = tried("~data", "model.module.type=own.Loads")
    assert found == []
    assert not any("NoneType" in note for note in untried)
    assert any("so no step was tried" in note for note in untried)
