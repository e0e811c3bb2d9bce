"""What MLflow's page shows of the runs first: view, names and descriptions."""

from dataclasses import replace
from pathlib import Path

import pytest

from deeplightning.callbacks.describe import data_name, engine_summary, network_name, note
from deeplightning.config.examine import load_config
from deeplightning.config.schema import Target
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.monitor import runs_page

BASE = Path(__file__).parents[2] / "configs" / "base.yaml"


@pytest.fixture
def cfg(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return load_config(BASE)


def test_the_address_names_the_view_with_charts():
    """The view of trainings is a part of it, for pages that open otherwise."""
    assert runs_page("7") == "#/experiments/7/runs?workflowType=machine_learning&compareRunsMode=CHART"


def test_a_run_is_named_by_what_it_is_about(cfg):
    """Class or function, the model's name where a library makes it, the task's class for several networks."""
    assert (network_name(cfg), data_name(cfg), engine_summary(cfg)) == ("SimpleCNN", "Digits", "CPU, fp32")
    cfg.data.dataset = "MNIST"
    assert data_name(cfg) == "MNIST"
    cfg.model.network = Target(type="timm.create_model", params={"model_name": "resnet18", "num_classes": 3})
    assert network_name(cfg) == "resnet18"
    cfg.model.network = Target(type="transformers.AutoModel.from_pretrained", params={"name": "org/tiny"})
    assert network_name(cfg) == "tiny"
    cfg.model.network = {"a": Target(type="x.A"), "b": Target(type="x.B")}
    assert network_name(cfg) == "ImageClassification"
    engine = replace(cfg.engine, backend="ddp", processes=2, precision="bf16")
    assert engine_summary(replace(cfg, engine=engine)) == "ddp, 2 CPU, bf16"


def test_the_description_says_what_it_is_and_what_next(cfg, tmp_path):
    """In Markdown: commands that a shell takes; nothing of a config is markup."""
    folder = RunFolder(tmp_path / "a run")
    cfg.data.dataset = "a|<b>_c"
    text = note(cfg, folder, "f" * 32)
    assert text.startswith("**SimpleCNN** on **a\\|\\<b\\>\\_c**: 15 epochs; CPU, fp32.")
    assert f"serve '{folder.path}'" in text


def test_the_description_names_a_run_of_the_default_store_by_its_id(cfg, tmp_path):
    """As `deeplightning test ID` finds it in that folder."""
    folder = RunFolder(tmp_path / "mlruns" / "0" / "abc" / "artifacts")
    text = note(cfg, folder, "abc")
    assert f"cd {tmp_path}\n" in text
    assert "deeplightning reproduce abc\n" in text
