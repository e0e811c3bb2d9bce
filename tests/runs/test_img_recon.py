"""Image reconstruction on pictures of three colours: training, pictures, metrics, export and serving."""

import io
import json
import math
import re
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
import sklearn.metrics
import torch
from example_code import copy_code, module_of
from PIL import Image
from served import COLOURS, picture
from tiny import csv_rows

from deeplightning.config.examine import load_config
from deeplightning.image_spec import ImageSpec
from deeplightning.run.assemble import init_module
from deeplightning.run.load import trained_task
from deeplightning.runfolder import RunFolder
from deeplightning.task.networks import MisfitError

DiscreteVAE = module_of("vqvae/discrete_vae.py").DiscreteVAE
reconstruction_task = module_of("vqvae/reconstruction_task.py")
CONFIG = """\
seed: 7
stages: [train, validate]
data:
  module: {type: deeplightning.data.image_folder.ImageFolder, params: {image_size: 8}}
  root: pictures
  batch_size: 8
model:
  module: {type: reconstruction_task.ImageReconstruction}
  network:
    type: discrete_vae.DiscreteVAE
    params: {image_size: 8, num_channels: 3, num_tokens: 8, codebook_dim: 8, num_layers: 1, width: 16,
             straight_through: true}
  optimizer: {type: torch.optim.Adam, params: {lr: 0.01}}
  loss: {type: vae_losses.DiscreteVAELoss, params: {kl_weight: 0.001}}
train: {num_epochs: 2}
logger:
  params: {tracking_uri: STORE, system_metrics: false}
  log_every_n_steps: 4
  histograms: 2
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, store):
    """A working directory with 180 pictures, each of nearly one colour, and the config."""
    folder, random = tmp_path_factory.mktemp("colours"), np.random.RandomState(0)
    for name, colour in COLOURS.items():
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(60):
            pixels = np.clip(np.array(colour) + random.randint(-8, 9, (8, 8, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"{number}.png")
    copy_code("vqvae", folder)
    (folder / "colours.yaml").write_text(CONFIG.replace("STORE", str(store)))
    return folder


@pytest.fixture(scope="module")
def learn(command, place):
    """`learn(override, …)` trains on these pictures."""

    def run(*overrides, ranks=1, code=0):
        spread = f"engine.processes={ranks}"
        return command("train", "colours.yaml", spread, *overrides, cwd=place, ranks=ranks, code=code)

    return run


@pytest.fixture(scope="module")
def run(learn):
    """A run of two epochs and a validation."""
    return RunFolder(learn().folder)


def tiles(path):
    """Return the centre pixel of each picture on a sheet with four pictures per row."""
    pixels = np.asarray(Image.open(path))
    side = pixels.shape[1] // 4
    return pixels[side // 2 :: side, side // 2 :: side].reshape(-1, 3).astype(int)


def nearest_colour(pixels):
    distances = [np.abs(pixels - np.array(colour)).sum(1) for colour in COLOURS.values()]
    return np.argmin(distances, axis=0)


def test_losses_fall(run, tracked):
    """`train_loss` and `val_loss` fall, and `rmse` is logged by default."""
    series = tracked(run.path).series()
    values = [value for _, value in series["train_loss"]]
    assert values[-1] < 0.3 * values[0]
    assert series["val_loss"][1][1] < series["val_loss"][0][1]
    assert series["train_loss_epoch"][1][1] < series["train_loss_epoch"][0][1]
    assert {"train_rmse", "val_rmse"} <= series.keys()


def test_metrics_are_those_of_the_whole_set(run, place, monkeypatch):
    """`val_rmse` is the root of scikit-learn's mean squared error over all normalised pixels; perplexity is computed
    from the tokens of the complete set."""
    monkeypatch.chdir(place)
    task, cfg, _ = trained_task(run)
    data = init_module(cfg, "data")
    data.setup("validate")
    images = data.dataset("val").images
    with torch.no_grad():
        truth = task.normalised(images)
        answers = task.network(truth)["reconstruction"]
        tokens = task.network.encode(truth)
    results = json.loads(run.results("validate").read_text())
    expected = math.sqrt(sklearn.metrics.mean_squared_error(truth.flatten(), answers.flatten()))
    assert results["val_rmse"] == pytest.approx(expected, rel=1e-5)
    share = np.bincount(tokens.flatten().numpy(), minlength=8) / tokens.numel()
    entropy = -sum(p * math.log(p) for p in share if p > 0)
    assert results["val_codebook_perplexity"] == pytest.approx(math.exp(entropy), rel=1e-5)


def test_pictures_of_each_epoch(run):
    """Two epochs write eight sheets to the run's folder, originals and reconstructions of training and validation; a
    separate validation writes two more, without an epoch number."""
    names = [f"{s}_{w}_{e}.png" for s in ("train", "val") for w in ("original", "reconstruction") for e in (0, 1)]
    found = {path.name for path in run.path.glob("*_*.png")}
    assert found == {*names, "val_original.png", "val_reconstruction.png"}


def test_colours_are_right(run):
    """Originals have the pixels of the files, and reconstructions the same colours."""
    for stage in ("train", "val"):
        found = (tiles(run.path / f"{stage}_{what}_1.png") for what in ("original", "reconstruction"))
        originals, answers = (pixels[:8] for pixels in found)  # a batch has eight
        true = np.array(list(COLOURS.values()))[nearest_colour(originals)]
        assert np.abs(originals - true).max() <= 8
        assert (nearest_colour(answers) == nearest_colour(originals)).mean() > 0.9


def test_the_use_of_the_codebook_has_a_histogram(run):
    """`logger.histograms` counts tokens, one bin each, as well as weights and gradients, as a picture and as JSON."""
    folder = run.path / "histograms" / "epoch_1"
    use = json.loads((folder / "codebook.json").read_text())
    assert use["edges"] == list(range(9))
    assert sum(use["counts"]) == 18 * 4 * 4  # validation pictures, positions in each
    assert (folder / "codebook.png").is_file()
    assert (folder / "network.codebook.weight.grad.png").is_file()


def test_two_processes_evaluate_like_one(learn, run):
    """A validation by two processes has the metrics of one, including perplexity, and only rank 0 writes pictures."""
    folder = learn("stages=[validate]", f"test.ckpt='{run.path}'", "logger.histograms=null", ranks=2).folder
    assert {path.name for path in folder.glob("*.png")} == {"val_original.png", "val_reconstruction.png"}
    ours, theirs = (json.loads(each.results("validate").read_text()) for each in (RunFolder(folder), run))
    assert ours["val_codebook_perplexity"] == theirs["val_codebook_perplexity"]
    assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-6)


def test_the_run_answers_with_a_png(run, serving):
    """The server answers a posted picture with a PNG of its colour, which equals the answer of the task."""
    headers = {"Content-Type": "image/png", "Accept": "image/png"}
    request = urllib.request.Request(f"{serving(run.path).url}/predict", picture("green"), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["Content-Type"] == "image/png"
        pixels = np.asarray(Image.open(io.BytesIO(answer.read())))
    task, _, _ = trained_task(run)
    sent = np.full((8, 8, 3), COLOURS["green"], np.uint8)
    with torch.no_grad():
        expected = task.inference_model()(torch.from_numpy(sent).permute(2, 0, 1)[None])
    assert expected.dtype == torch.float32
    assert np.abs(pixels - expected[0].permute(1, 2, 0).numpy() * 255).max() <= 1
    assert nearest_colour(pixels.reshape(-1, 3)).tolist() == [list(COLOURS).index("green")] * 64


@pytest.fixture
def task(place, monkeypatch):
    monkeypatch.chdir(place)
    return reconstruction_task.ImageReconstruction(load_config("colours.yaml"))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            DiscreteVAE(16, 3, num_tokens=4),
            "does not take the data's pictures (1, 3, 8, 8): the images are (3, 8, 8), but",
        ),
        (torch.nn.Flatten(), "gives (1, 192), not pictures (B, C, H, W)"),
    ],
)
def test_a_network_that_does_not_fit_the_pictures_is_named(network, message, task):
    """A network for another picture size, or without pictures as output, is a config fault."""
    task.image_spec = ImageSpec(8, 8, "RGB")
    with pytest.raises(MisfitError, match=re.escape(message)):
        task.try_out(network)


def test_no_pictures_come_from_the_sanity_check(task):
    """The sanity check with which a user's Trainer may begin writes no pictures."""
    task.normalise = torch.nn.Identity()
    task._shown = {"val": torch.zeros(1, 3, 8, 8)}
    task.trainer = SimpleNamespace(sanity_checking=True)
    assert task.pictures("val") == {}


def test_image_files_are_answered_with_pictures(run, command, place, tmp_path):
    """`predict RUN IMAGE --out FILE.csv` writes a PNG per image; without `--out` an error recommends it."""
    image, answers = tmp_path / "a.png", tmp_path / "answers.csv"
    image.write_bytes(picture())
    outcome = command("predict", run.path, image, cwd=place)
    assert (outcome.code, "Traceback" in outcome.err) == (3, False)
    assert "--out FILE.csv writes them as PNG files" in outcome.err
    command("predict", run.path, image, "--out", answers, cwd=place, code=0)
    (row,) = csv_rows(answers)
    assert row["path"] == str(image)
    (answered,) = (tmp_path / "answers").glob("*.png")
    with Image.open(answered) as reconstruction:
        assert (reconstruction.size, reconstruction.mode) == ((8, 8), "RGB")
