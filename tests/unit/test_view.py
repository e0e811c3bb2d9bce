"""The first things that MLflow's page shows of runs: the view, names and descriptions."""

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
def cfg(here):
    return load_config(BASE)


def test_the_address_names_the_view_with_charts():
    """It also selects the view of trainings, because other views may be the default."""
    assert runs_page("7") == "#/experiments/7/runs?workflowType=machine_learning&compareRunsMode=CHART"


def test_a_run_is_named_by_what_it_is_about(cfg):
    """The network is its class or function, the model name for a library, or the task's class for several networks."""
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


def test_the_description_has_a_summary_and_commands(cfg, tmp_path):
    """It is Markdown with commands for a shell; values of the config are escaped."""
    folder = RunFolder(tmp_path / "a run")
    cfg.data.dataset = "a|<b>_c"
    text = note(cfg, folder, "f" * 32)
    assert text.startswith("**SimpleCNN** on **a\\|\\<b\\>\\_c**: 15 epochs; CPU, fp32.")
    assert f"serve '{folder.path}'" in text


def test_the_description_names_a_run_of_the_default_store_by_its_id(cfg, tmp_path):
    """`deeplightning test ID` finds it from the folder of the store."""
    folder = RunFolder(tmp_path / "mlruns" / "0" / "abc" / "artifacts")
    text = note(cfg, folder, "abc")
    assert f"cd {tmp_path}\n" in text
    assert "deeplightning reproduce abc\n" in text
