"""What a config asks for becomes what runs: words are mapped with a notice, what cannot run is refused in words."""

import os

import pytest
import torch
from conftest import digest

from deeplightning.config.fault import ConfigError, SetupError
from deeplightning.configure import load_config
from deeplightning.engine.plan import effective_batch, own_rank, trainer_arguments


@pytest.fixture
def settled(tiny, place, monkeypatch):
    """`settled(override, …)` is the config as it runs."""
    monkeypatch.chdir(place)
    return lambda *overrides: load_config(tiny, list(overrides))


def test_one_process_without_gpus_needs_no_backend(settled):
    """The seed config's `deepspeed_stage_3` with `gpus: null` runs plainly, and says so."""
    cfg = settled("engine.backend=deepspeed_stage_3")
    assert cfg.engine.backend is None
    (notice,) = cfg.notices
    assert notice.text == "engine.backend: deepspeed_stage_3 → null (there is one process and no GPU)"


def test_several_processes_are_ddp(settled):
    """With `processes: 2` a backend that is left out is ddp, and ddp that is given stays."""
    assert settled("engine.processes=2").engine.backend == "ddp"
    cfg = settled("engine.processes=2", "engine.backend=ddp")
    assert (cfg.engine.backend, cfg.notices) == ("ddp", [])
    assert trainer_arguments(cfg)["devices"] == 2
    assert trainer_arguments(cfg)["strategy"]._process_group_backend == "gloo"


@pytest.mark.parametrize(
    ("override", "notice"),
    [
        ("engine={backend: horovod, processes: 2}", "engine.backend: horovod → ddp"),
        ("engine.precision=amp", "engine.precision: amp → 16-mixed"),
        ("engine.precision=16", "engine.precision: 16 → bf16-mixed (half precision on CPU is bf16)"),
        ("engine.gpus=0", "engine.gpus: 0 → null"),
    ],
)
def test_older_words_are_mapped_with_a_notice(override, notice, settled):
    """What runs instead, and why, is said."""
    assert settled(override).notices[0].text.startswith(notice)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("gpus", ["[0, 1]", "1"])
def test_gpus_that_are_not_there_are_refused(gpus, settled):
    """Exit code 3, naming the key, what there is and what to write instead."""
    with pytest.raises(
        SetupError, match=r"engine.gpus: asks for (0, 1|1 GPU), and this machine has none.*engine.gpus=null"
    ) as caught:
        settled(f"engine.gpus={gpus}")
    assert caught.value.exit_code == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_auto_takes_what_is_there(settled):
    """No GPU: the CPU, with a notice."""
    cfg = settled("engine.gpus=auto")
    assert cfg.engine.gpus is None
    assert "this machine has none" in cfg.notices[0].text
    assert not cfg.notices[0].unasked


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["engine.sync_batchnorm=true"], "engine.sync_batchnorm"),
        (["engine.params.bucket_cap_mb=5"], "engine.params"),
    ],
)
def test_what_contradicts_itself_is_refused_by_key(overrides, key, settled):
    """A fault of the config that names the key, exit code 2."""
    with pytest.raises(ConfigError, match=key):
        settled(*overrides)


def test_the_effective_batch_multiplies(settled):
    """Samples per process x processes x accumulated batches."""
    cfg = settled("engine.processes=2", "train.accumulator_factor=4")
    assert effective_batch(cfg) == "128 samples a step: 16 per process x 2 processes x 4 batches accumulated"
    cfg = settled("train.accumulator_factor=4", "train.accumulator_epoch=2")
    assert effective_batch(cfg).endswith("from epoch 2 on")


def test_variables_of_the_config_are_set(settled, monkeypatch):
    """`engine.env` reaches the process."""
    monkeypatch.delenv("MY_SWITCH", raising=False)
    settled("engine.env.MY_SWITCH=on")
    assert os.environ["MY_SWITCH"] == "on"
    monkeypatch.setenv("MY_SWITCH", "")  # so that it is gone afterwards


@pytest.mark.parametrize(
    ("variables", "rank"), [({}, 0), ({"LOCAL_RANK": "1"}, 1), ({"RANK": "3", "LOCAL_RANK": "1"}, 3)]
)
def test_a_process_knows_its_number(variables, rank, monkeypatch):
    """As launchers tell it."""
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert own_rank() == rank


@pytest.mark.parametrize("precision", ["bf16", "64", "bf16-true"])
def test_a_precision_trains(precision, fit):
    """The loss falls, and metrics are numbers."""
    fitted = fit(f"engine.precision={precision}", "train.num_epochs=3")
    losses = [value for _, value in fitted.series("train_loss_epoch")]
    assert losses[-1] < losses[0]


def test_deterministic_algorithms_change_no_weight(fit):
    """On CPU, where all that is used is deterministic anyway."""
    plain = fit("train.num_epochs=1")
    watched = fit("train.num_epochs=1", "engine.deterministic=true")
    torch.use_deterministic_algorithms(False)
    assert digest(plain.folder / "last.ckpt") == digest(watched.folder / "last.ckpt")
