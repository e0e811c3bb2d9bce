"""`bash test.sh --gpu` without a GPU; a resume in half precision over CPU processes; and `tools/gpu_wheels.sh`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import LIMIT_SECONDS, environment
from conftest import digest
from gpu_runs import Runs, spread

from deeplightning.engine.checkpoint_reading import read_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_without_a_gpu_one_line_says_so_and_the_cpu_part_runs():
    """`bash test.sh --gpu` prints a line about the missing GPU and ends with 0; it passes its arguments to pytest."""
    variables = {"DEEPLIGHTNING_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(ROOT / "test.sh"), "--gpu", "-k", "test_the_names_that_the_pretended_device_replaces"]
    done = subprocess.run(command, env=environment() | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done
    assert [line for line in done.stdout.splitlines() if "GPU" in line] == [done.stdout.splitlines()[0]]
    assert done.stdout.startswith("No GPU: torch ")
    assert "1 passed" in done.stdout


HALF = '''\
"""Lets DeepSpeed compute in half precision on a CPU."""


def allow(*_):
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True
'''


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])  # 3: on GPUs, in test_gpu.py
def test_a_resumed_run_of_deepspeed_has_the_loss_scale_that_it_had(stage, tmp_path):
    """A killed run, which skips steps while the scale is too large, ends with the weights of an uninterrupted one."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    runs = Runs(tmp_path)
    (tmp_path / "half.py").write_text(HALF)
    half = {"fp16": {"enabled": True, "initial_scale_power": 26, "hysteresis": 1, "loss_scale_window": 5}}
    settings = [*spread(f"deepspeed_stage_{stage}", None, 2), f"engine.params={json.dumps({'config': half})}"]
    settings += ["engine.setup_hook=half.allow", "data.batch_size=8", "model.optimizer.params.eps=0.0001"]
    settings += ["stages=[train]", "train.export=false", "train.checkpoint.every_n_steps=3", "train.resume_ckpt=auto"]
    straight, killed = ("logger.params.experiment_name=" + name for name in ("straight", "killed"))
    done = runs.train(*settings, straight, limit=LIMIT_SECONDS)
    assert runs.start(*settings, killed, limit=LIMIT_SECONDS, KILL_AT="13").code != 0
    resumed = runs.train(*settings, killed, limit=LIMIT_SECONDS)
    assert "resumes " in resumed.out
    (state,) = read_checkpoint(resumed.folder / "last.ckpt")["optimizer_states"]
    assert state["loss_scale"]["cur_iter"] > 13
    assert state["loss_scale"]["cur_scale"] < 2**26
    assert digest(resumed.folder / "last.ckpt") == digest(done.folder / "last.ckpt")


# ---- wheels for an offline machine


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 3, "the package index is not reachable. Run this on a machine that has a network."),
        (["--python", "12"], 2, "such as 3.12"),
        (["--extra", "txt"], 2, "is one of"),
    ],
)
def test_without_a_network_or_with_a_wrong_option_no_folder_is_made(arguments, code, message, tmp_path):
    """The error has the reason without the index's address, and no folder is created."""
    nowhere = dict.fromkeys(("UV_DEFAULT_INDEX", "PIP_INDEX_URL"), "http://127.0.0.1:9/simple")
    variables = {"UV_HTTP_RETRIES": "0", "UV_NO_CONFIG": "1", "DEEPLIGHTNING_PYTHON": sys.executable, **nowhere}
    command = ["bash", str(ROOT / "tools" / "gpu_wheels.sh"), *arguments, str(tmp_path / "a folder")]
    done = subprocess.run(command, env=environment() | variables, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "127.0.0.1" not in done.stderr
    assert list(tmp_path.iterdir()) == []
