"""The data modules: which samples are in each set, what a batch contains, and which errors invalid files give."""

import functools
import gzip
import hashlib
import http.server
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchvision
from checks import write_mnist
from modules import data_config, on_rank
from PIL import Image
from served import wait_until
from sklearn.datasets import load_digits
from torch import nn

from deeplightning.config.examine import load_config
from deeplightning.data import loading
from deeplightning.data.augment import RandomCrop, RandomHorizontalFlip
from deeplightning.data.cifar import CIFAR10
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.datasets import Samples
from deeplightning.data.digits import Digits
from deeplightning.data.image_folder import ImageFolder
from deeplightning.data.images import ImageData
from deeplightning.data.mnist import MNIST
from deeplightning.data.of_datasets import OfDatasets
from deeplightning.data.splits import assign_folds
from deeplightning.image_spec import ImageSpec

ROOT = Path(__file__).parents[2]
SPLITS = ("train", "val", "test")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Give each test its own folder for decoded images, outside `tmp_path`."""
    monkeypatch.setenv("DEEPLIGHTNING_CACHE", str(tmp_path_factory.mktemp("cache")))


def sizes(module: ImageData) -> tuple[int, ...]:
    return tuple(len(module.dataset(split)) for split in SPLITS)


def gathered(loader) -> dict[str, torch.Tensor]:
    """Concatenate all batches of a loader."""
    batches = list(loader)
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


@pytest.fixture
def mnist_root(tmp_path):
    """An MNIST folder of 400 training and 100 test digits, 8x8."""
    digits = load_digits()
    return write_mnist(tmp_path, np.rint(digits.images[:500] * 15.9375), digits.target[:500], 400)


CLASSES = ["a cat", "dog", "zebra fish"]


def draw(path: Path, number: int) -> None:
    """Write an image of random size and content."""
    random = np.random.RandomState(number)
    height, width = random.randint(20, 60, size=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(random.randint(0, 256, (height, width, 3), dtype=np.uint8)).save(path)


def draw_classes(root: Path, count: int) -> Path:
    """Write `count` images of each of three classes and return their folder."""
    for label, name in enumerate(CLASSES):
        for number in range(count):
            draw(root / name / f"image {number:03}.png", 1000 * label + number)
    return root


# Splits


@pytest.mark.parametrize(("size", "num_folds"), [(512, 10), (1797, 10), (60, 7), (11, 10), (10, 10), (5, 2)])
def test_folds_are_even_and_stratified(size, num_folds):
    """Folds differ by at most one sample, in total and in each class, and fold 0 is among the smaller ones."""
    labels = np.random.RandomState(0).randint(0, 4, size)
    folds = assign_folds(labels, num_folds, seed=3)
    for counted in (folds, *(folds[labels == label] for label in range(4))):
        counts = np.bincount(counted, minlength=num_folds)
        assert counts.max() - counts.min() <= 1
    assert (folds == 0).sum() == size // num_folds
    assert sorted(set(folds)) == list(range(num_folds))


def test_folds_are_frozen():
    """The folds of a seed are the same in any later version and on any machine."""
    labels, frozen = np.arange(12) % 3, [3, 2, 2, 0, 3, 1, 2, 0, 3, 1, 1, 0]
    assert assign_folds(labels, 4, seed=42).tolist() == frozen
    assert assign_folds(labels, 4, seed=43).tolist() != frozen
    assert assign_folds(labels, 4, seed=42, purpose=1).tolist() != frozen


def rows(images: torch.Tensor) -> list[bytes]:
    return sorted(image.numpy().tobytes() for image in images)


def test_digits_are_divided_80_10_10():
    """Each of scikit-learn's 1,797 digits is in exactly one set; the spec has their mean and standard deviation."""
    module = on_rank(Digits(data_config()))
    assert sizes(module) == (1439, 179, 179)
    together = torch.cat([module.dataset(split).images for split in SPLITS])
    assert rows(together) == rows(torch.from_numpy(np.rint(load_digits().images * 255 / 16).astype(np.uint8)))
    assert module.class_names == list("0123456789")
    assert module.image_spec == ImageSpec(8, 8, "L", mean=(0.3053,), std=(0.3759,))
    assert (together / 255).mean().item() == pytest.approx(0.3053, abs=1e-4)
    assert (together / 255).std().item() == pytest.approx(0.3759, abs=1e-4)
    for split in SPLITS:
        assert np.ptp(np.bincount(module.dataset(split).labels)) <= 0.03 * len(module.dataset("train"))


def test_splits_depend_on_the_seed_alone():
    """Every rank and every rerun has the same sets, another seed has others, and the test set ignores num_splits."""

    def split(name, rank=0, **values):
        return on_rank(Digits(data_config(**values)), rank, 2).dataset(name).images

    for name in SPLITS:
        assert torch.equal(split(name), split(name, rank=1, batch_size=3))
        assert split(name).shape != split(name, seed=1).shape or not torch.equal(split(name), split(name, seed=1))
    assert torch.equal(split("test"), split("test", num_splits=5, fold=2))


def test_num_splits():
    """512 training samples in ten folds validate on 51; over all folds each sample is validated once."""
    module = on_rank(Digits(data_config(num_splits=10), limit=512))
    assert sizes(module) == (461, 51, 179)
    held_out = []
    for fold in range(4):
        module = on_rank(Digits(data_config(num_splits=4, fold=fold)))
        assert sum(sizes(module)[:2]) == 1618
        held_out += rows(module.dataset("val").images)
    assert sorted(held_out) == sorted(rows(module.dataset("train").images) + rows(module.dataset("val").images))


@pytest.mark.parametrize(
    ("loader", "params", "words"),
    [
        ({"batch_size": 3}, {}, "data.loader.batch_size cannot be set: data.batch_size, num_workers"),
        ({"shuffle": False}, {}, "data.loader.shuffle cannot be set"),
        ({"pin_memry": True}, {}, "DataLoader rejects data.loader: .* unexpected .* 'pin_memry'"),
        ({"prefetch_factor": 2}, {}, "DataLoader rejects data.loader: prefetch_factor"),
        ({}, {"image_size": 0}, "image_size must be .* not 0"),
        ({}, {"image_size": [8]}, "image_size must be"),
        ({}, {"limit": 0}, "limit must be"),
        ({}, {"augment": ["flip"]}, r"augment\[0\] must be an nn.Module, not 'flip'"),
    ],
)
def test_impossible_config(loader, params, words):
    """An invalid value raises a ValueError of one line with exit code 2, before data are read."""
    with pytest.raises(ValueError, match=words) as error:
        Digits(data_config(loader=loader), **params)
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)


def test_too_few_samples():
    """Sets that are too small to divide or to fill a batch are errors with their sizes."""
    with pytest.raises(DataError, match="5 training samples are too few to hold out one in 9"):
        on_rank(Digits(data_config(), limit=5))
    with pytest.raises(DataConfigError, match=r"no training batch: .* 1439 samples, but a batch has 800 .* x 2"):
        on_rank(Digits(data_config(batch_size=800, loader={"drop_last": True})), world=2).train_dataloader()


# Batches


def test_only_training_is_shuffled():
    """A batch has uint8 images, int64 labels and int64 positions in the set. Validation, test and prediction (of the
    test set) run in data order; each epoch of training has another order."""
    module = on_rank(Digits(data_config()))
    for stage, split in (("val", "val"), ("test", "test"), ("predict", "test"), ("train", "train")):
        found, dataset = gathered(getattr(module, f"{stage}_dataloader")()), module.dataset(split)
        kinds = {name: values.dtype for name, values in found.items()}
        assert kinds == {"image": torch.uint8, "label": torch.int64, "index": torch.int64}
        assert torch.equal(found["image"], dataset.images[found["index"]])
        assert torch.equal(found["label"], dataset.labels[found["index"]])
        assert torch.equal(found["index"], torch.arange(len(dataset))) is (stage != "train")
    loader = module.train_dataloader()
    loader.sampler.set_epoch(1)
    second = gathered(loader)["index"]
    assert not torch.equal(found["index"], second)
    for index in (found["index"], second):
        assert torch.equal(torch.arange(1439), index.sort()[0])


@pytest.mark.parametrize(("drop_last", "batches"), [(False, 3), (True, 2)])
def test_drop_last(drop_last, batches):
    """`drop_last` drops the last training batch, and nothing in evaluation."""
    module = on_rank(Digits(data_config(loader={"drop_last": drop_last}), limit=147))  # 131 train
    assert len(module.train_dataloader()) == len(list(module.train_dataloader())) == batches
    assert len(gathered(module.test_dataloader())["index"]) == 147


def test_loading_leaves_the_random_state_alone():
    """Dividing and loading data draw no random number from torch's or NumPy's global generators."""

    def state():
        return torch.get_rng_state().tolist(), np.random.get_state()[2], np.random.get_state()[1].tolist()

    module, before = Digits(data_config()), state()
    on_rank(module)
    for loader in (module.train_dataloader(), module.val_dataloader()):
        list(loader)
    assert state() == before


def test_workers_agree(tmp_path):
    """Batches are the same in each epoch with or without loader workers, from files, from memory or from the cache."""
    draw_classes(tmp_path, 10)
    ways = [(True, 2, False), (False, 0, False), (False, 2, False), (True, 2, True), (False, 2, True), (None, 2, True)]
    modules = []
    for memory, workers, cached in ways:
        cfg = data_config(tmp_path, batch_size=4, num_workers=workers)
        modules.append(on_rank(ImageFolder(cfg, 16, in_memory=memory, cache=cached)))
    maps = [module.dataset("train").large["image"] for module in modules[4:]]
    assert len({pixels.data_ptr() for pixels in maps}) == 2  # each has its own map
    loaders = [module.train_dataloader() for module in modules]
    assert [loader.num_workers for loader in loaders] == [0, 0, 2, 0, 0, 0]
    state = torch.get_rng_state()
    for epoch in range(2):
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
            loader.sampler.start = epoch
        wanted, *others = [gathered(loader) for loader in loaders]
        assert len(wanted["index"]) == 24 - 4 * epoch
        for other in others:
            assert all(torch.equal(wanted[key], other[key]) for key in wanted)
    assert torch.equal(state, torch.get_rng_state())


def test_a_damaged_file_in_a_worker(tmp_path):
    """A file that a worker cannot decode is an error of one line with its path, without the worker's traceback."""
    draw_classes(tmp_path, 10)
    path = tmp_path / "dog" / "image 003.png"
    path.write_bytes(b"no image")
    module = on_rank(ImageFolder(data_config(tmp_path, num_workers=1), in_memory=False, cache=False))
    split = next(split for split in SPLITS if str(path) in module.dataset(split).samples.items)
    with pytest.raises(DataError) as error:
        list(getattr(module, f"{split}_dataloader")())
    assert str(error.value).startswith(f"{path}: cannot be used as an image. This is not")
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 3


def test_memory_limit(monkeypatch):
    """By default a set is held in memory if its prepared images stay within the limit."""
    monkeypatch.setattr(loading, "IN_MEMORY_LIMIT", 1797 * 64)
    assert on_rank(Digits(data_config())).in_memory is True
    monkeypatch.setattr(loading, "IN_MEMORY_LIMIT", 1797 * 64 - 1)
    assert on_rank(Digits(data_config())).in_memory is False
    assert on_rank(Digits(data_config(), in_memory=True)).in_memory is True


@pytest.mark.parametrize(
    ("stage", "prepared"), [("fit", ["train", "val"]), ("validate", ["val"]), ("test", ["test"]), ("predict", ["test"])]
)
def test_setup_prepares_what_the_stage_needs(stage, prepared):
    """A stage decodes only the sets that it reads, and only once."""
    module = Digits(data_config())
    module.setup(stage)
    assert sorted(module._datasets) == sorted(prepared)
    kept = module.dataset(prepared[0])
    module.setup(stage)
    assert kept is module.dataset(prepared[0])


# Augmentation


def numbered(batch: int) -> torch.Tensor:
    """Return equal images, (batch, 2, 6, 5), whose pixels differ from each other and from 0."""
    return torch.arange(1, 61, dtype=torch.uint8).reshape(1, 2, 6, 5).repeat(batch, 1, 1, 1)


@pytest.mark.parametrize(("p", "share"), [(0.0, 0.0), (1.0, 1.0), (0.25, 0.25)])
def test_flip(p, share):
    """Each image is mirrored independently, with probability p."""
    torch.manual_seed(0)
    images = numbered(2000)
    flipped = RandomHorizontalFlip(p)(images)
    mirrored = torch.tensor([torch.equal(image, images[0].flip(-1)) for image in flipped])
    kept = torch.tensor([torch.equal(image, images[0]) for image in flipped])
    assert (mirrored ^ kept).all()
    assert mirrored.float().mean().item() == pytest.approx(share, abs=0.03)
    assert flipped.dtype == torch.uint8


def test_crop():
    """Each crop is a window of the padded image, and all windows are equally likely; invalid arguments are errors."""
    torch.manual_seed(0)
    images = numbered(1800)
    padded = np.pad(images[0].numpy(), ((0, 0), (1, 1), (1, 1)))
    windows = [padded[:, row : row + 6, column : column + 5].tobytes() for row in range(3) for column in range(3)]
    counts = np.zeros(9)
    for image in RandomCrop(1)(images):
        counts[windows.index(image.numpy().tobytes())] += 1
    assert counts.sum() == 1800
    assert abs(counts - 200).max() < 60
    assert torch.equal(images, RandomCrop(0)(images))
    for impossible in (lambda: RandomHorizontalFlip(1.5), lambda: RandomCrop(-1), lambda: RandomCrop(0.5)):
        with pytest.raises(ValueError, match=r"probability|pixels"):
            impossible()


@pytest.mark.parametrize("config", ["cifar10_resnet18", "cifar10_vit"])
def test_the_configs_of_cifar_flip(config):
    """Both shipped configs of CIFAR-10 crop and flip training images."""
    params = load_config(ROOT / "configs" / f"{config}.yaml").data.module.params
    assert [target["type"].rpartition(".")[2] for target in params["augment"]] == ["RandomCrop", "RandomHorizontalFlip"]


class Recorder(pl.LightningModule):
    """Records its batches and learns nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen = {"train": [], "val": [], "test": [], "predict": []}

    def training_step(self, batch, batch_idx):
        self.seen["train"].append(batch)
        return self.weight * 1.0

    def validation_step(self, batch, batch_idx):
        self.seen["val"].append(batch)

    def test_step(self, batch, batch_idx):
        self.seen["test"].append(batch)

    def predict_step(self, batch, batch_idx):
        self.seen["predict"].append(batch)
        return batch["index"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


# Lightning 2.6.6 asks for a class that torch 2.15 is about to remove.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_real_trainer(in_memory):
    """Lightning's Trainer runs all stages without a warning, from memory or workers, and augments only training."""
    module = Digits(data_config(num_workers=2), augment=[RandomHorizontalFlip(1.0)], in_memory=in_memory)
    recorder = Recorder()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=2, enable_model_summary=False, num_sanity_val_steps=0, **quiet)
    trainer.fit(recorder, datamodule=module)
    trainer.test(recorder, datamodule=module, verbose=False)
    trainer.predict(recorder, datamodule=module)
    seen = {stage: gathered(batches) for stage, batches in recorder.seen.items()}
    plain = on_rank(Digits(data_config()))
    train = seen["train"]
    assert len(train["index"]) == 2 * 1439
    assert not torch.equal(train["index"][:1439], train["index"][1439:])
    assert torch.equal(plain.dataset("train").images[train["index"]].flip(-1), train["image"])
    for stage, split in (("val", "val"), ("test", "test"), ("predict", "test")):
        images = plain.dataset(split).images
        assert torch.equal(images[seen[stage]["index"]], seen[stage]["image"])
    assert seen["predict"]["index"].tolist() == list(range(179))


def test_ctrl_c_in_a_terminal_leaves_the_workers_to_the_run(tmp_path):
    """A terminal sends SIGINT to the workers too, and the run still finishes its step."""
    draw_classes(tmp_path, 10)
    cfg = data_config(tmp_path, batch_size=4, num_workers=1)
    batches = iter(on_rank(ImageFolder(cfg, 16, in_memory=False, cache=False)).train_dataloader())
    next(batches)
    os.kill(batches._workers[0].pid, signal.SIGINT)
    assert len([*batches]) == 5


class After(Recorder):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "after": True}


class Moves(After):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return {**super().transfer_batch_to_device(batch, device, dataloader_idx), "moved": True}


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:You have overridden")
@pytest.mark.parametrize(("kind", "task"), [(OfDatasets, Moves()), (Digits, After())])
def test_the_transfer_hooks_of_a_task_are_called(kind, task):
    """Lightning calls the task's hooks if the data module has nothing to do in its own."""
    rows = [{"x": torch.ones(1)}] * 8
    module = kind(data_config(batch_size=4), *([rows, rows] if kind is OfDatasets else []))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    pl.Trainer(max_epochs=1, enable_model_summary=False, num_sanity_val_steps=0, **quiet).fit(task, datamodule=module)
    assert all(batch["after"] and batch.get("moved", True) for batch in task.seen["train"] + task.seen["val"])


# MNIST and CIFAR-10


def test_mnist_reads_idx_files(mnist_root):
    """MNIST has the images and labels of its files, in any number; a tenth of the training set validates."""
    module = on_rank(MNIST(data_config(mnist_root), image_size=8))
    assert sizes(module) == (360, 40, 100)
    digits = load_digits()
    test = module.dataset("test")
    assert torch.equal(torch.from_numpy(np.rint(digits.images[400:500] * 15.9375)).byte(), test.images[:, 0])
    assert torch.equal(torch.from_numpy(digits.target[400:500]), test.labels)
    assert module.image_spec == ImageSpec(8, 8, "L", mean=(0.1307,), std=(0.3081,))
    assert module.class_names == list("0123456789")
    assert on_rank(MNIST(data_config(mnist_root, num_splits=4))).dataset("val").images.shape == (100, 1, 28, 28)


@pytest.mark.parametrize("kind", [MNIST, CIFAR10])
def test_missing_data(tmp_path, kind):
    """Missing files are an error with the absolute path, both remedies and exit code 3; nothing is created."""
    module = kind(data_config(tmp_path / "nowhere"))
    words = r"is missing\. Set data\.root .*data\.module\.params\.download=true"
    for call in (module.check, module.prepare_data, module.setup):
        with pytest.raises(DataError, match=words) as error:
            call()
        assert str(tmp_path / "nowhere") in str(error.value)
        assert error.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [MNIST, CIFAR10, ImageFolder])
def test_root_is_null(kind):
    """`data.root: null` is an error of the config, exit code 2."""
    with pytest.raises(DataConfigError, match=r"data\.root is null") as error:
        kind(data_config(None))
    assert error.value.exit_code == 2


IMAGES, LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        (IMAGES, lambda data: data[:-1], "damaged or not an IDX file of bytes with 3"),
        (IMAGES, lambda data: data[:9], "damaged or not an IDX file"),
        (IMAGES, lambda data: b"", "damaged or not an IDX file"),
        (LABELS, lambda data: data[:4] + bytes([0, 0, 0, 0]), "is empty, damaged or not an IDX file"),
        (LABELS, lambda data: data[:-1] + b"\x0b", "label 11 of sample 99 is outside the 10 classes, 0 to 9"),
        (LABELS, lambda data: data[:7] + bytes([99]) + data[8:-1], "holds 100 images, but .* 99 labels"),
    ],
)
def test_damaged_mnist(mnist_root, name, damage, words):
    """A file that is truncated, of another format, or contradicts another file is an error with its path."""
    path = mnist_root / "MNIST" / "raw" / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=words) as error:
        MNIST(data_config(mnist_root)).setup()
    assert str(path) in str(error.value)


def test_one_download(mnist_root, tmp_path):
    """If several threads prepare one folder at the same time, one downloads; a later one finds the files."""
    fetched = []

    class Copied(MNIST):
        def fetch(self):
            fetched.append(self)
            shutil.copytree(mnist_root / "MNIST", self.root / "MNIST")

    modules = [Copied(data_config(tmp_path / "new" / "folder"), download=True) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(Copied.prepare_data, modules))
    modules[0].prepare_data()
    assert len(fetched) == 1
    assert sizes(on_rank(modules[1])) == (360, 40, 100)


@pytest.fixture
def server(tmp_path):
    """The folder and the address of a web server for its files."""
    folder = tmp_path / "server"
    folder.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever).start()
        yield folder, f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()


def test_torchvision_downloads(mnist_root, server, tmp_path, monkeypatch):
    """torchvision's download from a local server gives a valid set; a wrong answer is an error with exit code 3."""
    folder, address = server
    resources = []
    for path in sorted((mnist_root / "MNIST" / "raw").iterdir()):
        packed = gzip.compress(path.read_bytes())
        (folder / f"{path.name}.gz").write_bytes(packed)
        resources.append((f"{path.name}.gz", hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [address])
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    module = MNIST(data_config(tmp_path / "new"), download=True)
    module.prepare_data()
    assert sizes(on_rank(module)) == (360, 40, 100)
    (folder / resources[0][0]).write_bytes(b"<html>not today</html>")
    with pytest.raises(DataError, match="MNIST cannot be downloaded into") as error:
        MNIST(data_config(tmp_path / "again"), download=True).prepare_data()
    assert error.value.exit_code == 3
    assert str(tmp_path / "again") in str(error.value)


@pytest.fixture
def cifar_root(tmp_path, monkeypatch):
    """A CIFAR-10 folder of 5 x 20 training and 20 test images, whose MD5 sums torchvision accepts."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    random = np.random.RandomState(0)

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    def batch(name):
        pixels = random.randint(0, 256, (20, 3072), dtype=np.uint8)
        return [name, write(name, {"data": pixels, "labels": (np.arange(20) % 10).tolist()})]

    source = torchvision.datasets.CIFAR10
    monkeypatch.setattr(source, "train_list", [batch(f"data_batch_{number}") for number in range(1, 6)])
    monkeypatch.setattr(source, "test_list", [batch("test_batch")])
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    meta = {**source.meta, "md5": write("batches.meta", {"label_names": names})}
    monkeypatch.setattr(source, "meta", meta)
    return tmp_path


def test_cifar_reads_its_files(cifar_root):
    """CIFAR-10 has torchvision's images and labels, with channels first."""
    module = on_rank(CIFAR10(data_config(cifar_root)))
    assert sizes(module) == (90, 10, 20)
    source = torchvision.datasets.CIFAR10(cifar_root, train=False)
    assert module.class_names == source.classes
    test = module.dataset("test")
    for position in range(20):
        image, label = source[position]
        assert torch.equal(torch.from_numpy(np.array(image)).permute(2, 0, 1), test.images[position])
        assert label == test.labels[position]
    assert module.image_spec.mean == (0.4914, 0.4822, 0.4465)


def test_damaged_cifar_is_not_unpickled(cifar_root):
    """A file with another MD5 sum is refused, and a pickle in it is not loaded."""

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(cifar_root / "harm"),)

    path = cifar_root / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(DataError, match="cifar-10-batches-py is damaged: "):
        CIFAR10(data_config(cifar_root)).setup()
    assert not (cifar_root / "harm").exists()


# ImageFolder


def test_a_folder_per_class(tmp_path):
    """Without folders train, val and test each class is divided 80/10/10; nested files count, hidden ones do not."""
    root = draw_classes(tmp_path / "my pictures", 20)
    draw(root / "dog" / "deep" / "er" / "x.JPG", 7)
    (root / "dog" / ".hidden.png").write_bytes(b"no image")
    (root / ".git").mkdir()
    (root / "dog" / ".thumbs").mkdir()
    (root / "dog" / ".thumbs" / "x.png").write_bytes(b"no image")
    module = on_rank(ImageFolder(data_config(root), image_size=[12, 16]))
    assert module.class_names == CLASSES
    assert sizes(module) == (49, 6, 6)
    for split in SPLITS:
        assert np.ptp(np.bincount(module.dataset(split).labels)) <= 1
    paths = [path for split in SPLITS for path in module.dataset(split).samples.items]
    assert len(set(paths)) == 61
    assert not any("/." in path for path in paths)
    for split in ("train", "test"):
        dataset = module.dataset(split)
        assert list(dataset.samples.items) == sorted(dataset.samples.items)
        for position, path in enumerate(dataset.samples.items):
            wanted = module.image_spec.decode(path).transpose(2, 0, 1)
            np.testing.assert_array_equal(wanted, dataset.images[position])
            assert CLASSES[dataset.labels[position]] == Path(path).relative_to(root).parts[0]


def test_train_val_test_folders(tmp_path):
    """Folders train, val and test are the sets of their names; num_splits takes precedence over val."""
    for split, count in zip(SPLITS, (20, 3, 4), strict=True):
        draw_classes(tmp_path / split, count)
    assert sizes(on_rank(ImageFolder(data_config(tmp_path), image_size=8))) == (60, 9, 12)
    assert sizes(on_rank(ImageFolder(data_config(tmp_path, num_splits=4), image_size=8))) == (45, 15, 12)


def test_a_run_without_the_set_of_a_later_stage_does_not_train(command, store, tiny, tmp_path):
    """A missing test set of a later stage is an error with exit code 3 before training, and no run is created."""
    draw_classes(tmp_path / "train", 20)
    data = "data.module={type: deeplightning.data.image_folder.ImageFolder, params: {image_size: 8, mode: L}}"
    for stages in ("[train,test]", "[train,predict]"):
        size = "model.network.params={num_classes: 3, num_channels: 1, image_size: 8}"
        ended = command("train", tiny, data, f"data.root='{tmp_path}'", size, f"stages={stages}", cwd=tmp_path)
        assert (ended.code, "There is no test set" in ended.err, "epoch 1" in ended.out) == (3, True, False), ended
        assert "Artifact storage path" not in ended.out


def test_links_are_followed_once(tmp_path):
    """A class may be a link to another folder, and a cycle of links is followed once."""
    draw_classes(tmp_path / "elsewhere", 10)
    root = tmp_path / "root"
    root.mkdir()
    for name in CLASSES:
        (root / name).symlink_to(tmp_path / "elsewhere" / name)
    (tmp_path / "elsewhere" / "dog" / "ring").symlink_to(tmp_path / "elsewhere" / "dog")
    assert sum(sizes(on_rank(ImageFolder(data_config(root))))) == 30


@pytest.mark.parametrize(
    ("break_it", "place", "words"),
    [
        (lambda root: shutil.rmtree(root), "", r"is not a folder\. Set data\.root"),
        (lambda root: [shutil.rmtree(root), root.mkdir()], "", "holds no folder"),
        (lambda root: [path.unlink() for path in (root / "val").rglob("*.png")], "val", "holds no image"),
        (lambda root: (root / "train/dog/image 001.png").write_bytes(b""), "train/dog/image 001.png", "empty"),
        (lambda root: (root / "train/dog/a.jpg").write_bytes(b"no image"), "train/dog/a.jpg", "not an image"),
        (lambda root: (root / "val/dog/a.jpg").symlink_to("/nowhere"), "val/dog/a.jpg", "No such file"),
        (lambda root: cut(root / "test/dog/image 001.png"), "test/dog/image 001.png", "cut off"),
    ],
)
def test_wrong_folders(tmp_path, break_it, place, words):
    """An invalid folder or file is an error with its path and exit code 3."""
    root = tmp_path / "root"
    for split in SPLITS:
        draw_classes(root / split, 4)
    break_it(root)
    with pytest.raises(DataError, match=words) as error:
        ImageFolder(data_config(root)).setup()
    assert str(root / place) in str(error.value)
    assert error.value.exit_code == 3


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def test_grey_folder_and_own_statistics(tmp_path):
    """Mode, resize rule and statistics can be set; the default statistics are ImageNet's."""
    imagenet = ImageSpec(64, 64, "RGB", "crop", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert ImageFolder(data_config(tmp_path)).image_spec == imagenet
    module = ImageFolder(data_config(tmp_path), image_size=[8, 9], mode="L", resize="pad", mean=[0.5], std=[0.25])
    assert module.image_spec == ImageSpec(8, 9, "L", "pad", (0.5,), (0.25,))
    with pytest.raises(ValueError, match="mode must be one of"):
        ImageFolder(data_config(tmp_path), mode="HSV")


# What we ship


def test_sample_digits():
    """The ten images in examples/digits are test samples of their class, and decode to the network's exact input."""
    module = on_rank(Digits(data_config(seed=42)))
    test = module.dataset("test")
    for digit in range(10):
        path = ROOT / "examples" / "digits" / f"{digit}.png"
        pixels = torch.from_numpy(module.image_spec.decode(path)).permute(2, 0, 1)
        position = (test.images == pixels).all(dim=(1, 2, 3)).nonzero().item()
        assert test.labels[position] == digit


READS = """\
import sys, time
from types import SimpleNamespace
from deeplightning.data.digits import Digits

if __name__ == "__main__":
    data = SimpleNamespace(root=None, batch_size=4, num_workers=2, num_splits=None, fold=0, loader={})
    module = Digits(SimpleNamespace(seed=1, data=data), in_memory=False)
    module.setup("fit")
    batches = iter(module.train_dataloader())
    next(batches)
    print(*(worker.pid for worker in batches._workers), flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_workers_end_with_a_process_that_is_killed(tmp_path):
    """Loader workers end when the process that reads is killed by SIGKILL."""
    (tmp_path / "reads.py").write_text(READS)
    with subprocess.Popen([sys.executable, tmp_path / "reads.py"], stdout=subprocess.PIPE, text=True) as reader:
        workers = [Path("/proc") / pid for pid in reader.stdout.readline().split()]
        assert len(workers) == 2
        reader.kill()
    wait_until(lambda: not any(worker.exists() for worker in workers), 30)


def test_a_complete_folder_may_be_read_only(mnist_root, monkeypatch):
    """A complete folder is used without a lock or a download, although `download` is set."""

    def refuse(*_, **__):
        raise PermissionError("read-only")

    monkeypatch.setattr("filelock.FileLock", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root, who may run the tests, can write anywhere
    module = MNIST(data_config(mnist_root), download=True)
    module.prepare_data()
    assert sizes(on_rank(module)) == (360, 40, 100)


def test_a_class_of_one_picture_leaves_no_set_empty(tmp_path):
    """It is in the training set, and pictures of another class are held out instead."""
    for number in range(10):
        draw(tmp_path / ("b" if number == 9 else "a") / f"{number}.png", number)
    for seed in range(3):
        module = on_rank(ImageFolder(data_config(tmp_path, seed), image_size=8))
        assert sizes(module) == (8, 1, 1)
        assert set(module.dataset("train").labels.tolist()) == {0, 1}


def test_pictures_of_floats_are_refused():
    """Also if they have the right size: training would not normalise them, and the server would."""

    class Floats(ImageData):
        def read(self):
            return {"all": Samples(np.zeros((20, 8, 8), np.float32), np.arange(20) % 2)}

    with pytest.raises(ValueError, match=r"Pixels must be uint8 .*, not float32"):
        on_rank(Floats(data_config(), ImageSpec(8, 8, "L")))
