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
    """Names with a dot, names of other sections and classes that are not of the section's kind stay as they are."""
    found = plain(read(BASE, ["train.callbacks=[{type: own.Callback}]", override]).root)
    for key in override.partition("=")[0].split("."):
        found = found[int(key) if key.isdecimal() else key]
    assert found == full


def test_short_names_apply_to_named_targets_but_not_inside_params():
    """`model.loss.NAME.type` may be short; a target inside params needs its full name."""
    override = "model.loss={a: {type: NLLLoss}, b: {type: CrossEntropyLoss, params: {type: NLLLoss}}}"
    losses = plain(read(BASE, [override]).root)["model"]["loss"]
    assert [losses["a"]["type"], losses["b"]["type"]] == ["torch.nn.NLLLoss", "torch.nn.CrossEntropyLoss"]
    assert losses["b"]["params"] == {"type": "NLLLoss"}


def test_the_manual_names_every_section():
    """The table of short names has each section and each module."""
    page = (BASE.parents[1] / "docs" / "reference" / "targets.md").read_text().partition("## Short names")[2]
    rows = [row for row in page.partition("\nCase matters")[0].splitlines() if row.startswith("| `")]
    assert {key for row in rows for key in row.split("|")[1].replace("`", "").replace(" ", "").split(",")} == {*MODULES}
    named = {f"`{module.removesuffix('.*')}`" for modules in MODULES.values() for module in modules}
    assert {name for name in named if name not in page} == {"`deeplightning.launch`"}  # Local alone


@pytest.mark.slow
def test_explain_has_both_names():
    """The effective config has the full name; the frozen config of a search keeps the short one."""
    report = examine(BASE, ["model.optimizer.type=SGD"])
    assert report.checked().public()["model"]["optimizer"]["type"] == "torch.optim.SGD"
    assert "type: torch.optim.SGD" in explain(report)
    assert "override model.optimizer.type=SGD, from SGD" in explain(report)
    assert plain(read(BASE, ["model.optimizer.type=SGD"]).root, written=True)["model"]["optimizer"]["type"] == "SGD"


@pytest.mark.parametrize(
    ("override", "message"),
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
def test_a_name_that_is_none_or_several_is_refused(override, message, monkeypatch):
    """The error has the candidates or the nearest name."""
    monkeypatch.setitem(MODULES, "model.network", ("torchvision.models", "torchvision.models.quantization"))
    (fault,) = examine(BASE, [override]).faults
    assert str(fault) == f"override {override}: {override.partition('=')[0]}: {message}"


def test_a_foreign_run_gains_nothing_by_a_short_name(tmp_path, monkeypatch):
    """The full name decides whether it is trusted: a torchvision function that makes a network is refused."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    foreign = BASE.read_text().replace("deeplightning.model.cnn.SimpleCNN", "resnet18")
    folder = RunFolder(tmp_path)
    folder.config.write_text(foreign.replace("num_channels: 1, image_size: 8", "weights: DEFAULT"))
    with pytest.raises(CheckpointError, match=r"to use this run, torchvision\.models\.resnet18"):
        check(run_config(folder))
