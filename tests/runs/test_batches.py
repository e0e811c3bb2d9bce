"""Batches in every form that torch's loaders give, with the built-in tasks: same weights, or one note."""

import collections
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from conftest import weights as checkpoint_weights
from torch.utils.data import DataLoader, Dataset, TensorDataset

from deeplightning.array_spec import ArraySpec
from deeplightning.data.of_datasets import OfDatasets
from deeplightning.figures.style import drawn
from deeplightning.image_spec import ImageSpec
from deeplightning.run.make_bundle import is_servable
from deeplightning.task.networks import LabelError, MisfitError

SAMPLES = 24
MSE = "{type: torch.nn.MSELoss}"
Pair = collections.namedtuple("Pair", "x y")
Named = collections.namedtuple("Named", "label input")

TASKS: dict[str, tuple[str, str, str, str]] = {  # task, network, loss, and the names of the columns
    "classification": ("classif.Classification", "{type: torch.nn.Linear, params: {in_features: 3, out_features: 2}}",
                       "CrossEntropyLoss", "input label"),
    "regression": ("regression.Regression", "{type: torch.nn.Linear, params: {in_features: 3, out_features: 1}}",
                   "MSELoss", "input target"),
    "multilabel": ("multilabel.Multilabel", "{type: torch.nn.Linear, params: {in_features: 3, out_features: 2}}",
                   "BCEWithLogitsLoss", "input label"),
    "segmentation": ("segmentation.Segmentation",
                     "{type: torch.nn.Conv2d, params: {in_channels: 1, out_channels: 2, kernel_size: 1}}",
                     "CrossEntropyLoss", "image mask"),
    "text": ("text_classif.TextClassification", "{type: own.Words}", "CrossEntropyLoss", "tokens label"),
}  # fmt: skip


def columns(kind: str) -> list[torch.Tensor]:
    """Inputs and truth for a task."""
    random = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, *((1, 4, 4) if kind == "segmentation" else (3,)), generator=random)
    positive = (inputs > 0).long()
    if kind == "text":
        return [positive, positive[:, 0]]
    truth = {
        "classification": positive[:, 0],
        "regression": inputs[:, 0] * 2,
        "multilabel": positive[:, :2],
        "segmentation": positive[:, 0].byte(),
    }
    return [inputs, truth[kind]]


class Form(Dataset):
    """The same samples in another form."""

    def __init__(self, made: Any, *parts: torch.Tensor):
        self.made, self.parts = made, parts

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, index: int) -> Any:
        return self.made(*(part[index] for part in self.parts))


class Loaders(pl.LightningDataModule):
    """A data module that knows nothing of Deep Lightning."""

    def __init__(self, dataset: Dataset, size: int = 8):
        super().__init__()
        self.set, self.size = dataset, size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.set, self.size)

    val_dataloader = train_dataloader


class Batches(pl.LightningDataModule):
    """Batches that are made already."""

    def __init__(self, batches: list[Any]):
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)

    val_dataloader = train_dataloader


@pytest.fixture
def learn(fit):
    """`learn(kind, data)` trains a built-in task for an epoch, and gives a Fitted."""

    def run(kind: str, data: Any, *overrides: str, task: Any = None) -> Any:
        name, network, loss, _ = TASKS[kind]
        return fit(
            f"model.module.type=deeplightning.task.{name}", f"model.network={network}", "train.num_epochs=1",
            f"model.loss={{type: torch.nn.{loss}}}", "data.batch_size=8", *overrides, task=task, data=data,
        )  # fmt: skip

    return run


def weights(fitted: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in fitted.task.network.parameters()])


@pytest.mark.parametrize("kind", TASKS)
def test_a_pair_is_inputs_and_truth(learn, kind):
    """Tuples and named tuples train each built-in task to the weights that a mapping gives; a named tuple with the
    names of the columns may have any order."""
    given, names = columns(kind), TASKS[kind][3].split()
    forms = [lambda x, y: dict(zip(names, (x, y), strict=True)), lambda x, y: (x, y), Pair]
    if kind == "classification":
        forms.append(lambda x, y: Named(y, x))
    mapped, *others = (learn(kind, lambda cfg, form=form: Loaders(Form(form, *given))) for form in forms)
    for other in others:
        torch.testing.assert_close(weights(other), weights(mapped), rtol=0, atol=0)
        assert other.series("val_loss") == mapped.series("val_loss")


@pytest.mark.parametrize(
    ("kind", "spec", "names"),
    [
        ("classification", ArraySpec((3,)), ["0", "1"]),
        ("regression", ArraySpec((3,)), ["target"]),
        ("multilabel", ArraySpec((3,)), ["0", "1"]),
        ("segmentation", ImageSpec(4, 4, "L"), ["0", "1"]),
    ],
)
def test_a_checkpoint_has_the_shape_of_inputs_that_the_data_module_does_not_describe(learn, kind, spec, names):
    """Of arrays, and of pictures from 0 to 1; outputs are named by their numbers."""
    inputs, truth = columns(kind)
    given = TensorDataset(inputs.sigmoid() if kind == "segmentation" else inputs, truth)
    trained = learn(kind, lambda cfg: Loaders(given))
    fresh = type(trained.task)(trained.task.cfg)
    fresh.on_load_checkpoint(torch.load(trained.folder / "last.ckpt", weights_only=True))
    assert (fresh.image_spec if kind == "segmentation" else fresh.row_spec) == spec
    assert fresh.class_names == names


def test_pixels_of_8_bits_are_divided_by_255(learn):
    """Like torchvision's ToTensor does; the run has a bundle."""
    inputs, mask = columns("segmentation")
    pixels = (inputs.sigmoid() * 255).byte()
    data = {"as pixels": pixels, "as floats": pixels / 255}
    found = {name: learn("segmentation", lambda cfg, x=x: Loaders(TensorDataset(x, mask))) for name, x in data.items()}
    torch.testing.assert_close(weights(found["as pixels"]), weights(found["as floats"]), rtol=0, atol=0)
    assert found["as pixels"].task.image_spec == ImageSpec(4, 4, "L")
    assert is_servable(found["as pixels"].task)


def test_pixels_of_8_bits_that_are_no_pictures_are_refused(learn):
    given = TensorDataset(torch.zeros(24, 2, 4, 4).byte(), columns("segmentation")[1])
    with pytest.raises(
        MisfitError, match=r"uint8 batches \(8, 2, 4, 4\), and its data module no `image_spec`; pictures"
    ):
        learn("segmentation", lambda cfg: Loaders(given))


def test_pictures_of_several_sizes_are_validated(learn):
    """Each batch has one size; the sheet of the worst pictures has those of the first batch's."""
    inputs, mask = columns("segmentation")
    sizes = [4, 4, 6]
    batches = [
        (inputs[:8].sigmoid().repeat(1, 1, 2, 2)[..., :n, :n], mask[:8].repeat(1, 2, 2)[..., :n, :n]) for n in sizes
    ]
    learned = learn("segmentation", lambda cfg: Batches(batches))
    assert len(learned.series("val_iou")) == 1
    assert learned.task.pictures("val")["val_segmentation"]
    assert not is_servable(learned.task)


def test_normalised_pictures_are_trained_and_not_served(learn):
    """How they were normalised is not known."""
    trained = learn("segmentation", lambda cfg: Loaders(TensorDataset(*columns("segmentation"))))
    assert trained.task.image_spec is None
    assert not is_servable(trained.task)


def test_arrays_of_several_shapes_are_not_served(learn):
    """From the first batch that differs on."""
    task = learn("classification", lambda cfg: Loaders(TensorDataset(*columns("classification")))).task
    assert is_servable(task)
    for size in (5, 3):
        task.infer_spec(torch.zeros(2, size), torch.zeros(2, 2))
        assert not is_servable(task)


def test_datasets_of_pairs_get_an_index_for_a_task_of_ours_only(learn):
    """`OfDatasets` names the parts of a pair for a built-in task, with the position of each row; another task gets what
    the dataset gives."""
    given = columns("classification")
    trained = learn("classification", lambda cfg: OfDatasets(cfg, *[TensorDataset(*given)] * 3))
    batch = next(iter(trained.data.test_dataloader()))
    assert list(batch) == ["input", "label", "index"]
    assert batch["index"].tolist() == list(range(8))
    trained.data.trainer = None
    plain = next(iter(trained.data.test_dataloader()))
    assert isinstance(plain, list)
    torch.testing.assert_close(plain, [part[:8] for part in given])


# ---- weights of samples


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in ("classification", "segmentation"))) for k in TASKS]
)
def test_a_weight_counts_a_sample_as_often(learn, kind):
    """Whole weights train as if each sample came so often: the third part of a tuple, and the column `weight`."""
    inputs, truth = columns(kind)
    weight = torch.arange(SAMPLES) % 3  # 0, 1, 2
    often = torch.repeat_interleave(torch.arange(SAMPLES), weight)
    one_batch = ["data.batch_size=24", "model.optimizer={type: torch.optim.SGD, params: {lr: 0.5}}"]

    def whole(*parts, made=lambda *p: p):
        return lambda cfg: Loaders(Form(made, *parts), len(parts[0]))

    repeated = learn(kind, whole(inputs[often], truth[often]), *one_batch)
    tuples = learn(kind, whole(inputs, truth, weight.float()), *one_batch)
    names = [*TASKS[kind][3].split(), "weight"]
    mapped = learn(kind, whole(inputs, truth, weight, made=lambda *p: dict(zip(names, p, strict=True))), *one_batch)
    for other in (tuples, mapped):
        torch.testing.assert_close(weights(other), weights(repeated))
        assert other.series("val_loss")[0][1] == pytest.approx(repeated.series("val_loss")[0][1], rel=1e-5)


@pytest.mark.parametrize("loss", [MSE, f"{{a: {MSE}, b: {{type: torch.nn.L1Loss, weight: 0.5}}}}"])
def test_accumulated_batches_weigh_what_their_samples_weigh(learn, loss):
    """Three batches of 8 make the gradient of one of 24, whatever their weights add up to."""
    inputs, truth = columns("regression")
    weight = torch.linspace(0, 3, SAMPLES)
    dataset = TensorDataset(inputs, truth, weight)
    found = [
        learn(
            "regression", lambda cfg: Loaders(dataset, cfg.data.batch_size),
            f"model.loss={loss}", f"data.batch_size={size}", f"train.accumulator_factor={SAMPLES // size}",
        ).seen.gradients
        for size in (8, SAMPLES)
    ]  # fmt: skip
    assert len(found[0]) == len(found[1]) == 1
    torch.testing.assert_close(found[0][0], found[1][0])


@pytest.mark.parametrize(
    ("weight", "loss", "error", "words"),
    [
        (torch.ones(SAMPLES), "{type: torch.nn.MultiMarginLoss}", MisfitError, "MultiMarginLoss cannot weigh samples"),
        (torch.ones(SAMPLES, 2), "{type: torch.nn.CrossEntropyLoss}", MisfitError, r"are float32 \(8, 2\), not float"),
        (-torch.ones(SAMPLES), "{type: torch.nn.CrossEntropyLoss}", LabelError, "is negative or not finite"),
    ],
)
def test_weights_that_cannot_be_used(learn, weight, loss, error, words):
    dataset = TensorDataset(*columns("classification"), weight)
    with pytest.raises(error, match=words):
        learn("classification", lambda cfg: Loaders(dataset), f"model.loss={loss}")


# ---- what cannot be understood


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda x, y: (x, y, y, y), r"list \(float32 \(8, 3\), int64 \(8,\), int64 \(8,\), int64 \(8,\)\)"),
        (lambda x, y: {"x": x, "y": y}, r"dict \(x: float32 \(8, 3\), y: int64 \(8,\)\)"),
        (lambda x, y: ((x, x), y), r"list \(list \(float32 \(8, 3\), float32 \(8, 3\)\), int64 \(8,\)\)"),
        (lambda x, y: x, r"float32 \(8, 3\)"),
        (
            lambda x, y: {"input": x, "target": y},
            r"dict \(input: .*\), and .* or an array's dtype, makes it a number or a",
        ),
        (lambda x, y: {"input": x, "label": "cat"}, r"dict \(input: float32 \(8, 3\), label: list of 8 str\)"),
    ],
)
def test_a_batch_of_another_form_is_described(learn, form, words):
    """One note names the user's data module, shows the batch, and says what is expected."""
    dataset = Form(form, *columns("classification"))
    with pytest.raises(MisfitError, match=f"gives batches of the form {words}") as error:
        learn("classification", lambda cfg: Loaders(dataset))
    assert ", and Classification needs tensors" in str(error.value)


OWN = '''\
import torch
import pytorch_lightning as pl
from torch.utils.data import DataLoader, TensorDataset

from deeplightning.data.of_datasets import OfDatasets


class Parts(pl.LightningDataModule):
    """Batches of as many tensors as asked for."""

    def __init__(self, cfg, parts):
        super().__init__()
        self.size, self.set = cfg.data.batch_size, TensorDataset(*[torch.ones(40, 2), torch.ones(40).long()] * parts)

    def train_dataloader(self):
        return DataLoader(self.set, self.size)

    val_dataloader = train_dataloader


def weighted(cfg):
    """Triples of inputs, label and weight; 35 are no whole number of batches."""
    random = torch.Generator().manual_seed(2)
    x = torch.randn(35, 2, generator=random)
    dataset = TensorDataset(x, (x.sum(1) > 0).long(), 3 * torch.rand(35, generator=random))
    return OfDatasets(cfg, dataset, dataset)
'''
CONFIG = """\
seed: 3
stages: [train]
data: {module: {type: parts.Parts, params: {parts: 1}}, batch_size: 8}
model:
  module: {type: deeplightning.task.classif.Classification}
  network: {type: torch.nn.Linear, params: {in_features: 2, out_features: 2}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.05}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 1, export: false, checkpoint: {monitor: val_loss}}
logger: {params: {tracking_uri: STORE, system_metrics: false}, pictures: null}
"""


@pytest.fixture
def here(store, tmp_path):
    (tmp_path / "parts.py").write_text(OWN)
    (tmp_path / "c.yaml").write_text(CONFIG.replace("STORE", str(store)))
    return tmp_path


def test_two_processes_weigh_samples_as_one_does(command, here):
    """Two processes with batches of 4 learn what one learns with batches of 8, whatever their weights add up to."""
    data = "data.module={type: parts.weighted}"
    one = command("train", "c.yaml", data, cwd=here, code=0)
    two = command("train", "c.yaml", data, "data.batch_size=4", "engine.processes=2", cwd=here, ranks=2, code=0)
    first, second = (checkpoint_weights(each.folder / "last.ckpt") for each in (one, two))
    for name in ("network.weight", "network.bias"):
        torch.testing.assert_close(second[name], first[name], rtol=1e-5, atol=1e-6)


def test_a_data_module_of_pairs_is_checked_and_trained(command, here):
    """`check --dry-run` takes a batch of a data module that holds its data, and finds what `train` refuses: exit code
    2, one note."""
    for verb in (("check", "--dry-run"), ("train",)):
        good = command(*verb, "c.yaml", cwd=here)
        assert (good.code, "unchecked" in good.err) == (0, False), good
        bad = command(*verb, "c.yaml", "data.module.params.parts=2", cwd=here, code=2)
        (note,) = [line for line in bad.err.splitlines() if "parts.Parts" in line]
        assert "parts.Parts gives batches of the form list (float32 (8, 2), int64 (8,), float32" in note
        assert "a tuple (input, label) or (input, label, weight)" in note
        assert "Traceback" not in bad.err


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_masks_are_drawn_over_floats_of_any_channels(learn, channels):
    """Also over those of half precision."""
    task = learn("segmentation", lambda cfg: Loaders(TensorDataset(*columns("segmentation")))).task
    zeros = torch.zeros(2, 4, 4, dtype=torch.int64)
    image = torch.rand(2, channels, 4, 4).bfloat16()
    task._sheet = {"image": image, "truth": zeros, "answered": zeros, "worth": torch.zeros(2)}
    assert drawn(task.pictures("val")["val_segmentation"])


def test_columns_of_other_types_do_not_mind_padding_rows(learn):
    """A list loses the rows that do not count; what is neither a list nor a tensor stays as it is."""
    inputs, target = columns("regression")
    task = learn("regression", lambda cfg: Loaders(TensorDataset(inputs, target))).task
    batch = {"input": inputs[:4], "target": target[:4], "index": torch.tensor([0, 1, -1, -1])}
    found = task._evaluate("test", batch | {"name": list("abcd"), "meta": {"id": torch.arange(4)}})
    assert found["index"].tolist() == [0, 1]
