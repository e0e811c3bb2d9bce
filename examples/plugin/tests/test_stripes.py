"""The package's own tests: `python -m pytest examples/plugin/tests` where it is installed."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from stripes.draw import NAMES, draw
from stripes.network import StripeNet
from stripes.verb import stripes

import deeplightning as dl
from deeplightning.faults import ConfigError

CONFIG = "pkg://stripes/configs/stripes.yaml"


def test_a_picture_follows_from_its_seed():
    one, other = (draw(2, np.random.RandomState(seed)) for seed in (1, 2))
    assert (one == draw(2, np.random.RandomState(1))).all()
    assert (one != other).any()
    assert (one.dtype, one.shape) == (np.uint8, (16, 16))


def test_the_network_answers_for_each_picture():
    assert StripeNet(4, filters=3)(torch.rand(5, 1, 16, 16)).shape == (5, 4)


def test_the_config_builds_what_it_names():
    """`num_classes: auto` is the number of directions."""
    data = dl.init_module(dl.load_config(CONFIG, ["data.module.params.number=80"]), "data")
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].shape[1:] == (1, 16, 16)
    assert data.class_names == NAMES


def test_too_few_pictures_are_refused():
    with pytest.raises(ConfigError, match="number must be at least 40, not 5"):
        dl.init_module(dl.load_config(CONFIG, ["data.module.params.number=5"]), "data")


def test_the_verb_draws(tmp_path):
    file = tmp_path / "a picture.png"
    assert CliRunner().invoke(stripes, [str(file), "--direction", "rising"]).exit_code == 0
    with Image.open(file) as picture:
        assert picture.size == (16, 16)
    refused = CliRunner().invoke(stripes, [str(tmp_path / "none" / "picture.png")])
    assert (refused.exit_code, "picture.png" in refused.output) == (1, True)
