"""`auto` in the params of a network: the data module provides the number, and `cfg.yaml` records it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from deeplightning.config.examine import examine, load_config
from deeplightning.config.explain import explain
from deeplightning.faults import ConfigError
from deeplightning.image_spec import ImageSpec
from deeplightning.run.assemble import init_module
from deeplightning.run.resolve_auto import fill

SPEC = ImageSpec(width=6, height=4, mode="RGB")
AUTO = "model.network.params={num_classes: auto, num_channels: auto, image_size: auto}"


def test_a_run_keeps_the_numbers_and_resumes(train):
    """`cfg.yaml` has the numbers that the data module declares; `resume_ckpt: auto` finds the run of this config."""
    first = train(AUTO, "train.num_epochs=1", "logger.params.experiment_name=Auto")
    kept = yaml.safe_load((first.folder / "cfg.yaml").read_text())["model"]["network"]["params"]
    assert kept == {"num_classes": 10, "num_channels": 1, "image_size": 8}
    assert "model.network.params.num_classes: auto → 10 (class_names of deeplightning.data.digits.Digits)" in first.out
    again = train(AUTO, "train.num_epochs=1", "logger.params.experiment_name=Auto", "train.resume_ckpt=auto")
    assert again.folder == first.folder


def test_check_explain_and_a_dry_run_accept_auto(tiny, command, place):
    """`check` accepts `auto` where a number is expected; `explain` names its source; a dry run resolves it."""
    report = examine(tiny, [AUTO])
    assert report.faults == []
    source = "from image_spec of deeplightning.data.digits.Digits"
    shown = explain(report)
    assert "num_channels: auto" in shown
    assert [shown.count(source), shown.count(source.replace("image_spec", "image_spec or array_spec"))] == [1, 1]
    means = f"  means       a number, resolved at run start {source}\n"
    assert means in explain(report, "model.network.params.image_size")
    wrong = examine(tiny, ["model.network.params={num_classes: some, num_channels: 1, image_size: 8}"]).faults
    assert "takes a whole number here, not the text 'some'" in str(wrong[0])
    command("check", tiny, AUTO, "--dry-run", cwd=place, code=0)


def test_a_network_is_not_built_before_the_data(tiny):
    """In Python the data module must be built first: until then `auto` has no number."""
    cfg = load_config(tiny, [AUTO])
    with pytest.raises(ConfigError, match=r"num_classes: `auto` is filled when the data module is built; call"):
        init_module(cfg, "model")
    init_module(cfg, "data")
    task = init_module(cfg, "model")
    task.configure_model()
    assert task.network(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


DIGITS, KEY = "deeplightning.data.digits.Digits", "model.network.params.num_classes to a number"


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({"class_names": ["a", "b"], "image_spec": SPEC}, [2, 3, [4, 6]]),
        ({"class_names": ["a"]}, f"num_channels: `auto` needs image_spec or array_spec of {DIGITS}, which"),
        ({}, f"num_classes: `auto` needs class_names of {DIGITS}, which the data module does not declare; set {KEY}"),
    ],
)
def test_what_a_data_module_does_not_declare_is_named(tiny, declared, expected):
    """The error has the key, the attribute that the data module lacks, and what to write instead."""
    cfg = load_config(tiny, [AUTO])
    data = SimpleNamespace(prepare_data=lambda: None, setup=lambda stage: None, **declared)
    if isinstance(expected, list):
        fill(cfg, data)
        assert list(cfg.model.network.params.values()) == expected
    else:
        with pytest.raises(ConfigError) as caught:
            fill(cfg, data)
        assert expected in str(caught.value)


def test_a_vocabulary_is_known_when_the_texts_are_read(tiny):
    """If a number is not declared before, the data are prepared and set up, unless reading is forbidden."""
    cfg = load_config(tiny)
    cfg.model.network.params = {"vocabulary_size": "auto", "width": 3}
    calls = []
    data = SimpleNamespace(prepare_data=lambda: calls.append("prepare"), text_spec=None)
    data.setup = lambda stage: (calls.append(stage), setattr(data, "text_spec", SimpleNamespace(size=99)))
    fill(cfg, data, read=False)
    assert (cfg.model.network.params["vocabulary_size"], calls) == ("auto", [])
    fill(cfg, data)
    assert (cfg.model.network.params, calls) == ({"vocabulary_size": 99, "width": 3}, ["prepare", "fit"])


def test_class_names_may_be_an_array(tiny):
    """NumPy's arrays have no truth value; their length counts."""
    cfg = load_config(tiny)
    cfg.model.network.params = {"num_classes": "auto"}
    fill(cfg, SimpleNamespace(class_names=np.array(["a", "b", "c"])))
    assert cfg.model.network.params["num_classes"] == 3
