"""`lightning` means `pytorch_lightning` in own code and configs, and what is installed everywhere else."""

import importlib
import sys
from pathlib import Path

import lightning_fabric
import pytest
import pytorch_lightning as pl

from deeplightning import own_code
from deeplightning.checks.examine import examine

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
    """Own code that imports `lightning` in each form, where the package is installed and where it is not."""
    own, installed = tmp_path / "own", tmp_path / "installed"
    own.mkdir()
    (own / "unified_parts.py").write_text(PARTS)
    (own / "config.yaml").write_text(CONFIG)
    (installed / "lightning" / "pytorch").mkdir(parents=True)
    (installed / "lightning" / "__init__.py").write_text("NAME = 'the package'\n")
    (installed / "lightning" / "pytorch" / "__init__.py").write_text("class LightningModule: ...\n")
    (installed / "third_party.py").write_text("import lightning as L\nimport lightning.pytorch as pl\n")
    monkeypatch.chdir(own)
    if request.param == "installed":
        monkeypatch.syspath_prepend(installed)
    before, names = own_code.original_roots(), {*sys.modules}
    own_code.use_import_roots(own)
    yield request.param
    own_code.use_import_roots(*before)
    for name in {*sys.modules} - names:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_every_form_of_the_import_gives_the_classes_of_pytorch_lightning(parts):
    """Also inside a function, also where the package `lightning` is installed."""
    module = importlib.import_module("unified_parts")
    assert {pl.LightningModule} == {*module.FOUND}
    assert {pl.Trainer} == {*module.SAME}
    assert module.callbacks is pl.callbacks
    assert module.Callback is pl.Callback
    assert module.seed_everything is lightning_fabric.utilities.seed.seed_everything
    assert own_code.UNIFIED in sys.modules


def test_check_reads_the_same_names(parts):
    """By the source alone and with imports: wrong params of a class from `lightning` are found."""
    for importing in (False, True):
        assert examine("config.yaml", [], importing=importing).faults == []
        (fault,) = examine("config.yaml", ["train.callbacks.1.params.evry=2"], importing=importing).faults
        assert "unified_parts.Own has no param `evry`. Did you mean every?" in str(fault)


def test_an_installed_module_gets_the_installed_package(parts):
    """The alias is for own code alone."""
    if parts == "not installed":
        with pytest.raises(ModuleNotFoundError, match="lightning"):
            importlib.import_module("lightning")
        return
    third_party = importlib.import_module("third_party")
    assert third_party.L.NAME == "the package"
    assert third_party.pl.LightningModule is not pl.LightningModule


def test_a_package_of_the_users_that_is_called_lightning_stays_theirs(parts):
    """Own code comes first."""
    Path("lightning.py").write_text("HEIGHT = 3\n")
    Path("weather.py").write_text("from lightning import HEIGHT\n")
    importlib.invalidate_caches()
    assert importlib.import_module("weather").HEIGHT == 3
