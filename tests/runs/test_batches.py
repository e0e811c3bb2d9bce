"""Built-in tasks accept batches in every form that torch's loaders yield, or refuse them with one error."""

import collections
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from conftest import weights as checkpoint_weights
from torch.utils.data import DataLoader, Dataset, TensorDataset

from deeplightning import transfer
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

LINEAR = "{{type: torch.nn.Linear, params: {{in_features: 3, out_features: {}}}}}"
CONVOLUTION = "{type: torch.nn.Conv2d, params: {in_channels: 1, out_channels: 2, kernel_size: 1}}"
TASKS: dict[str, tuple[str, str, str, str]] = {  # task, network, loss, and the names of the columns
    "classification": ("classif.Classification", LINEAR.format(2), "CrossEntropyLoss", "input label"),
    "regression": ("regression.Regression", LINEAR.format(1), "MSELoss", "input target"),
    "multilabel": ("multilabel.Multilabel", LINEAR.format(2), "BCEWithLogitsLoss", "input label"),
    "segmentation": ("segmentation.Segmentation", CONVOLUTION, "CrossEntropyLoss", "image mask"),
    "text": ("text_classif.TextClassification", "{type: own.Words}", "CrossEntropyLoss", "tokens label"),
}


def columns(kind: str) -> list[torch.Tensor]:
    """Return inputs and ground truth for a task."""
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
    """A data module without any code of Deep Lightning; with the size None its dataset consists of batches."""

    def __init__(self, dataset: Any, size: int | None = 8):
        super().__init__()
        self.set, self.size = dataset, size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.set, self.size)

    val_dataloader = train_dataloader


@pytest.fixture
def learn(fit):
    """`learn(kind, data)` trains a built-in task for one epoch and returns a Fitted."""

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
    """Tuples, named tuples (in any order with the names of the columns) and mappings give the same weights."""
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
    """A checkpoint has the shape of arrays and of images from 0 to 1; classes are named by their numbers."""
    inputs, truth = columns(kind)
    given = TensorDataset(inputs.sigmoid() if kind == "segmentation" else inputs, truth)
    trained = learn(kind, lambda cfg: Loaders(given))
    fresh = type(trained.task)(trained.task.cfg)
    fresh.on_load_checkpoint(torch.load(trained.folder / "last.ckpt", weights_only=True))
    assert (fresh.image_spec if kind == "segmentation" else fresh.row_spec) == spec
    assert fresh.class_names == names


def test_pixels_of_8_bits_are_divided_by_255(learn):
    """uint8 images are scaled as by torchvision's ToTensor, and the run can be served."""
    inputs, mask = columns("segmentation")
    pixels = (inputs.sigmoid() * 255).byte()
    data = {"as pixels": pixels, "as floats": pixels / 255}
    found = {name: learn("segmentation", lambda cfg, x=x: Loaders(TensorDataset(x, mask))) for name, x in data.items()}
    torch.testing.assert_close(weights(found["as pixels"]), weights(found["as floats"]), rtol=0, atol=0)
    assert found["as pixels"].task.image_spec == ImageSpec(4, 4, "L")
    assert is_servable(found["as pixels"].task)


def test_pixels_of_8_bits_that_are_no_pictures_are_refused(learn):
    """A uint8 batch with two channels is an error, since no `image_spec` describes it."""
    given = TensorDataset(torch.zeros(24, 2, 4, 4).byte(), columns("segmentation")[1])
    words = r"uint8 batches \(8, 2, 4, 4\), and its data module no `image_spec`; pictures"
    with pytest.raises(MisfitError, match=words):
        learn("segmentation", lambda cfg: Loaders(given))


def test_pictures_of_several_sizes_are_validated(learn):
    """Batches may differ in image size; the sheet of the worst images has those of the first batch's size."""
    inputs, mask = columns("segmentation")
    image, mask = inputs[:8].sigmoid().repeat(1, 1, 2, 2), mask[:8].repeat(1, 2, 2)
    learned = learn(
        "segmentation", lambda cfg: Loaders([(image[..., :n, :n], mask[..., :n, :n]) for n in (4, 4, 6)], None)
    )
    assert len(learned.series("val_iou")) == 1
    assert learned.task.pictures("val")["val_segmentation"]
    assert not is_servable(learned.task)


def test_normalised_pictures_are_trained_and_not_served(learn):
    """A run of normalised images has no `image_spec` and cannot be served: the normalisation is unknown."""
    trained = learn("segmentation", lambda cfg: Loaders(TensorDataset(*columns("segmentation"))))
    assert trained.task.image_spec is None
    assert not is_servable(trained.task)


def test_arrays_of_several_shapes_are_not_served(learn):
    """A task is not servable any more after the first batch of another shape."""
    task = learn("classification", lambda cfg: Loaders(TensorDataset(*columns("classification")))).task
    assert is_servable(task)
    for size in (5, 3):
        task.infer_spec(torch.zeros(2, size), torch.zeros(2, 2))
        assert not is_servable(task)


def test_datasets_of_pairs_get_an_index_for_a_task_of_ours_only(learn):
    """`OfDatasets` names the parts of a pair and adds row positions for a built-in task only."""
    given = columns("classification")
    trained = learn("classification", lambda cfg: OfDatasets(cfg, *[TensorDataset(*given)] * 3))
    batch = next(iter(trained.data.test_dataloader()))
    assert list(batch) == ["input", "label", "index"]
    assert batch["index"].tolist() == list(range(8))
    trained.data.trainer = None
    plain = next(iter(trained.data.test_dataloader()))
    assert isinstance(plain, list)
    torch.testing.assert_close(plain, [part[:8] for part in given])


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in ("classification", "segmentation"))) for k in TASKS]
)
def test_a_weight_counts_a_sample_as_often(learn, kind):
    """Integer weights, as third part of a tuple or column `weight`, train as if each sample were repeated so often."""
    inputs, truth = columns(kind)
    weight = torch.arange(SAMPLES) % 3  # 0, 1, 2
    often = torch.repeat_interleave(torch.arange(SAMPLES), weight)
    names = [*TASKS[kind][3].split(), "weight"]

    def learn_in_one_batch(*parts, made=lambda *p: p):
        settings = ["data.batch_size=24", "model.optimizer={type: torch.optim.SGD, params: {lr: 0.5}}"]
        return learn(kind, lambda cfg: Loaders(Form(made, *parts), len(parts[0])), *settings)

    repeated = learn_in_one_batch(inputs[often], truth[often])
    tuples = learn_in_one_batch(inputs, truth, weight.float())
    mapped = learn_in_one_batch(inputs, truth, weight, made=lambda *p: dict(zip(names, p, strict=True)))
    for other in (tuples, mapped):
        torch.testing.assert_close(weights(other), weights(repeated))
        assert other.series("val_loss")[0][1] == pytest.approx(repeated.series("val_loss")[0][1], rel=1e-5)


@pytest.mark.parametrize("loss", [MSE, f"{{a: {MSE}, b: {{type: torch.nn.L1Loss, weight: 0.5}}}}"])
def test_accumulated_batches_weigh_what_their_samples_weigh(learn, loss):
    """Three batches of 8 give the gradient of one batch of 24, although the sums of their weights differ."""
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
    """A loss that cannot weigh samples, and weights of another shape or below zero, are errors."""
    dataset = TensorDataset(*columns("classification"), weight)
    with pytest.raises(error, match=words):
        learn("classification", lambda cfg: Loaders(dataset), f"model.loss={loss}")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda x, y: (x, y, y, y), r"list \(float32 \(8, 3\), int64 \(8,\), int64 \(8,\), int64 \(8,\)\)"),
        (lambda x, y: {"x": x, "y": y}, r"dict \(x: float32 \(8, 3\), y: int64 \(8,\)\)"),
        (lambda x, y: ((x, x), y), r"list \(list \(float32 \(8, 3\), float32 \(8, 3\)\), int64 \(8,\)\)"),
        (lambda x, y: x, r"float32 \(8, 3\)"),
        (lambda x, y: {"input": x, "target": y}, r"dict \(input: .*\), and .* array's dtype, makes it a number or a"),
        (lambda x, y: {"input": x, "label": "cat"}, r"dict \(input: float32 \(8, 3\), label: list of 8 str\)"),
    ],
)
def test_a_batch_of_another_form_is_described(learn, form, words):
    """One error names the user's data module, describes the batch, and says what is expected."""
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
    """Batches of 2 * `parts` tensors."""

    def __init__(self, cfg, parts):
        super().__init__()
        self.size, self.set = cfg.data.batch_size, TensorDataset(*[torch.ones(40, 2), torch.ones(40).long()] * parts)

    def train_dataloader(self):
        return DataLoader(self.set, self.size)

    val_dataloader = train_dataloader


def weighted(cfg):
    """Triples of inputs, label and weight; 35 samples end with a short batch."""
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
    """Two processes with batches of 4 learn the same as one with batches of 8, although sums of weights differ."""
    data = "data.module={type: parts.weighted}"
    one = command("train", "c.yaml", data, cwd=here, code=0)
    two = command("train", "c.yaml", data, "data.batch_size=4", "engine.processes=2", cwd=here, ranks=2, code=0)
    first, second = (checkpoint_weights(each.folder / "last.ckpt") for each in (one, two))
    for name in ("network.weight", "network.bias"):
        torch.testing.assert_close(second[name], first[name], rtol=1e-5, atol=1e-6)


def test_a_data_module_of_pairs_is_checked_and_trained(command, here):
    """`check --dry-run` accepts what `train` accepts, and reports the same error, exit code 2, for a wrong batch."""
    for verb in (("check", "--dry-run"), ("train",)):
        good = command(*verb, "c.yaml", cwd=here)
        assert (good.code, "unchecked" in good.err) == (0, False), good
        bad = command(*verb, "c.yaml", "data.module.params.parts=2", cwd=here, code=2)
        (note,) = [line for line in bad.err.splitlines() if "parts.Parts" in line]
        assert "parts.Parts gives batches of the form list (float32 (8, 2), int64 (8,), float32" in note
        assert "a tuple (input, label) or (input, label, weight)" in note
        assert "Traceback" not in bad.err


def test_masks_are_drawn_over_floats_of_any_channels(learn):
    """The sheet of masks is drawn over images of one to four channels in half precision."""
    task = learn("segmentation", lambda cfg: Loaders(TensorDataset(*columns("segmentation")))).task
    zeros = torch.zeros(2, 4, 4, dtype=torch.int64)
    for channels in (1, 2, 3, 4):
        image = torch.rand(2, channels, 4, 4).bfloat16()
        task._sheet = {"image": image, "truth": zeros, "answered": zeros, "worth": torch.zeros(2)}
        assert drawn(task.pictures("val")["val_segmentation"]), channels


def test_padding_rows_are_dropped_with_columns_of_other_types(learn):
    """Padding rows are dropped from lists as from tensors; columns of other types are ignored."""
    inputs, target = columns("regression")
    task = learn("regression", lambda cfg: Loaders(TensorDataset(inputs, target))).task
    batch = {"input": inputs[:4], "target": target[:4], "index": torch.tensor([0, 1, -1, -1])}
    found = task._evaluate("test", batch | {"name": list("abcd"), "meta": {"id": torch.arange(4)}})
    assert found["index"].tolist() == [0, 1]


def test_a_data_module_without_a_spec_names_its_classes(learn):
    """`class_names` name the answers, also if the spec of the pictures is inferred; an array is accepted."""
    inputs, mask = columns("segmentation")

    def data(cfg):
        made = Loaders(TensorDataset(inputs.sigmoid(), mask))
        made.class_names = np.array(["field", "road"])
        return made

    trained = learn("segmentation", data)
    saved = torch.load(trained.folder / "last.ckpt", weights_only=True)["image_segmentation"]
    assert (trained.task.class_names, saved["class_names"]) == (["field", "road"],) * 2


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("kind", ["classification", "multilabel"])
def test_classes_of_a_training_without_validation_are_numbers(learn, kind):
    """A bundle needs their names, and no validation has counted them."""

    class Unjudged(Loaders):
        val_dataloader = pl.LightningDataModule.val_dataloader
        array_spec = ArraySpec((3,))

    trained = learn(kind, lambda cfg: Unjudged(TensorDataset(*columns(kind))), "train.checkpoint.monitor=null")
    assert torch.load(trained.folder / "last.ckpt", weights_only=True)[kind]["class_names"] == ["0", "1"]


def test_a_checkpoint_of_other_classes_is_refused(learn):
    """The network's outputs would be taken for other classes."""
    inputs, mask = columns("segmentation")
    task = learn("segmentation", lambda cfg: Loaders(TensorDataset((inputs.sigmoid() * 255).byte(), mask))).task
    task.class_names = ["dog", "wolf"]
    for accepted in (["dog", "wolf"], ["0", "1"], []):
        task.arrives({"image_spec": task.image_spec.to_dict(), "class_names": accepted})
    with pytest.raises(MisfitError, match="trained with the classes cat, dog"):
        task.arrives({"image_spec": task.image_spec.to_dict(), "class_names": ["cat", "dog"]})


def test_masks_of_floats_are_refused(learn):
    """ToTensor divides masks by 255; cut to whole numbers, all classes would be 0 and ignored pixels class 1."""
    inputs, mask = columns("segmentation")
    with pytest.raises(LabelError, match=r"the masks are torch.float32, not whole numbers"):
        learn("segmentation", lambda cfg: Loaders(TensorDataset(inputs, mask / 255)))


class Shifted(TensorDataset):
    """Its `labels` start at 1, those of its samples at 0."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.labels = parts[1] + 1


def test_a_gpu_checks_the_labels_of_the_batches_of_a_users_set(learn, monkeypatch):
    """An attribute `labels` of the dataset may have another meaning."""
    monkeypatch.setattr(transfer, "is_asynchronous", lambda device: True)
    fitted = learn("classification", lambda cfg: Loaders(Shifted(*columns("classification"))))
    assert fitted.series("val_loss")


def test_a_restored_spec_is_where_the_task_is(learn):
    """Engines that shard restore a checkpoint after the task has got its device and precision."""
    inputs, mask = columns("segmentation")
    task = learn("segmentation", lambda cfg: Loaders(TensorDataset((inputs.sigmoid() * 255).byte(), mask))).task
    saved = task.travels()
    task.image_spec = task.normalise = None
    task.to("meta", torch.bfloat16)
    task.arrives(saved)
    assert {(buffer.device.type, buffer.dtype) for buffer in task.normalise.buffers()} == {("meta", torch.bfloat16)}
