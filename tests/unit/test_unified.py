"""`lightning` means `pytorch_lightning`, in own code, configs and installed modules."""

import importlib
import itertools
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import lightning_fabric
import pytest
import pytorch_lightning as pl

from deeplightning import own_code
from deeplightning.config.examine import examine

CONFIG = """\
data: {module: {type: unified_parts.Data}, batch_size: 8}
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: torch.nn.Linear, params: {in_features: 4, out_features: 2}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.1}}
  loss: {type: torch.nn.CrossEntropyLoss}
train:
  num_epochs: 1
  callbacks: [{type: lightning.pytorch.callbacks.Timer}, {type: unified_parts.Own, params: {every: 2}}]
"""
PARTS = """\
import lightning
import lightning as L
import lightning.fabric
import lightning.pytorch
import lightning.pytorch as pl
import lightning.pytorch.callbacks as callbacks
import lightning.pytorch.utilities.seed
from lightning import Trainer, pytorch
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch.callbacks import Callback


class Data(L.LightningDataModule):
    def __init__(self, cfg):
        super().__init__()


class Own(lightning.pytorch.callbacks.Timer):
    def __init__(self, every):
        super().__init__()


def inside():
    from lightning.pytorch import LightningModule

    return LightningModule


FOUND = [L.LightningModule, pl.LightningModule, pytorch.LightningModule, lightning.LightningModule, inside()]
SAME = [L.Trainer, Trainer, pl.Trainer]
"""


@pytest.fixture(params=["not installed", "installed"])
def parts(request, tmp_path, monkeypatch):
    """Own code and a library that import `lightning` in each form, with and without the package installed."""
    own, installed = tmp_path / "own", tmp_path / "installed"
    own.mkdir()
    (own / "unified_parts.py").write_text(PARTS)
    (own / "config.yaml").write_text(CONFIG)
    (installed / "lightning" / "pytorch").mkdir(parents=True)
    (installed / "lightning" / "__init__.py").write_text("NAME = 'the package'\n")
    (installed / "lightning" / "pytorch" / "__init__.py").write_text("class LightningModule: ...\n")
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "third_party.py").write_text(PARTS)
    monkeypatch.chdir(own)
    if request.param == "installed":
        monkeypatch.syspath_prepend(installed)
    monkeypatch.syspath_prepend(tmp_path / "libraries")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
        monkeypatch.delitem(sys.modules, name)
    before, names = own_code.original_roots(), {*sys.modules}
    own_code.use_import_roots(own)
    yield request.param
    own_code.use_import_roots(*before)
    for name in {*sys.modules} - names:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("name", ["unified_parts", "third_party"])
def test_every_form_of_the_import_gives_the_classes_of_pytorch_lightning(parts, name):
    """Each form works in own code and in a library, inside a function, and if the package `lightning` is installed."""
    module = importlib.import_module(name)
    assert {pl.LightningModule} == {*module.FOUND}
    assert {pl.Trainer} == {*module.SAME}
    assert module.callbacks is pl.callbacks
    assert module.Callback is pl.Callback
    assert module.seed_everything is lightning_fabric.utilities.seed.seed_everything
    assert own_code.UNIFIED in sys.modules
    assert {each.__spec__.name for each in (pl, pl.callbacks)} == {"pytorch_lightning", "pytorch_lightning.callbacks"}
    with pytest.raises(ModuleNotFoundError, match=r"lightning\.app"):
        importlib.import_module("lightning.app")


def test_check_reads_the_same_names(parts):
    """Wrong params of a class from `lightning` are found with and without imports."""
    for importing, name in itertools.product((False, True), ("unified_parts", "third_party")):
        overrides = [f"data.module.type={name}.Data", f"train.callbacks.1.type={name}.Own"]
        assert examine("config.yaml", overrides, importing=importing).faults == []
        wrong = [*overrides, "train.callbacks.1.params.evry=2"]
        (fault,) = examine("config.yaml", wrong, importing=importing).faults
        assert f"{name}.Own has no param `evry`. Did you mean every?" in str(fault)


def test_a_package_that_was_imported_before_stays(parts, monkeypatch):
    """A `lightning` package that was imported before, as in a notebook, is kept: the two packages must not be mixed."""
    if parts == "installed":
        spec = PathFinder.find_spec("lightning")
        package = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "lightning", package)
        spec.loader.exec_module(package)
        assert importlib.import_module("lightning.pytorch").LightningModule is not pl.LightningModule


def test_a_package_of_the_users_that_is_called_lightning_stays_theirs(parts):
    """A user's own module `lightning` takes precedence over the packages."""
    Path("lightning.py").write_text("HEIGHT = 3\n")
    Path("weather.py").write_text("from lightning import HEIGHT\n")
    importlib.invalidate_caches()
    assert importlib.import_module("weather").HEIGHT == 3
