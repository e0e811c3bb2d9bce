"""Six projects in common layouts run unchanged, and gain resume, tracking and an endpoint.

They are in `tests/foreign/projects`: none imports Deep Lightning, and each has a YAML file beside it.
"""

import functools
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import digest, weights

PROJECTS = Path(__file__).parents[1] / "foreign" / "projects"
NAMES = sorted(path.stem for path in PROJECTS.glob("*.yaml"))
KILL = """\
import os
import signal

import pytorch_lightning as pl


class Kill(pl.Callback):
    \"\"\"Kill the process before the fourth batch of the second epoch, once.\"\"\"

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 3) and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A copy of the projects, with a callback that kills the process."""
    folder = tmp_path_factory.mktemp("projects") / "copy"
    shutil.copytree(PROJECTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "kill.py").write_text(KILL)
    return folder


@pytest.fixture(scope="module")
def run(place, command):
    """`run(VERB, …)` runs a command in the folder of the projects; `code` is the expected exit code."""

    def called(*words: object, code: int = 0, ranks: int = 1):
        settings = ["logger.pictures=null"] if words[0] == "train" else []
        settings += ["logger.params.system_metrics=false"] if settings and "logger.type" not in str(words) else []
        return command(*words, *settings, cwd=place, ranks=ranks, code=code)

    return called


@pytest.fixture(scope="module")
def trained(run):
    """`trained(NAME)` is the run of a project, trained once."""
    return functools.cache(lambda name: run("train", f"{name}.yaml", f"logger.params.tracking_uri=store-{name}"))


@pytest.fixture(scope="module")
def plain(place, tmp_path_factory):
    """Weights and metrics of each project after Lightning's own `Trainer.fit`, by name."""
    folder = tmp_path_factory.mktemp("plain")
    subprocess.run([sys.executable, "plain.py", folder], cwd=place, check=True, timeout=600, capture_output=True)
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in NAMES}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("contrastive", "segmentation"))) for name in NAMES]
)
def test_a_project_is_checked_and_trains_as_trainer_fit_trains_it(name, run, trained, plain):
    """On the CPU the weights are equal bit for bit; the last value of each validation metric is printed."""
    assert "error" not in run("check", f"{name}.yaml").err
    ours, expected = trained(name), plain[name]
    found = weights(ours.folder / "last.ckpt")
    assert found.keys() == expected["state_dict"].keys()
    assert [key for key in found if not torch.equal(found[key], expected["state_dict"][key])] == []
    for metric in (m for m in expected["metrics"] if m.startswith("val")):
        assert f"{metric} {expected['metrics'][metric]:.4f}" in ours.out


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_a_project_that_is_killed_inside_an_epoch_ends_with_the_same_weights(name, run, trained, tmp_path, place):
    """It resumes at the end of the first epoch or inside the second one, with the state of the random generators."""
    (place / "killed").unlink(missing_ok=True)
    words = ["train", f"{name}.yaml", f"logger.params.tracking_uri={tmp_path}", "stages=[train]", "train.export=false"]
    words += ["train.callbacks=[{type: kill.Kill}]"]
    words += ["train.checkpoint.every_n_steps=1"] if name in ("autoencoder", "callable_optimizer") else []
    run(*words, code=-signal.SIGKILL)
    resumed = run(*words, "train.resume_ckpt=auto")
    assert digest(resumed.folder / "last.ckpt") == digest(trained(name).folder / "last.ckpt")
    assert "resumes    nothing" not in resumed.out


def test_a_run_of_two_optimizers_that_max_steps_ends_resumes_inside_its_epoch(run, trained, tmp_path):
    """Each batch takes two steps, so `max_steps` may be exceeded; the resumed run completes that epoch."""
    store = f"logger.params.tracking_uri={tmp_path}"
    run("train", "gan.yaml", store, "train.max_steps=11")
    resumed = run("train", "gan.yaml", store, "train.resume_ckpt=auto")
    assert digest(resumed.folder / "last.ckpt") == digest(trained("gan").folder / "last.ckpt")


def test_the_modules_that_take_a_tensor_have_an_endpoint(trained):
    """Training exports a bundle, from `example_input_array` or a validation batch."""
    for name in ("autoencoder", "callable_optimizer"):
        bundle = trained(name).folder / "bundle"
        assert (bundle / "model.onnx").is_file(), trained(name)
