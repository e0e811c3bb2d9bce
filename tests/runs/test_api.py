"""`deeplightning` from Python: training in a process of its own, and what a run gives back."""

import io
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import yaml
from conftest import TINY
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits

import deeplightning as dl
from deeplightning.faults import CheckpointError, ConfigError, RunError, UserError
from deeplightning.process.child import watch
from deeplightning.run.load import trained_task
from deeplightning.runfolder import RunFolder

SCRIPT = """\
import os, sys
import deeplightning as dl
print("parent", os.getpid(), flush=True)
try:
    run = dl.train({config!r}, {overrides!r})
except KeyboardInterrupt:
    print("interrupted, and alive", flush=True)
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
    """Pictures of digits, uint8 (200, 8, 8)."""
    return np.rint(load_digits().images[:200] * 255 / 16).astype(np.uint8)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_a_run_knows_its_state(run, folder):
    """Folder, id and status; results and metrics are those of the files that the run has left."""
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
    """It is an OmegaConf object, which `load_config` takes: the same config as that of the file."""
    assert OmegaConf.is_config(run.config)
    assert run.config.train.num_epochs == 3
    again = dl.load_config(run.config, ["train.num_epochs=9"])
    kept = dl.load_config(run.folder / "cfg.yaml")
    assert (again.train.num_epochs, kept.train.num_epochs) == (9, 3)
    again.train.num_epochs = 3
    assert again.public() == kept.public()


def test_predictions_are_those_of_the_network(run, digits):
    """200 pictures, as plain torch computes them with the weights of the bundle, to 1e-5."""
    network, held = run.network(), load_file(run.bundle / "weights.safetensors")
    assert not network.training
    for name, value in network.state_dict().items():
        assert torch.equal(value, held[f"network.{name}"]), name
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
    file = tmp_path / "a digit.png"
    file.write_bytes(png(digits[0]))
    inputs = [file, str(file), png(digits[0]), Image.fromarray(digits[0]), digits[0], digits[0][:, :, None]]
    answers = run.predict(inputs)
    assert all(answer["label"] == answers[0]["label"] for answer in answers)
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
def test_what_is_no_picture_is_named(run, inputs, kind, message):
    with pytest.raises(kind) as caught:
        run.predict(inputs)
    assert str(caught.value).startswith(message)


def test_faults_are_exceptions(config, capfd, tmp_path):
    """Of a config, a file, a run that fails, and a run that is not there; the note is in the exception alone."""
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
    """The last line before the end, such as a warning, does not pass for the reason."""
    code = "import os, sys; print('a warning', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    with pytest.raises(RunError, match="the command ended with exit code 137; its last line: a warning"):
        watch([sys.executable, "-c", code], {}, "nothing")


def test_a_config_object_that_was_changed_is_what_trains_and_a_training_that_fails_is_an_exception(
    config, tmp_path, monkeypatch
):
    """The exception has the place in own code; the run keeps a reference where a value is from the environment."""
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


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_a_run_ends_with_a_checkpoint_when_its_program_is_interrupted_or_killed(kill, config, tmp_path):
    """A program that gets Ctrl-C lives on with KeyboardInterrupt."""
    overrides = ["train.num_epochs=100000", f"logger.params.tracking_uri={tmp_path / 'runs'}"]
    program = tmp_path / "train it.py"
    program.write_text(SCRIPT.format(config=config, overrides=overrides))
    process = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=tmp_path
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("epoch 1 of"):
            break
    else:
        raise AssertionError("".join(lines))
    process.send_signal(kill)
    if kill == signal.SIGINT:
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "interrupted, and alive" in rest
    else:
        process.wait()
        process.stdout.close()
    (folder,) = (tmp_path / "runs").glob("*/*/artifacts")
    ends = time.monotonic() + 60
    while dl.load_run(folder).status == "RUNNING" and time.monotonic() < ends:
        time.sleep(0.1)
    assert dl.load_run(folder).status == "KILLED"
    assert (folder / "last.ckpt").is_file()


def test_a_picture_may_have_the_colours_of_print(run, digits):
    """PNG has no CMYK."""
    grey = Image.fromarray(digits[0])
    one, other = run.predict([grey, grey.convert("RGB").convert("CMYK")])
    assert one["label"] == other["label"]
