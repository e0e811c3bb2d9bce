"""An endpoint for a LightningModule of the user, without extra code: answers are those of its forward."""

import functools
import io
import json
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from tiny import csv_rows, write_pairs
from torch import nn

from deeplightning.export.bundle import export
from deeplightning.faults import ConfigError
from deeplightning.image_spec import ImageSpec
from deeplightning.run.own_module import OwnModule, samples_of
from deeplightning.runfolder import RunFolder
from deeplightning.torch_server import Checkpoint
from serve.answers import answers
from serve.app import application
from serve.bundle import Bundle
from serve.limits import Limits
from serve.openapi import describe
from serve.prediction import Service

OWN = """\
class Task(pl.LightningModule):
    def __init__(self, cfg, several=False, noise=0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.several, self.noise, self.kind = several, noise, "perceptron"

    def forward(self, x):
        x = x + self.noise * torch.randn(len(x), 4)
        return (self.layers(x), x) if self.several else self.layers(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
SETTINGS = """\
stages: [train]
train: {num_epochs: 1, checkpoint: {monitor: val_loss}}
"""


@pytest.fixture
def here(tmp_path, store):
    """A working directory with the module and a config."""
    write_pairs(tmp_path, store, OWN, SETTINGS)
    return tmp_path


@pytest.fixture
def train(command, here):
    """`train(override, …)` trains the module."""
    return functools.partial(command, "train", "c.yaml", "logger.pictures=null", cwd=here, code=0)


def test_a_plain_module_is_exported_and_answers_as_its_forward(command, train, here):
    """The export at the end of training, `export` and `predict FILE` of the same run, and a server's session give the
    outputs of the module; the bundle contains golden answers."""
    done = train()
    assert "bundle     " in done.out
    folder = RunFolder(done.folder)
    arrays = np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)
    state = torch.load(folder.best, weights_only=True)["state_dict"]
    layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    layers.load_state_dict({name.removeprefix("layers."): value for name, value in state.items()})
    expected = layers(torch.from_numpy(arrays)).detach().numpy()
    card = json.loads(folder.bundle_card.read_text())
    assert (card["task"], card["labels"]) == ("array_regression", ["output_0", "output_1", "output_2"])
    assert len(card["golden"]["arrays"]) == 16
    np.testing.assert_allclose(Bundle.open(folder.bundle).predict(arrays), expected, rtol=1e-5, atol=1e-6)
    command("export", folder.path, cwd=here, code=0)
    golden = json.loads(folder.bundle_card.read_text())["golden"]
    assert [golden[name] for name in ("arrays", "fp32")] == [card["golden"][name] for name in ("arrays", "fp32")]
    np.save(here / "rows.npy", arrays)
    command("predict", folder.path, "rows.npy", "--out", "rows.csv", cwd=here, code=0)
    found = [[float(row[f"predicted_output_{n}"]) for n in range(3)] for row in csv_rows(here / "rows.csv")]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("param", "code", "message", "remedy"),
    [
        ("several", 2, "pairs.Task cannot be exported: forward gives tuple (", "`example_input_array`"),
        ("noise", 4, "The exported network and the checkpoint give different answers", "must not draw random numbers"),
    ],
)
def test_what_cannot_be_exported_is_one_note(command, train, here, param, code, message, remedy):
    """Training succeeds without a bundle and gives the reason; `export` ends with one error and the remedy."""
    done = train(f"model.module.params.{param}=1")
    assert f"bundle     none: {message}" in done.out, done
    refused = command("export", str(done.folder), cwd=here, code=code)
    (note,) = [line for line in refused.err.splitlines() if message in line]
    assert remedy in note
    assert "Traceback" not in refused.err


# ---- inputs and outputs


class Linear(pl.LightningModule):
    """Flattens its inputs."""

    def __init__(self, inputs: int = 4, outputs: int = 2):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1).float())


class OfStep(pl.LightningModule):
    """Has no forward."""

    def predict_step(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return x.sum((1, 2))


class Takes2(Linear):
    """Takes two tensors; its example has one."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(3, 4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch["a"], batch["b"]


class Tokens(pl.LightningModule):
    """Takes whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


class Doubles(Linear):
    """Has float64 weights, and returns a scalar for a batch of one."""

    def __init__(self) -> None:
        super().__init__(6, 1)
        self.layer = nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1)).squeeze()


class Unpacks(pl.LightningModule):
    """Takes a batch of two parts, which a batch of two samples resembles."""

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, _ = batch
        return x[0, :2]


class Complex(Linear):
    """Returns complex numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(self.layer(x.flatten(1)))


def kept(folder, task, batch, data=None):
    """Return the samples that a run keeps of a batch, and the module that the endpoint uses."""
    samples = samples_of(task, data, batch)
    np.savez(folder.samples, **samples)
    return samples, OwnModule(task, folder)


PIXELS = torch.arange(2 * 3 * 2 * 2, dtype=torch.uint8).view(2, 3, 2, 2)
FLOATS = torch.linspace(-1, 1, 24).view(4, 2, 3)


@pytest.mark.parametrize(
    ("task", "batch", "kind", "names"),
    [
        (Linear(6), (FLOATS, torch.ones(4)), "array_regression", ["output_0", "output_1"]),
        (Linear(6, 1), {"anything": FLOATS, "y": torch.ones(4)}, "array_regression", ["output"]),
        (OfStep(), [FLOATS], "array_regression", ["output"]),
        (Linear(12), (PIXELS, torch.ones(2)), "image_regression", ["output_0", "output_1"]),
        (Tokens(), torch.tensor([[1, 8], [0, 2]]), "array_regression", [f"output_{n}" for n in range(6)]),
        (Takes2(), {"a": torch.ones(3, 7), "b": FLOATS}, "array_regression", ["output_0", "output_1"]),
    ],
)
def test_inputs_are_the_first_part_of_a_batch_or_the_example(tmp_path, task, batch, kind, names):
    """The endpoint takes arrays, integers or pictures, and answers with the flattened outputs of the module."""
    found, own = kept(RunFolder(tmp_path), task, batch)
    assert (own.kind, own.class_names) == (kind, names)
    samples = torch.from_numpy(found["images" if kind.startswith("image") else "arrays"])
    given = samples.long() if isinstance(task, Tokens) else samples
    wanted = task(given) if not isinstance(task, OfStep) else task.predict_step(given, 0)
    torch.testing.assert_close(own.inference_model()(samples), wanted.reshape(len(samples), -1))


def test_a_module_of_64_bits_answers_in_32(tmp_path):
    """float64 weights and inputs become float32, and a batch of one has one answer."""
    task = Doubles()
    wanted = task(FLOATS.double()).detach().float()[:, None]
    _, own = kept(RunFolder(tmp_path), task, (FLOATS.double(), 0))
    model = own.inference_model()
    torch.testing.assert_close(model(FLOATS), wanted)
    torch.testing.assert_close(model(FLOATS[:1]), wanted[:1])


def test_pictures_are_prepared_as_the_data_module_says(tmp_path):
    """With an `image_spec`, the endpoint takes pictures and prepares them as in training; answers have class names."""
    spec = ImageSpec(2, 2, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    scaled = (PIXELS / 255 - torch.tensor(spec.mean).view(-1, 1, 1)) / torch.tensor(spec.std).view(-1, 1, 1)
    task, data = Linear(12), pl.LightningDataModule()
    data.image_spec, data.class_names = spec, ["cat", "dog"]
    found, own = kept(RunFolder(tmp_path), task, (scaled, 0), data)
    assert (own.kind, own.class_names, own.image_spec) == ("image_regression", ["cat", "dog"], spec)
    torch.testing.assert_close(torch.from_numpy(found["images"]), PIXELS)
    torch.testing.assert_close(own.inference_model()(PIXELS), task(scaled))


@pytest.mark.parametrize("batch", [(PIXELS, 0), (FLOATS, 0)], ids=["pictures", "arrays"])
def test_a_bundle_is_served_as_pictures_or_arrays(tmp_path, batch):
    """`/predict` answers with the module's outputs by name, and `/openapi.json` describes them."""
    folder, task = RunFolder(tmp_path), Linear(batch[0][0].numel())
    found, own = kept(folder, task, batch)
    samples = found.get("images", found.get("arrays"))
    export(own, folder, samples, {"id": "1"})
    bundle = Bundle.open(folder.bundle)
    sent = samples[0]
    if "images" in found:
        png = io.BytesIO()
        Image.fromarray(samples[0].transpose(1, 2, 0)).save(png, "PNG")
        sent = png.getvalue()
    (answer,) = answers(bundle, [sent], 10**6)
    wanted = dict(zip(("output_0", "output_1"), task(torch.from_numpy(samples[:1]))[0].tolist(), strict=True))
    assert {one["name"]: one["value"] for one in answer["predictions"]} == pytest.approx(wanted, rel=1e-5)
    schemas = describe(bundle, Limits(), secured=False)["components"]["schemas"]
    assert "predicted_value" in json.dumps(schemas)


def test_a_value_that_the_network_does_not_take_is_a_bad_request(tmp_path):
    """An index outside an embedding gets 400 with the input and the reason, with ONNX Runtime and with torch."""
    folder = RunFolder(tmp_path)
    found, own = kept(folder, Tokens(), torch.tensor([[1, 8], [0, 2]]))
    export(own, folder, found["arrays"], {"id": "1"})
    bundle = Bundle.open(folder.bundle)
    shared = {"spec": own.row_spec, "labels": own.class_names, "run": {}, "samples": bundle.samples}
    by_torch = Checkpoint(folder=tmp_path, task=own.kind, network=own.inference_model(), **shared)
    for model, reason in ((bundle, "idx=9 must be within"), (by_torch, "index out of range")):
        client = application(Service(model)).test_client()
        response = client.post("/predict", json={"arrays": [[0, 8], [9, 0]]})
        assert response.status_code == 400
        assert response.json["ERROR"].startswith("Array 2 of 2: The network does not take these values: ")
        assert reason in response.json["ERROR"]
        assert client.post("/predict", json={"array": [0, 8]}).status_code == 200


@pytest.mark.parametrize(
    ("task", "batch", "message"),
    [
        (Linear(5), FLOATS, "forward does not take float32 (2, 2, 3): "),
        (Linear(), {"text": ["a", "b"]}, "the inputs of a validation batch are str, not a real tensor"),
        (pl.LightningModule(), FLOATS, "it has neither `forward` nor `predict_step`"),
        (Linear(), torch.ones(3), "the inputs of a validation batch are float32 (3,), not a real tensor (N, …)"),
        (Linear(), torch.ones(3, 4) * 1j, "the inputs of a validation batch are complex64 (3, 4), not a real tensor"),
        (Complex(6), FLOATS, "forward gives complex64 (2, 2), not a real tensor"),
        (Unpacks(), FLOATS, "predict_step does not take float32 (17, 2, 3): too many values to unpack"),
    ],
)
def test_a_module_that_takes_something_else_is_refused(tmp_path, task, batch, message):
    """The error names the inputs that the module does not take, or the outputs that cannot be answered."""
    with pytest.raises(ConfigError) as refused:
        kept(RunFolder(tmp_path), task, batch)
    assert message in str(refused.value)


LEAVES_OUT = """
    def state_dict(self):
        return {name: value for name, value in super().state_dict().items() if not name.startswith("layers.3")}

"""
CONFIGURED = """
    def configure_model(self):
        self.scale = nn.Identity()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["factor"] = 2.0

    def on_load_checkpoint(self, checkpoint):
        self.scale.factor = checkpoint["factor"]

"""


def test_a_module_that_leaves_weights_out_of_checkpoints_is_exported(train, here):
    """With `strict_loading = False` they are those of the constructor, as in Lightning."""
    text = (here / "pairs.py").read_text().replace("    def forward(", f"{LEAVES_OUT}    def forward(")
    seeded = "super().__init__()\n        self.strict_loading = torch.manual_seed(3) is None\n        self.layers"
    (here / "pairs.py").write_text(text.replace("super().__init__()\n        self.layers", seeded))
    assert RunFolder(train().folder).bundle_card.is_file()


def test_hooks_are_called_in_lightnings_order_when_a_run_is_loaded(train, here):
    """`on_load_checkpoint` finds what `configure_model` has built."""
    text = (here / "pairs.py").read_text()
    (here / "pairs.py").write_text(text.replace("    def forward(", f"{CONFIGURED}    def forward("))
    assert RunFolder(train().folder).bundle_card.is_file()


def test_a_data_module_as_in_lightnings_manual_gives_the_samples(command, train, here):
    """Its `setup` knows only fit and test, and its `teardown` drops the sets."""
    new = "    def teardown(self, stage):\n        del self.set\n\n    def setup(self, stage):\n"
    new += "        if stage not in ('fit', 'test'):\n            return\n"
    (here / "pairs.py").write_text((here / "pairs.py").read_text().replace("    def setup(self, stage):\n", new))
    assert RunFolder(train().folder).bundle_card.is_file()
    command("export", train("train.export=false").folder, cwd=here, code=0)


def test_a_module_that_is_built_with_its_trainer_trains_without_a_bundle(train, here):
    """The export has no trainer: one note, and the run succeeds."""
    hook = "    def configure_model(self):\n        assert self.trainer.max_epochs\n\n"
    text = (here / "pairs.py").read_text()
    (here / "pairs.py").write_text(text.replace("    def forward(", f"{hook}    def forward("))
    assert "bundle     none: Task is not attached to a `Trainer`" in train().out


def test_lazy_layers_get_their_shapes_from_the_first_batch(train, here):
    """A module with `LazyLinear` trains and is exported."""
    text = (here / "pairs.py").read_text()
    (here / "pairs.py").write_text(text.replace("nn.Linear(4, 8)", "nn.LazyLinear(8)"))
    assert RunFolder(train().folder).bundle_card.is_file()


def test_validation_data_are_loaded_after_on_fit_start(train, here):
    """As in Lightning, a module may prepare in `on_fit_start` what `val_dataloader` reads."""
    text = (here / "pairs.py").read_text()
    held = "def val_dataloader(self):\n        return DataLoader(self.held, 16)"
    text = text.replace("val_dataloader = test_dataloader = train_dataloader", held)
    hook = "    def on_fit_start(self):\n        self.trainer.datamodule.held = self.trainer.datamodule.set\n\n"
    (here / "pairs.py").write_text(text.replace("    def forward(", f"{hook}    def forward("))
    assert "best       val_loss" in train("train.export=false").out


class Asserts(nn.Module):
    def forward(self, inputs):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def test_a_gpu_that_is_lost_ends_its_worker(tmp_path, monkeypatch):
    """After an index outside an embedding, CUDA answers nothing in this process any more."""
    left = []
    monkeypatch.setattr("deeplightning.torch_server.os._exit", left.append)
    samples = np.zeros((1, 2), np.float32)
    fields = {"folder": tmp_path, "task": "array_regression", "spec": None, "labels": [], "run": {}}
    model = Checkpoint(**fields, samples=samples, network=Asserts())
    with pytest.raises(torch.AcceleratorError):
        model.predict(samples)
    assert left == [1]
