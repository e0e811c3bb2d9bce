"""The Python API: `train` trains in a child process and returns a run with its files, metrics and predictions."""

import io
import json
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from conftest import TINY
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file
from served import wait_until
from sklearn.datasets import load_digits

import deeplightning as dl
from deeplightning import own_code
from deeplightning.api import _command_arguments
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.faults import CheckpointError, ConfigError, RunError, UserError
from deeplightning.process.child import watch
from deeplightning.run.load import trained_task
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.user_calls import TrackedRun, UserCalls

SCRIPT = """\
import deeplightning as dl
try:
    dl.train({config!r}, {overrides!r})
except KeyboardInterrupt:
    print("alive after KeyboardInterrupt", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("a notebook")


@pytest.fixture(scope="module")
def config(folder):
    return yaml.safe_load(TINY.replace("STORE", str(folder / "runs")))


@pytest.fixture(scope="module")
def run(config):
    return dl.train(config, ["train.export=true", "train.num_epochs=3", "stages=[train, test]"])


@pytest.fixture(scope="module")
def digits():
    """Images of digits, uint8 (200, 8, 8)."""
    return np.rint(load_digits().images[:200] * 255 / 16).astype(np.uint8)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_a_run_knows_its_state(run, folder):
    """A run has a folder, an id and a status; its `results` and `metrics` match the files in the folder."""
    assert run.folder.parent.name == run.id
    assert run.folder.is_relative_to(folder)
    assert run.status == "FINISHED"
    assert repr(run) == f"Run({run.id!r}, FINISHED)"
    assert {"test_acc", "test_loss"} <= run.results.keys()
    metrics = run.metrics
    assert metrics.index.name == "step"
    assert metrics["val_loss"].dropna().shape == (3,)
    assert metrics["test_acc"].dropna().tolist() == [pytest.approx(run.results["test_acc"])]
    assert dl.load_run(run.folder).metrics.equals(metrics)


def test_the_config_of_a_run_can_be_changed_and_used_again(run):
    """`run.config` is an OmegaConf object that `load_config` accepts; it gives the same config as `cfg.yaml`."""
    assert OmegaConf.is_config(run.config)
    assert run.config.train.num_epochs == 3
    again = dl.load_config(run.config, ["train.num_epochs=9"])
    kept = dl.load_config(run.folder / "cfg.yaml")
    assert (again.train.num_epochs, kept.train.num_epochs) == (9, 3)
    again.train.num_epochs = 3
    assert again.public() == kept.public()


def test_predictions_are_those_of_the_network(run, digits):
    """The probabilities of 200 images match plain torch with the weights of the bundle, to 1e-5."""
    network, stored = run.network(), load_file(run.bundle / "weights.safetensors")
    assert not network.training
    for name, value in network.state_dict().items():
        assert torch.equal(value, stored[f"network.{name}"]), name
    task, _, _ = trained_task(RunFolder(run.folder))
    with torch.inference_mode():
        expected = task.inference_model()(torch.from_numpy(digits)[:, None]).numpy()  # (200, 10)
    answers = run.predict(list(digits), top_k=10)
    found = np.zeros((200, 10))
    for row, answer in zip(found, answers, strict=True):
        for one in answer["predictions"]:
            row[one["class"]] = one["probability"]
    assert np.abs(found - expected).max() < 1e-5


def test_a_picture_may_be_a_path_bytes_an_image_or_an_array(run, digits, tmp_path):
    """All forms of one image get the same answer; a Pillow image may also be CMYK, which PNG does not support."""
    file, grey = tmp_path / "a digit.png", Image.fromarray(digits[0])
    file.write_bytes(png(digits[0]))
    inputs = [file, str(file), png(digits[0]), grey, digits[0], digits[0][:, :, None]]
    *answers, cmyk = run.predict([*inputs, grey.convert("RGB").convert("CMYK")])
    assert {answer["label"] for answer in answers} == {cmyk["label"]}
    probabilities = [float(answer["predicted_probability"]) for answer in answers]
    assert probabilities == pytest.approx([probabilities[0]] * 6, abs=1e-6)
    assert run.predict([]) == []
    assert len(run.predict([file], top_k=2)[0]["predictions"]) == 2


@pytest.mark.parametrize(
    ("inputs", "kind", "message"),
    [
        ("a.png", TypeError, "inputs is a str; give a list of inputs"),
        ([b"no picture"], ValueError, "input 0: "),
        ([np.zeros((8, 8), np.uint8), np.zeros((8, 8))], ValueError, "input 1: an array of a picture is uint8"),
        ([np.zeros(8, np.uint8)], ValueError, "input 0: an array of a picture is uint8 (H, W) or (H, W, C)"),
        ([3], ValueError, "input 0: a picture is a path, bytes, a Pillow image or an array, not int"),
    ],
)
def test_an_invalid_input_is_reported_by_its_position(run, inputs, kind, message):
    with pytest.raises(kind) as caught:
        run.predict(inputs)
    assert str(caught.value).startswith(message)


def test_faults_are_exceptions(config, capfd, tmp_path):
    """An invalid or missing config and a missing run raise an exception; nothing is printed to stderr."""
    with pytest.raises(ConfigError) as caught:
        dl.train(config | {"seed": "seven"}, ["train.num_epoch=3"])
    assert "dict: seed: must be a whole number or null, not the text 'seven'" in str(caught.value)
    assert "train.num_epoch: unknown key. Did you mean num_epochs?" in str(caught.value)
    assert len(caught.value.faults) == len(str(caught.value).splitlines()) == 2
    assert "unknown key" not in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"missing\.yaml: there is no such config file"):
        dl.train(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match=r"dict: a config may contain texts, numbers, .* not float64 such as"):
        dl.train(config | {"seed": np.float64(1)})
    with pytest.raises(CheckpointError, match="There is no run folder"):
        dl.load_run(tmp_path / "nothing")


def test_a_training_that_is_killed_is_an_exception_with_its_exit_code():
    """The message has the exit code and quotes the last line of stderr as such, not as the cause."""
    code = "import os, sys; print('a warning', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    with pytest.raises(RunError, match="the command ended with exit code 137; its last line: a warning"):
        watch([sys.executable, "-c", code], {}, "nothing")


def test_a_changed_config_trains_and_a_failed_training_is_an_exception(config, tmp_path, monkeypatch):
    """The exception names file and line in the user's code; `cfg.yaml` keeps references to environment variables."""
    (tmp_path / "loss_of_mine.py").write_text(
        "from torch import nn\nclass Bad(nn.Module):\n    def forward(self, logits, labels):\n"
        "        raise RuntimeError('of mine')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_NAME", "from the environment")
    named = ["logger.params.experiment_name=${oc.env:A_NAME}", f"logger.params.tracking_uri='{tmp_path}/runs'"]
    changed = dl.load_config(config, ["train.num_epochs=5", "model.loss={type: loss_of_mine.Bad}", *named])
    changed.train.num_epochs = 1
    with pytest.raises(UserError, match=r"loss_of_mine\.py:4: RuntimeError: of mine") as caught:
        dl.train(changed)
    assert caught.value.exit_code == 5
    (folder,) = tmp_path.glob("runs/*/*/artifacts")
    run = dl.load_run(folder)
    assert (run.status, run.config.train.num_epochs) == ("FAILED", 1)
    assert "experiment_name: ${oc.env:A_NAME}" in (folder / "cfg.yaml").read_text()
    assert run.config.logger.params.experiment_name == "from the environment"


@pytest.mark.parametrize("kill", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_run_ends_with_a_checkpoint_when_its_program_is_interrupted_or_killed(kill, config, tmp_path):
    """The run is KILLED and has `last.ckpt`; on Ctrl-C the program itself gets a KeyboardInterrupt and continues."""
    overrides = ["train.num_epochs=100000", f"logger.params.tracking_uri={tmp_path / 'runs'}"]
    program = tmp_path / "train it.py"
    program.write_text(SCRIPT.format(config=config, overrides=overrides))
    process = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=tmp_path
    )
    assert any(line.startswith("epoch 1 of") for line in process.stdout), "the program ended before its first epoch"
    process.send_signal(kill)
    if kill == signal.SIGINT:
        rest, _ = process.communicate(timeout=60)
        assert (process.returncode, "alive after KeyboardInterrupt" in rest) == (0, True)
    else:
        process.wait()
        process.stdout.close()
    (folder,) = (tmp_path / "runs").glob("*/*/artifacts")
    wait_until(lambda: dl.load_run(folder).status != "RUNNING", 60)
    assert dl.load_run(folder).status == "KILLED"
    assert (folder / "last.ckpt").is_file()


def test_overrides_of_a_dict_choose_options():
    """An override chooses an option of a group also if the config is a dict."""
    images = "pkg://deeplightning/configs/images.yaml"
    with _command_arguments({"_base_": images}, ["model=vit", "seed=3"]) as (words, _):
        found = read(words[0], words[1:])
    assert (found.faults, plain(found.root)) == ([], plain(read(images, ["model=vit", "seed=3"]).root))


def test_all_errors_of_a_config_are_raised():
    """As many as a report has."""
    code = "import sys\nfor n in range(201): print(f'error: {n}', file=sys.stderr)\nsys.exit(2)"
    with pytest.raises(ConfigError) as caught:
        watch([sys.executable, "-c", code], {}, "nothing")
    assert len(caught.value.faults) == 201


def test_a_training_does_not_join_the_run_of_a_trainer_in_this_process(config, monkeypatch):
    """`trainer.fit` leaves MLflow's variables; a child would overwrite the checkpoints of that run."""
    names = {"MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID"}
    for name in names:
        monkeypatch.delenv(name, raising=False)
    calls, seen = UserCalls(), {}
    calls.take_over()
    calls.expect(TrackedRun("sqlite:////none/mlflow.db", "a" * 32, "0"))
    assert "MLFLOW_RUN_ID" in os.environ
    monkeypatch.setattr("deeplightning.api.watch", lambda *_: seen.update(os.environ))
    with pytest.raises(RunError):  # no run folder is printed
        dl.train(config)
    assert not names & seen.keys()


def test_loading_a_network_leaves_the_random_numbers_alone(run):
    """The seed of a run does not affect the caller's random numbers."""

    def numbers(call):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        call()
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert numbers(run.network) == numbers(lambda: None)


def test_the_folders_of_a_config_come_before_those_of_an_earlier_one(config, monkeypatch):
    """Modules of the same name are those that `load_config` finds."""
    cfg = dl.load_config(config)
    cfg.roots = ["/here", "/b", "/a"]
    monkeypatch.setattr(own_code, "_added", ["/here", "/a"])
    with _command_arguments(cfg, []) as (_, environment):
        assert json.loads(environment[own_code.ROOTS]) == ["/here", "/b", "/a"]


def test_a_grey_image_of_many_bits_is_answered_as_its_file(run, digits):
    """PNG has no floats and no 32 bits; the answer is that of the picture in 8 bits."""
    deep = [Image.fromarray(digits[0].astype(np.float32)), Image.fromarray(digits[0].astype(np.int32) * 257)]
    plain, *found = run.predict([digits[0], *deep])
    assert found == [plain, plain]
