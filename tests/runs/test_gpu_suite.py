"""`bash test.sh --gpu` without a GPU: what it says and runs, and the programs that it starts where there is one.

The runs that it makes on GPUs are made here over CPU processes, and their figures become the tables of
benchmarks/gpu.md.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import LIMIT_SECONDS, environment
from conftest import digest
from gpu_runs import Cell, Runs, note, spread

# Behind all else, since a program there has the name of our package `serve`.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import gpu
import gpu_rows
from gpu_rows import PLAIN, RAW, SELF, Row
from timed import Took

from deeplightning.engine.checkpoint_io import read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
device = pytest.mark.device


# ---- without a GPU


def suite(*arguments, **variables):
    """`bash test.sh --gpu …` in the Python of this test, where no GPU is seen."""
    here = {"DEEPLIGHTNING_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **variables}
    command = ["bash", str(ROOT / "test.sh"), "--gpu", *arguments]
    return subprocess.run(command, env=environment() | here, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_without_a_gpu_one_line_says_so_and_the_cpu_part_runs():
    """`bash test.sh --gpu` prints one line about it and ends with 0; its arguments are pytest's."""
    done = suite("-k", "test_a_table_has_a_row_for_every_engine_and_precision")
    assert done.returncode == 0, done
    assert [line for line in done.stdout.splitlines() if "GPU" in line] == [done.stdout.splitlines()[0]]
    assert done.stdout.startswith("No GPU: torch ")
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_the_exit_code_of_the_suite_is_that_of_its_tests():
    """It is pytest's own exit code; 5 means that no test has the name. A suite that reaches its time limit has none."""
    assert gpu.run_tests(["-k", "there_is_no_such_test"]) == 5
    assert gpu.run_tests(["--collect-only"], limit=0.01) is None


def test_the_suite_runs_the_files_that_have_a_test_for_it():
    """Files without a test marked `gpu` or `device` are not imported: they may need packages that are not installed."""
    command = gpu.test_command(["-x"], 4)
    assert "tests/runs/test_gpu.py" in command
    assert "tests/runs/test_fuzz.py" not in command
    assert command[command.index("-m", 2) + 1] == "gpu or device"
    assert command[-1] == "-x"


# ---- the table


@pytest.mark.slow
@device
@pytest.mark.parametrize(
    ("engine", "precision", "processes"), [("null", "32", 1), ("ddp", "bf16", 2), ("deepspeed_stage_2", "bf16", 2)]
)
def test_a_cell_is_measured_over_cpu_processes(engine, precision, processes, tmp_path, monkeypatch):
    """Fresh processes train and test, leave a bundle, and end with the same weights when they were killed."""
    monkeypatch.setenv("GPU_CELLS", str(tmp_path / "cells.jsonl"))
    (tmp_path / "work").mkdir()
    cell = Runs(tmp_path / "work").cell(engine, precision, gpus=None, processes=processes)
    assert cell.right, cell
    note(cell)
    (read,) = map(json.loads, (tmp_path / "cells.jsonl").read_text().splitlines())
    if engine == "null":
        assert "| null | 32 | 1 CPU process | yes | 1.000 | equal | yes |" in gpu.cell_table([read])


def test_a_cell_says_why_a_run_failed(command, tmp_path):
    """The exit code and the error's line."""
    runs = Runs(tmp_path, lambda *words, limit, **options: command(*words, **options))
    runs.config.write_text(runs.config.read_text().replace("lr: 0.003", "lr: -1.0"))
    cell = runs.cell("null", "32", gpus=None)
    assert not cell.right
    assert cell.reason.startswith("exit code 2: error: ")


HALF = '''\
"""Lets DeepSpeed compute in half precision on a CPU, slowly."""


def allow(*_):
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True
'''


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])  # 3: on GPUs, in test_gpu.py
def test_a_resumed_run_of_deepspeed_has_the_loss_scale_that_it_had(stage, tmp_path):
    """With steps left out while the scale is too large: the weights of a run that was not killed."""
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


@device
def test_a_table_has_a_row_for_every_engine_and_precision():
    """What was not run, failed or was not equal is written into its row."""
    good = Cell("ddp", "bf16", "1 GPU", True, 0.9, True, True)
    other = Cell("fsdp", "16", "1 GPU", True, 0.8, False, True, reason="the resumed run ends with other weights")
    failed = Cell("null", "32", "1 GPU", reason="exit code 5: no memory")
    text = gpu.cell_table([vars(cell) for cell in (good, other, failed)])
    lines = text.splitlines()
    assert len(lines) == 2 + 6 * 3
    assert "| ddp | bf16 | 1 GPU | yes | 0.900 | equal | yes |" in lines
    assert "| fsdp | 16 | 1 GPU | yes | 0.800 | NOT equal: the resumed run ends with other weights | yes |" in lines
    assert "| null | 32 | 1 GPU | FAILED: exit code 5: no memory | - | - | - |" in lines
    assert any(line.startswith("| null | bf16 | 1 GPU | not run |") for line in lines)


# ---- speed and memory


def took(rate, start=2.0, wall=9.0):
    """Of a program whose second epoch has this rate."""
    epochs = f"epoch 0 seconds 9.0 pictures 90\nepoch 1 seconds {900 / rate:.6f} pictures 900\n"
    return Took(1.0, wall, 100.0, f"first step at {100 + start:.3f}\n{epochs}", Path(), ())


def test_bounds_compare_figures_of_one_round():
    """Of the last epoch's pictures per second: the median ratio, and "not measured" where one side is missing."""
    with pytest.raises(ValueError, match="no epoch"):
        gpu_rows.timing(Took(1.0, 9.0, 100.0, "nothing", Path(), ()))
    rates = {Row(PLAIN, 128): (100, 200), Row(SELF, 128): (130, 240), Row(SELF, 512): (99, 99)}
    found = {row: [gpu_rows.timing(took(rate)) for rate in some] for row, some in rates.items()}
    assert found[Row(PLAIN, 128)][0] == pytest.approx({"rate": 100, "start": 2, "wall": 9})
    figures = {bound.what: bound.figure for bound in gpu_rows.bounds_of(found, gpu_rows.FULL)}
    assert figures["batch 128: pictures/s of the plain script's"] == pytest.approx((1.3 + 1.2) / 2)
    assert figures["job of two epochs: seconds of the plain script's"] == pytest.approx(1)
    assert figures["batch 512: pictures/s of the raw loop's"] is None


@device
@pytest.mark.slow
def test_speed_and_memory_are_measured_on_a_cpu(tmp_path):
    """`--tiny --device cpu` runs every program of the tables, and writes its numbers."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--tiny", "--device", "cpu"]
    command += ["--only", "speed", "memory", "--json", str(tmp_path / "numbers.json")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert "failed:" not in done.stderr, done
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert set(numbers["speed"]) == {f"{program}, batch 32" for program in (PLAIN, RAW, SELF)}
    assert set(numbers["memory"]) == {"null", "ddp"}
    assert all(each["rate"] > 0 for some in numbers["speed"].values() for each in some)


# ---- wheels for a machine without a network


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 3, "the package index is not reachable. Run this on a machine that has a network."),
        (["--python", "12"], 2, "such as 3.12"),
        (["--extra", "txt"], 2, "is one of"),
    ],
)
def test_without_a_network_or_with_a_wrong_option_no_folder_is_made(words, code, said, tmp_path):
    """The reason without the index's address, and nothing left behind."""
    nowhere = dict.fromkeys(("UV_DEFAULT_INDEX", "PIP_INDEX_URL"), "http://127.0.0.1:9/simple")
    variables = {"UV_HTTP_RETRIES": "0", "UV_NO_CONFIG": "1", "DEEPLIGHTNING_PYTHON": sys.executable, **nowhere}
    command = ["bash", str(ROOT / "tools" / "gpu_wheels.sh"), *words, str(tmp_path / "a folder")]
    done = subprocess.run(command, env=environment() | variables, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert "127.0.0.1" not in done.stderr
    assert list(tmp_path.iterdir()) == []
