"""`deeplightning serve` finds a run by any of its names, and serves its bundle, or its checkpoint without a bundle."""

import csv
import json
import os
import re
import shutil
import signal
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from commands import python

from deeplightning.cli.deploy import command as command_of
from deeplightning.config.own_runs import note_own
from deeplightning.config.schema import Serve, keys
from deeplightning.faults import CheckpointError, ConfigError
from deeplightning.own_code import ROOTS
from deeplightning.runfolder import RunFolder
from serve.__main__ import options_parser

ROOT = Path(__file__).parents[2]
DIGITS = sorted((ROOT / "examples" / "digits").glob("*.png"))

# A network that ONNX cannot express, and one whose export gives other answers.
FORKS = """\
import torch
from torch import nn


class Forks(nn.Module):
    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(64, 10) for _ in range(2))

    def forward(self, images):
        return torch.stack([self.ways[int(image.mean() > 0)](image.flatten()) for image in images])


class Differs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, images):
        rows = self.layer(images.flatten(1))
        return -rows if torch.compiler.is_exporting() else rows
"""


@pytest.fixture(scope="module")
def run(train):
    """A run with a bundle."""
    return RunFolder(train("train.export=true", "serve.max_batch=4", "serve.max_wait=2.5").folder)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A working directory with `forks.py`, the user's networks."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "forks.py").write_text(FORKS)
    return folder


@pytest.fixture(scope="module")
def forked(command, tiny, own):
    """The outcome of a training of Forks, which has no bundle."""
    network = "model.network={type: forks.Forks}"
    return command("train", tiny, "~model.network", network, "train.export=true", cwd=own, code=0)


def flags(run, overrides=()):
    """Return the server's arguments after the run's folder."""
    return command_of(str(run.path), overrides)[5:]


def copied(run, folder, *left_out):
    return RunFolder(shutil.copytree(run.path, folder, ignore=shutil.ignore_patterns(*left_out)))


def test_a_run_deploys_in_any_spelling(run, store, tracked, tmp_path, monkeypatch):
    """Folder, relative folder, id, `runs:/ID`, `models:/NAME/VERSION` and `@ALIAS`, a copy and a bundle serve the same
    model, with the name of its run. A copy without bundle and samples gets both; other folders are refused."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(store))
    monkeypatch.chdir(run.path.parent)
    tracker = tracked(run.path)
    tracker.client.create_registered_model("deployed")
    tracker.client.create_model_version("deployed", str(run.path), tracker.id)
    tracker.client.set_registered_model_alias("deployed", "best", "1")
    origin = json.loads(run.bundle_card.read_text())["run"]
    assert (origin["id"], origin["name"]) == (tracker.id, tracker.client.get_run(tracker.id).info.run_name)
    assert not run.model.exists()  # `logger.log_model` was not set
    copy = copied(run, tmp_path / "copied run", "bundle", "samples.npz")
    alone = shutil.copytree(run.bundle, tmp_path / "alone")
    in_store = [str(run.path), run.path.name, tracker.id, f"runs:/{tracker.id}", "models:/deployed/1"]
    for spelling in [*in_store, "models:/deployed@best", str(run.bundle), f"runs:/{tracker.id}/bundle"]:
        assert command_of(spelling)[:5] == [sys.executable, "-P", "-m", "serve", str(run.bundle)], spelling
    assert command_of(str(copy.path))[4] == str(copy.bundle)
    assert copy.bundle_weights.read_bytes() == run.bundle_weights.read_bytes()
    assert command_of(str(alone)) == [sys.executable, "-P", "-m", "serve", str(alone)]
    for missing, words in {"models:/deployed@worst": "alias 'worst'", "models:/none/1": "no model 'none'"}.items():
        with pytest.raises(CheckpointError, match=words):
            command_of(missing)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: there is neither a bundle nor a cfg.yaml"):
        command_of(str(tmp_path))


def test_a_bundle_is_served_without_torch(run):
    """Starting the server of a run with a bundle imports neither torch, Lightning nor MLflow."""
    program = (
        "import sys; from deeplightning.cli.deploy import command; command(sys.argv[1]); "
        "print(*sorted({'torch', 'pytorch_lightning', 'mlflow', 'onnxruntime'} & sys.modules.keys()))"
    )
    done = python("-c", program, run.path)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_the_config_sets_the_options_of_the_server(run):
    """The run's config and the command line, which takes precedence, become arguments; the server's defaults do not."""
    assert flags(run) == ["--max-batch=4", "--max-wait=2.5"]
    overrides = ["serve.max_batch=16", "serve.host='::1'", "serve.max_pixels=1_000", "serve.api_key_env=HOME"]
    expected = ["--host=::1", "--max-pixels=1000", "--max-wait=2.5", "--api-key-env=HOME"]
    assert flags(run, overrides) == expected
    hosts = flags(run, ["serve.allowed_hosts=[model.example, 10.0.0.5]"])[-1]
    assert hosts == "--allowed-hosts=model.example,10.0.0.5"


def test_int8_is_made_where_it_is_asked_for(run, tmp_path):
    """A bundle without an int8 model gets one from the run's validation images; the data module must be allowed."""
    copy = copied(run, tmp_path / "copy")
    assert flags(copy, ["serve.precision=int8"])[-1] == "--precision=int8"
    assert copy.bundle_int8.is_file()
    assert command_of(str(copy.path), ["serve.precision=int8"])[4] == str(copy.bundle)
    copy.bundle_int8.unlink()
    copy.config.write_text(copy.config.read_text().replace("deeplightning.data.digits.Digits", "home_made.Digits"))
    words = r"data.module.type: to serve this run, home_made.Digits would be imported"
    with pytest.raises(CheckpointError, match=words):
        command_of(str(copy.path), ["serve.precision=int8"])


def test_only_the_section_of_the_server_is_read(run, tmp_path):
    """Code and variables that other sections of the config need may be missing."""
    copy = copied(run, tmp_path / "copy")
    text = copy.config.read_text().replace("deeplightning.data.digits.Digits", "gone.Digits")
    copy.config.write_text(text.replace("seed: 7", "seed: ${oc.env:NOT_SET_ANYWHERE}"))
    note_own(copy.config)
    assert flags(copy, ["serve.port=0"]) == ["--port=0", "--max-batch=4", "--max-wait=2.5"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("serve.max_btach=3", "serve.max_btach: unknown key. Did you mean max_batch?"),
        ("port=5001", "port: only keys of `serve` can be set when a run is served. Did you mean serve.port?"),
        ("data.batch_size=3", "data.batch_size: only keys of `serve`"),
        ("serve.port=five", "serve.port: must be a whole number, not the text 'five'"),
        ("serve.precision=int4", "serve.precision: must be one of fp32, int8, fp16, not the text 'int4'. Did you"),
        ("serve.device=gpu", "not the text 'gpu'. Did you mean cuda?"),
        ("serve.device=cuda:x", "not the text 'cuda:x'. Did you mean cuda"),
        ("serve.max_wait=0", "serve.max_wait: must be at least 0.1, not 0"),
        ("--prot=5001", "unknown option, see --help"),
    ],
)
def test_a_wrong_override_is_named(override, words, run):
    """An invalid override ends with exit code 2, the override, and the nearest valid word."""
    with pytest.raises(ConfigError) as caught:
        command_of(str(run.path), [override])
    assert f"override {override}: " in str(caught.value)
    assert words in str(caught.value)


def test_the_key_of_the_server_stays_in_its_variable(run, monkeypatch):
    """Only the variable's name is passed on; an unset or empty variable and an invalid name are errors."""
    overrides = ["serve.api_key_env=SERVE_KEY", "serve.max_batch=16", "serve.max_wait=5"]
    monkeypatch.setenv("SERVE_KEY", "a-secret")
    assert flags(run, overrides) == ["--api-key-env=SERVE_KEY"]
    monkeypatch.setenv("SERVE_KEY", "")
    with pytest.raises(ConfigError, match="the variable SERVE_KEY is empty"):
        command_of(str(run.path), overrides)
    monkeypatch.delenv("SERVE_KEY")
    with pytest.raises(ConfigError, match="the variable SERVE_KEY is not set"):
        command_of(str(run.path), overrides)
    monkeypatch.setenv("OTHER", "another_secret")
    for value in ("a-secret", "${oc.env:OTHER}"):
        with pytest.raises(ConfigError) as caught:
            command_of(str(run.path), [f"serve.api_key_env={value}"])
        assert "secret" not in str(caught.value).replace(f"override serve.api_key_env={value}", "")


def test_what_the_user_allows_is_imported(run, tmp_path, monkeypatch):
    """With `--allow` a run without a bundle is exported, and the environment variables of its config do not persist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "allowed.py").write_text("from deeplightning.model.cnn import SimpleCNN\n")
    copy = copied(run, tmp_path / "copy", "bundle")
    text = copy.config.read_text()
    changes = {"type: deeplightning.model.cnn.SimpleCNN": "type: allowed.SimpleCNN", "env: {}": "env: {LD_PRELOAD: x}"}
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    copy.config.write_text(text)
    before = dict(os.environ)
    assert command_of(str(copy.path), allow=["allowed"])[4] == str(copy.bundle)
    roots = json.loads(os.environ[ROOTS])
    assert str(tmp_path) in roots  # the working directory; never the run's folder
    assert str(copy.path) not in roots
    after = {name: os.environ.get(name) for name in {"LD_PRELOAD", *before}}  # libraries may have added others
    assert after | {ROOTS: ""} == {"LD_PRELOAD": None} | before | {ROOTS: ""}
    with pytest.raises(ConfigError, match="--allow takes the name of a module such as own_network, not 'a b'"):
        command_of(str(copy.path / ".."), allow=["a b"])


def test_training_says_that_a_network_cannot_be_exported(forked):
    """The run succeeds without a bundle, and one line has the reason and what answers instead."""
    (line,) = [line for line in forked.err.splitlines() if "bundle" in line]
    reason = "The network cannot be exported to ONNX"
    assert f"none; `deeplightning serve` answers by torch, from the checkpoint: {reason}" in line
    assert not RunFolder(forked.folder).bundle.exists()


def test_other_faults_of_an_export_fail_the_run(command, tiny, own):
    """A network whose export gives other answers ends with exit code 4, and torch is not offered instead."""
    network = ["~model.network", "model.network={type: forks.Differs}"]
    outcome = command("train", tiny, *network, "train.export=true", cwd=own, code=4)
    assert "and the checkpoint give different answers" in outcome.err
    assert "torch" not in outcome.err


def test_a_users_network_needs_permission_on_another_machine(forked, own, command, tmp_path):
    """A network of a run of another machine is not imported without `--allow`: exit code 4, with key and option."""
    outcome = command("serve", forked.folder, cwd=own, XDG_STATE_HOME=str(tmp_path), code=4)
    assert "model.network.type: to serve this run, forks.Forks would be imported" in outcome.err
    assert "If you trust it: --allow forks" in outcome.err


@contextmanager
def served(command, folder, cwd, *arguments):
    """Run `deeplightning serve` on a free port; yield its address and its stderr."""
    server = command.start("serve", folder, "--port=0", *arguments, cwd=cwd)
    try:
        first = server.says("Serving ").splitlines()[0]
        yield re.search(r"http://127[.]0[.]0[.]1:[0-9]+", first)[0], server.files.with_suffix(".err").read_text()
    finally:
        server.signal(signal.SIGTERM)
        outcome = server.end()
    assert outcome.code == 0, outcome


def post(address, path):
    request = urllib.request.Request(f"{address}/predict", path.read_bytes(), {"Content-Type": "image/png"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.parametrize("by", ["bundle", "torch"])
def test_answers_over_http_are_those_of_predict(by, run, forked, own, command):
    """Answers over HTTP equal `deeplightning predict` to 1e-5; one log line says that the CPU answers without a GPU."""
    folder = forked.folder if by == "torch" else run.path
    predicted = command("predict", folder, *DIGITS, cwd=own, code=0)
    with served(command, folder, own, *(["--allow", "forks"] if by == "torch" else [])) as (address, err):
        answers = [post(address, path) for path in DIGITS]
    for row, answer in zip(csv.DictReader(predicted.out.splitlines()), answers, strict=True):
        assert (answer["predicted_class"], answer["label"]) == (row["predicted_class"], row["predicted_label"])
        assert float(answer["predicted_probability"]) == pytest.approx(float(row["predicted_probability"]), abs=1e-5)
    reasons = [line for line in err.splitlines() if line.startswith("torch answers from the checkpoint, at 0.6 GB")]
    assert ["cannot be exported to ONNX" in line for line in reasons] == [True] * (by == "torch")
    assert err.count('"event": "serving on the CPU"') == 1 or torch.cuda.device_count()


@pytest.mark.slow
def test_torch_has_one_thread_when_workers_are_forked(forked, own):
    """Loading and a forward pass leave one thread, so that a fork loses none; three images at once get the answers that
    they get one by one; the samples are the run's."""
    program = (
        "import os, sys, numpy as np; from deeplightning.runfolder import RunFolder; "
        "from deeplightning.torch_server import Checkpoint; "
        "model = Checkpoint.open(RunFolder(sys.argv[1]), ['forks']); "
        "rows = model.predict(model.samples); assert rows.shape == (16, 10) and rows.dtype == np.float32; "
        "singly = [model.predict(model.samples[n : n + 1])[0] for n in range(3)]; "
        "assert np.abs(rows[:3] - singly).max() < 1e-6; assert np.abs(rows.sum(1) - 1).max() < 1e-5; "
        "print(len(os.listdir('/proc/self/task')), model.task, len(model.labels), model.run['checkpoint'])"
    )
    done = python("-c", program, forked.folder, cwd=own)
    assert done.stdout.split() == ["1", "image_classification", "10", "last.ckpt"], done.stderr


@pytest.mark.slow
def test_a_gpu_must_answer_as_the_cpu_does(forked, own):
    """A network that is moved to a GPU must give the CPU's answers to the run's samples. A GPU that cannot be used is
    an error with exit code 3; out of memory is a MemoryError."""
    program = (
        "import sys, torch; from dataclasses import replace; from deeplightning.runfolder import RunFolder; "
        "from deeplightning.torch_server import Checkpoint; from serve.device import Device, DeviceError\n"
        "cpu = Checkpoint.open(RunFolder(sys.argv[1]), ['forks'])\n"
        "try: cpu.moved_to(Device(63, 'H100'))\n"
        "except DeviceError as error: print(error.exit_code, error)\n"
        "class Full(torch.nn.Module):\n"
        "    def forward(self, images): raise torch.OutOfMemoryError('CUDA out of memory')\n"
        "tensor = torch.tensor\n"
        "torch.tensor = lambda values, device: tensor(values)\n"
        "try: replace(cpu, network=Full(), device=Device(0, 'H100')).predict(cpu.samples)\n"
        "except MemoryError as error: print(error)\n"
        "class Other(torch.nn.Module):\n"
        "    def to(self, device): return self\n"
        "    calls = 0\n"
        "    def forward(self, images): self.calls += 1; return torch.ones(1, 1) * self.calls\n"
        "try: replace(cpu, network=Other()).moved_to(Device(0, 'H100'))\n"
        "except DeviceError as error: print(error)\n"
    )
    done = python("-c", program, forked.folder, cwd=own)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first.startswith("3 cuda:63 (H100) cannot be used by torch ")
    assert second == "CUDA out of memory"
    assert "differ by up to 1; the limit is 0.001; use serve.device=cpu" in third


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--precision=int8"], 2, "serve.precision: int8 requires a bundle, which this run cannot have: The netw"),
        (["serve.precision=fp16"], 2, "serve.precision: fp16 requires a bundle, which this run cannot have"),
        pytest.param(["--device=cuda:0"], 3, "serve.device is cuda:0: ", marks=pytest.mark.slow),
    ],
)
def test_what_torch_cannot_serve_is_refused(forked, own, command, options, code, words):
    """A precision that needs a bundle is refused with its key and the reason, a missing GPU with its cause."""
    if code == 3 and torch.cuda.device_count():
        pytest.skip("there is a GPU")
    outcome = command("serve", forked.folder, *options, "--allow=forks", "--port=0", cwd=own, code=code)
    assert words in outcome.err
    assert code == 2 or re.search("no NVIDIA driver|no GPU is visible|built without CUDA", outcome.err)


def test_fp16_is_made_where_it_is_asked_for(run, tmp_path):
    """A bundle without an fp16 model gets one, only once; the server gets precision and device as arguments."""
    copy = copied(run, tmp_path / "copy")
    overrides = ["serve.precision=fp16", "serve.device=cuda:1"]
    assert flags(copy, overrides)[-2:] == ["--device=cuda:1", "--precision=fp16"]
    inode = copy.bundle_fp16.stat().st_ino
    command_of(str(copy.path), overrides)
    assert copy.bundle_fp16.stat().st_ino == inode


def test_the_server_and_the_config_have_the_same_defaults():
    """The server's options have the defaults of the config's keys, so that unset keys need no argument."""
    options = vars(options_parser().parse_args([])) | {"precision": "fp32"}
    defaults = {field.name: getattr(Serve(), field.name) for field in keys(Serve)}
    assert options == defaults


def test_a_run_that_was_trained_further_is_not_served_from_its_former_bundle(train, tmp_path):
    """The bundle of the first training does not answer for the weights of the second."""
    settings = [f"logger.params.tracking_uri={tmp_path / 'mlruns'}", "train.checkpoint.monitor=null"]
    run = RunFolder(train(*settings, "train.num_epochs=1", "train.export=true").folder)
    before = run.bundle_weights.read_bytes()
    more = ["train.num_epochs=2", "train.export=false", f"train.resume_ckpt='{run.path}'"]
    assert train(*settings, *more).folder == run.path
    command_of(str(run.path))
    assert run.bundle_weights.read_bytes() != before
