"""`type: Adam` in a config is `torch.optim.Adam`: `deeplightning.config.short_names`."""

from pathlib import Path

import pytest

from deeplightning.config.examine import check, examine
from deeplightning.config.explain import explain
from deeplightning.config.short_names import MODULES
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.config.trust import run_config
from deeplightning.faults import CheckpointError
from deeplightning.runfolder import RunFolder

BASE = Path(__file__).parents[2] / "configs" / "base.yaml"


@pytest.mark.parametrize(
    ("override", "full"),
    [
        ("model.optimizer.type=AdamW", "torch.optim.AdamW"),
        ("model.loss.type=NLLLoss", "torch.nn.NLLLoss"),
        ("model.network.type=resnet18", "torchvision.models.resnet18"),
        ("model.network.type=SimpleCNN", "deeplightning.model.cnn.SimpleCNN"),
        ("logger.type=TensorBoardLogger", "pytorch_lightning.loggers.TensorBoardLogger"),
        ("train.callbacks.0.type=Timer", "pytorch_lightning.callbacks.Timer"),
        ("train.callbacks.0.type=EMA", "deeplightning.callbacks.average.EMA"),
        ("train.callbacks.0.type=Watchdog", "deeplightning.callbacks.watch.Watchdog"),
        ("model.optimizer.type=own.Adam", "own.Adam"),
        ("data.module.type=Digits", "Digits"),
        ("model.loss.type=Linear", "Linear"),
    ],
)
def test_a_short_name_is_that_of_a_module_of_its_section(override, full):
    """Names with a dot, those of other sections and what is no loss stay as they are."""
    found = plain(read(BASE, ["train.callbacks=[{type: own.Callback}]", override]).root)
    for key in override.partition("=")[0].split("."):
        found = found[int(key) if key.isdecimal() else key]
    assert found == full


def test_it_holds_for_several_by_name_and_not_inside_params():
    """`model.loss.NAME.type` is one; a target inside params has its full name."""
    several = "model.loss={a: {type: NLLLoss}, b: {type: CrossEntropyLoss, params: {type: NLLLoss}}}"
    losses = plain(read(BASE, [several]).root)["model"]["loss"]
    assert [losses["a"]["type"], losses["b"]["type"]] == ["torch.nn.NLLLoss", "torch.nn.CrossEntropyLoss"]
    assert losses["b"]["params"] == {"type": "NLLLoss"}


def test_the_manual_names_every_section():
    """The table of short names has each section, and names each module."""
    page = (BASE.parents[1] / "docs" / "reference" / "targets.md").read_text().partition("## Short names")[2]
    rows = [row for row in page.partition("\nCase matters")[0].splitlines() if row.startswith("| `")]
    assert {key for row in rows for key in row.split("|")[1].replace("`", "").replace(" ", "").split(",")} == {*MODULES}
    named = {f"`{module.removesuffix('.*')}`" for modules in MODULES.values() for module in modules}
    assert {name for name in named if name not in page} == {"`deeplightning.launch`"}  # Local alone


@pytest.mark.slow
def test_explain_has_both_names():
    """And the effective config the full one; what a search freezes keeps the word, which means the same."""
    report = examine(BASE, ["model.optimizer.type=SGD"])
    assert report.checked().public()["model"]["optimizer"]["type"] == "torch.optim.SGD"
    assert "type: torch.optim.SGD" in explain(report)
    assert "override model.optimizer.type=SGD, from SGD" in explain(report)
    assert plain(read(BASE, ["model.optimizer.type=SGD"]).root, written=True)["model"]["optimizer"]["type"] == "SGD"


@pytest.mark.parametrize(
    ("override", "note"),
    [
        ("logger.type=TensorboardLogger", "pytorch_lightning.loggers has no `TensorboardLogger`. Did you mean "
         "pytorch_lightning.loggers.TensorBoardLogger?"),
        ("model.network.type=resnet18", "`resnet18` is ambiguous: torchvision.models.resnet18, "
         "torchvision.models.quantization.resnet18; write one of them in full"),
        ("model.optimizer.type=AdmaW", "torch.optim has no `AdmaW`. Did you mean torch.optim.AdamW?"),
        ("model.optimizer.type=adam", "`adam` is not a MODULE.NAME such as torch.optim.SGD. Did you mean "
         "torch.optim.Adam?"),
        ("model.loss.type=Linear", "`Linear` is not a MODULE.NAME such as torch.optim.SGD."),
    ],
)  # fmt: skip
def test_a_name_that_is_none_or_several_is_refused(override, note, monkeypatch):
    """One fault, with the candidates or the nearest."""
    monkeypatch.setitem(MODULES, "model.network", ("torchvision.models", "torchvision.models.quantization"))
    (fault,) = examine(BASE, [override]).faults
    assert str(fault) == f"override {override}: {override.partition('=')[0]}: {note}"


def test_a_foreign_run_gains_nothing_by_a_short_name(tmp_path, monkeypatch):
    """A run's config is judged with the full name: a function of torchvision's that makes a network is refused."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    foreign = BASE.read_text().replace("deeplightning.model.cnn.SimpleCNN", "resnet18")
    folder = RunFolder(tmp_path)
    folder.config.write_text(foreign.replace("num_channels: 1, image_size: 8", "weights: DEFAULT"))
    with pytest.raises(CheckpointError, match=r"to use this run, torchvision\.models\.resnet18"):
        check(run_config(folder))
