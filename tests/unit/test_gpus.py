"""`engine.gpus` is checked against the machine before a run starts: exit code 3 and a remedy if they do not match.

No GPU is needed: each test describes the machine, as the driver would (see test_devices.py).
"""

import mmap
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deeplightning.cli.exit_codes import report
from deeplightning.config import devices
from deeplightning.config.devices import Gpu, Machine
from deeplightning.config.examine import load_config
from deeplightning.engine.trainer_arguments import trainer_arguments
from deeplightning.faults import ConfigError, SetupError
from deeplightning.task.networks import try_network
from deeplightning.words import lacks_memory

GIB = 2**30
ONE = Gpu("GPU-11", "NVIDIA A100", 80 * GIB)
TWO, THREE, FOUR = (replace(ONE, uuid=f"GPU-{n}") for n in ("22", "33", "44"))
SOME = {"supports": (13, 0), "built_for": (13, 0)}


@pytest.fixture
def on(tiny, place, monkeypatch):
    """`on(machine, override, …)` is the effective config on the described machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def load(machine, *overrides):
        if machine.visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", machine.visible)
        now = lambda: replace(machine, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))  # noqa: E731
        monkeypatch.setattr(devices, "machine", now)
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        cfg = load_config(tiny, list(overrides))
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
        return cfg

    yield load
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refusal(on):
    """`refusal(machine, override, …)` is the message of the SetupError at `engine.gpus`."""

    def refuse(machine, *overrides):
        with pytest.raises(SetupError) as caught:
            on(machine, *overrides)
        (fault,) = caught.value.faults
        assert fault.key == "engine.gpus"
        return fault.message

    return refuse


def machine_of(*all_of, **about):
    return Machine(gpus=all_of, **SOME | about)


# ---- the number of GPUs


REMEDIES = "`engine.gpus=null` runs on the CPU, `engine.gpus=auto` uses available GPUs"
SHOWN = "asks for GPU indexes 2, 3; CUDA_VISIBLE_DEVICES=2,3 shows 2 of this machine's 4, counted from 0; "


@pytest.mark.parametrize(
    ("number", "visible", "asked", "start"),
    [
        (1, None, "[1]", "asks for GPU index 1; this machine has 1, counted from 0;"),
        (1, None, "2", "asks for 2 GPUs; this machine has 1;"),
        (2, None, "[1, 2, 3]", "asks for GPU indexes 2, 3; this machine has 2, counted from 0;"),
        (0, None, "1", "asks for 1 GPU; this machine has none;"),
        (0, None, "[0, 1]", "asks for GPU indexes 0, 1; this machine has none;"),
        (2, None, "[-1]", "asks for GPU index -1; this machine has 2, counted from 0;"),
        (4, "2,3", "[2, 3]", SHOWN),  # indexes count the visible GPUs
        (4, "2,3", "3", "asks for 3 GPUs; CUDA_VISIBLE_DEVICES=2,3 shows 2 of this machine's 4;"),
    ],
)
def test_an_index_is_not_mistaken_for_a_number(number, visible, asked, start, refusal):
    """The message names the missing indexes, the number of GPUs, and both remedies."""
    message = refusal(machine_of(*[ONE, TWO, THREE, FOUR][:number], visible=visible), f"engine.gpus={asked}")
    assert message.startswith(start)
    assert message.endswith(REMEDIES) or visible


def test_available_gpus_are_used(on):
    """`engine.gpus` is a number, a list whose order is kept, or `auto`, which gives a notice."""
    machine = machine_of(ONE, TWO)
    assert trainer_arguments(on(machine, "engine.gpus=2"))["devices"] == 2
    assert trainer_arguments(on(machine, "engine.gpus=[1, 0]"))["devices"] == [1, 0]
    cfg = on(machine, "engine.gpus=auto")
    assert cfg.engine.gpus == [0, 1]
    assert "engine.gpus: auto → [0, 1] (this machine has 2)" in [notice.text for notice in cfg.notices]


# ---- CUDA_VISIBLE_DEVICES


@pytest.mark.parametrize("value", ["", "-1", "none", "7"])
def test_a_variable_that_hides_all_gpus_is_named(value, refusal, on):
    """If a GPU is requested, the variable is an error; `auto` runs on the CPU and gives the reason."""
    machine = machine_of(ONE, TWO, visible=value)
    message = refusal(machine, "engine.gpus=1")
    assert f"CUDA_VISIBLE_DEVICES={value} shows none of this machine's 2" in message
    cfg = on(machine, "engine.gpus=auto")
    assert cfg.engine.gpus is None
    assert f"CUDA_VISIBLE_DEVICES={value} shows none of this machine's 2" in cfg.notices[0].text


@pytest.mark.parametrize("asked", ["[0, 0]", "[GPU-1]"])
def test_what_no_machine_has_is_a_fault_of_the_config(asked, on):
    """A repeated index, or an id, which only CUDA_VISIBLE_DEVICES takes, is an error of the config."""
    with pytest.raises(ConfigError, match=r"engine\.gpus"):
        on(machine_of(ONE), f"engine.gpus={asked}")


# ---- drivers and builds


def test_a_driver_older_than_the_build_of_torch_is_refused(refusal, on):
    """The error has both versions and a remedy; within a major release any driver works."""
    message = refusal(machine_of(ONE, supports=(12, 6), built_for=(13, 2)), "engine.gpus=auto")
    assert message.startswith("the driver supports CUDA 12.6 at most, and this torch is built for CUDA 13.2; update")
    assert "`TORCH_BACKEND=auto bash env.sh` installs a build that fits" in message
    assert on(machine_of(ONE, supports=(12, 0), built_for=(12, 8)), "engine.gpus=1").engine.gpus == 1


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (machine_of(ONE, is_built=False, built_for=None), "this torch is built without CUDA"),
        (Machine(trouble="the NVIDIA driver is not loaded"), "has none: the NVIDIA driver is not loaded"),
    ],
)
def test_a_build_without_cuda_is_distinguished_from_a_machine_without_gpus(machine, reason, refusal, on):
    """The error says whether torch's build or the driver is the reason; `auto` runs on the CPU with the same reason."""
    assert re.match(f"asks for 1 GPU; (this machine )?{reason};", refusal(machine, "engine.gpus=1"))
    assert reason.removeprefix("this torch is ") in on(machine, "engine.gpus=auto").notices[0].text


# ---- errors at run time


@pytest.mark.parametrize("words", devices.UNUSABLE)
def test_a_gpu_that_cuda_refuses_ends_with_exit_code_3(words, capsys):
    """A CUDA error that the machine causes is printed as its first line and a remedy, without a traceback."""
    assert report(RuntimeError(f"CUDA error: {words}\nCUDA kernel errors might be asynchronously reported")) == 3
    err = capsys.readouterr().err
    assert err.startswith(f"error: CUDA error: {words}: `nvidia-smi` shows the GPUs")
    assert err.count("\n") == 1


def test_an_error_of_the_code_on_a_gpu_stays_one(capsys):
    """An illegal memory access is an error of the code: exit code 1, with its traceback."""
    assert report(RuntimeError("CUDA error: an illegal memory access was encountered")) == 1
    assert devices.unusable(ValueError("invalid device ordinal")) is None
    assert "Traceback" not in capsys.readouterr().out


def test_a_lack_of_memory_ends_with_exit_code_5(capsys):
    """The error has torch's figures and keys that reduce memory."""
    words = "CUDA out of memory. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is free."
    assert report(torch.OutOfMemoryError(words)) == 5
    err = capsys.readouterr().err
    assert "the device has no memory left: CUDA out of memory." in err
    assert "of which 1.25 GiB is free. A smaller data.batch_size helps" in err
    assert "engine.precision=bf16" in err


@pytest.mark.parametrize(
    "words",
    [
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory",
        "could not create a primitive",
        "can't start new thread",
    ],
)
def test_a_lack_of_the_machines_memory_is_no_fault_of_the_config(words, capsys):
    """A RuntimeError of torch or oneDNN about memory exits with code 5, also while a network is tried with the data."""

    class Large(torch.nn.Module):
        def forward(self, images):
            raise RuntimeError(words)

    with pytest.raises(RuntimeError, match=re.escape(words)) as raised:
        try_network(Large(), torch.zeros(1), "own.Large does not take the data")
    assert report(raised.value) == 5
    assert "the machine has no memory left: " in capsys.readouterr().err


def test_what_is_no_lack_of_memory_keeps_its_traceback(capsys):
    """An operation that oneDNN does not support, or an error of code that handles a MemoryError, is reported as
    such."""
    error = RuntimeError("could not create a primitive descriptor for a convolution forward propagation primitive")
    assert not lacks_memory(error)
    assert lacks_memory(MemoryError())
    error = ValueError("a slip")
    error.__context__ = MemoryError()
    assert report(error) == 1
    assert "ValueError: a slip" in capsys.readouterr().err


@pytest.mark.run
@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
def test_cuda_and_torch_still_say_these_words():
    """The installed libraries contain each text by which an error is recognised."""
    folder = Path(torch.__file__).parent
    files = [folder / "lib" / f"lib{name}.so" for name in ("torch_python", "torch_cuda", "c10_cuda")]
    files += folder.parent.glob("nvidia/**/libcudart.so*")
    missing = set(devices.UNUSABLE)
    for file in files:
        if file.exists() and missing:
            with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                missing -= {words for words in missing if content.find(words.encode()) >= 0}
    assert missing == set()


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_lack_of_memory_outside_of_torchs_allocator_ends_with_exit_code_5(words, capsys):
    """A CUDA context, cuBLAS and cuDNN allocate by themselves, with an error class of another name."""
    assert report(RuntimeError(f"{words}\nCUDA kernel errors might be asynchronously reported")) == 5
    assert f"the device has no memory left: {words}" in capsys.readouterr().err
