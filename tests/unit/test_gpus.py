"""What `engine.gpus` asks for is compared with the machine before a run starts: exit code 3, with the remedy.

No GPU is needed: each test describes the machine, as the driver would (see test_devices.py).
"""

import mmap
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed

from deeplightning.checks.examine import examine, load_config
from deeplightning.cli.exit_codes import report
from deeplightning.engine import devices, gpus
from deeplightning.engine.devices import Gpu, Holder, Machine
from deeplightning.engine.gpus import show_gpus
from deeplightning.engine.plan import trainer_arguments
from deeplightning.faults import ConfigError, SetupError
from deeplightning.task.networks import try_network
from deeplightning.words import lacks_memory

GIB, MIB = 2**30, 2**20
ONE = Gpu("GPU-11", "NVIDIA A100", 80 * GIB, 79 * GIB)
TWO, THREE, FOUR = (replace(ONE, uuid=f"GPU-{n}") for n in ("22", "33", "44"))
PART, OTHER_PART = Gpu("MIG-51", "NVIDIA A100 MIG 1g.10gb", 10 * GIB, 10 * GIB), Gpu("MIG-52")
SPLIT = replace(ONE, uuid="GPU-55", instances=(PART, OTHER_PART))
SOME = {"driver": "580.95.05", "supports": (13, 0), "built_for": (13, 0)}


@pytest.fixture
def on(tiny, place, monkeypatch):
    """`on(machine, override, …)` is the config as it runs on a described machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "_replaced", None)
    monkeypatch.setattr(devices, "has_begun", lambda: False)

    def load(machine, *overrides):
        if machine.visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", machine.visible)
        now = lambda: replace(machine, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))  # noqa: E731
        monkeypatch.setattr(devices, "machine", now)
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        cfg = load_config(tiny, list(overrides))
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
        show_gpus(cfg.engine)
        return cfg

    yield load
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refusal(on):
    """The same of what is refused with exit code 3, at `engine.gpus`."""

    def refuse(machine, *overrides):
        with pytest.raises(SetupError) as caught:
            on(machine, *overrides)
        (fault,) = caught.value.faults
        assert fault.key == "engine.gpus"
        return fault.message

    return refuse


def machine_of(*all_of, **about):
    return Machine(gpus=all_of, **SOME | about)


# ---- how many there are


@pytest.mark.parametrize(
    ("number", "asked", "told"),
    [
        (1, "[1]", "asks for GPU index 1; this machine has one GPU, index 0;"),
        (1, "2", "asks for 2 GPUs; this machine has one GPU, index 0;"),
        (2, "[1, 2, 3]", "asks for GPU indexes 2, 3; this machine has 2 GPUs, indexes 0 to 1;"),
        (0, "1", "asks for 1 GPU; this machine has none;"),
        (0, "[0, 1]", "asks for GPU indexes 0, 1; this machine has none;"),
        (2, "[-1]", "asks for GPU index -1; this machine has 2 GPUs, indexes 0 to 1;"),
    ],
)
def test_an_index_is_not_mistaken_for_a_number(number, asked, told, refusal):
    """The message names the indexes that are missing and those that are there, and both remedies."""
    message = refusal(machine_of(*[ONE, TWO][:number]), f"engine.gpus={asked}")
    assert message.startswith(told)
    assert message.endswith("`engine.gpus=null` runs on the CPU, `engine.gpus=auto` takes what is there")


def test_what_is_there_is_taken(on):
    """A number, a list in its own order, and `auto`, with a notice."""
    machine = machine_of(ONE, TWO)
    assert trainer_arguments(on(machine, "engine.gpus=2"))["devices"] == 2
    assert trainer_arguments(on(machine, "engine.gpus=[1, 0]"))["devices"] == [1, 0]
    cfg = on(machine, "engine.gpus=auto")
    assert cfg.engine.gpus == [0, 1]
    assert "engine.gpus: auto → [0, 1] (this machine has 2)" in [notice.text for notice in cfg.notices]


# ---- CUDA_VISIBLE_DEVICES


def test_an_index_beyond_those_shown_is_explained_by_the_variable(refusal):
    """Indexes count the visible GPUs; those that are meant are given by the indexes that they have."""
    machine = machine_of(ONE, TWO, THREE, FOUR, visible="2,3")
    message = refusal(machine, "engine.gpus=[2, 3]")
    assert message == (
        "asks for GPU indexes 2, 3; CUDA_VISIBLE_DEVICES=2,3 shows 2 of this machine's 4 GPUs, indexes 0 to 1; "
        "`engine.gpus=[0, 1]` takes 2, 3, or unset the variable"
    )
    message = refusal(machine, "engine.gpus=3")
    assert "shows 2 of this machine's 4 GPUs" in message
    assert "`engine.gpus=auto` takes these" in message


@pytest.mark.parametrize("value", ["", "-1", "none", "7"])
def test_a_variable_that_hides_all_gpus_is_named(value, refusal, on):
    """Where a GPU is asked for it is a contradiction; `auto` runs on the CPU and says why."""
    machine = machine_of(ONE, TWO, visible=value)
    message = refusal(machine, "engine.gpus=1")
    assert f"CUDA_VISIBLE_DEVICES={value} hides this machine's 2 GPUs; unset it" in message
    cfg = on(machine, "engine.gpus=auto")
    assert cfg.engine.gpus is None
    assert f"CUDA_VISIBLE_DEVICES={value} shows none of this machine's 2 GPUs" in cfg.notices[0].text


# ---- ids


def test_ids_are_shown_to_cuda_and_counted(on):
    """They become CUDA_VISIBLE_DEVICES, which processes inherit; cfg.yaml keeps them. The beginning is enough."""
    machine = machine_of(ONE, TWO, THREE)
    cfg = on(machine, "engine.gpus=[GPU-33, GPU-1]")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-33,GPU-11"
    assert cfg.public()["engine"]["gpus"] == ["GPU-33", "GPU-1"]
    assert trainer_arguments(cfg)["devices"] == [0, 1]
    again = on(machine, "engine.gpus=[GPU-33, GPU-1]")  # as a process that inherits it
    assert again.engine.gpus == cfg.engine.gpus
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-33,GPU-11"


def test_another_config_of_the_same_process_sees_all_gpus_again(on, monkeypatch):
    """What ids have set is undone for the next config, down to what a person has set."""
    machine = machine_of(ONE, TWO, THREE)
    on(machine, "engine.gpus=[GPU-33]")
    assert trainer_arguments(on(machine, "engine.gpus=[2]"))["devices"] == [2]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    on(machine, "engine.gpus=[GPU-33]")
    on(machine, "engine.gpus=[GPU-22]")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-22"
    monkeypatch.setattr(gpus, "_replaced", None)
    on(replace(machine, visible="0,1"), "engine.gpus=[GPU-22]")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-22"
    on(machine, "engine.gpus=null")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_an_instance_of_a_gpu_in_mig_mode_is_taken_by_its_id(on):
    """One; its index is 0."""
    cfg = on(machine_of(ONE, SPLIT), "engine.gpus=[MIG-51]")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-51"
    assert trainer_arguments(cfg)["devices"] == [0]


@pytest.mark.parametrize("asked", ["[MIG-51, MIG-52]", "[GPU-11, MIG-51]", "2"])
def test_several_devices_with_one_in_mig_mode_are_refused(asked, refusal):
    """CUDA shows a process one instance only."""
    message = refusal(machine_of(ONE, SPLIT), f"engine.gpus={asked}")
    assert "CUDA shows a process one instance only; `engine.gpus=[MIG-51]` takes one" in message


def test_a_gpu_in_mig_mode_without_instances_is_refused(refusal):
    """With the commands that make one, and that leave the mode."""
    message = refusal(machine_of(replace(SPLIT, instances=())), "engine.gpus=1")
    assert "has no instance; make one by `sudo nvidia-smi mig -i GPU-55 -cgi PROFILE -C`" in message


@pytest.mark.parametrize(
    ("asked", "about", "told"),
    [
        ("[GPU-9]", {}, "asks for GPU-9, which this machine does not have; it has GPU-11 (NVIDIA A100, number 0 of"),
        ("[GPU-]", {}, "asks for GPU-, which begins 2 ids"),
        ("[GPU-1, GPU-11]", {}, "asks for GPU-1, GPU-11, which are not different devices"),
        ("[GPU-22]", {"visible": "0"}, "asks for GPU-22, which CUDA_VISIBLE_DEVICES=0 hides; unset it, or set it to"),
    ],
)
def test_an_id_that_cannot_be_meant_is_refused(asked, about, told, refusal):
    """One that is not there, means several, is repeated, or is hidden."""
    assert refusal(machine_of(ONE, TWO, **about), f"engine.gpus={asked}").startswith(told)


def test_an_id_where_the_driver_gives_none_is_refused(refusal):
    """A machine without GPUs, and one whose GPUs torch only counts."""
    assert "asks for GPU-1: this machine has no GPU" in refusal(machine_of(), "engine.gpus=[GPU-1]")
    assert "the ids of its GPUs are not known" in refusal(Machine(gpus=(Gpu(),)), "engine.gpus=[GPU-1]")


def test_an_id_is_too_late_when_cuda_has_begun(refusal, monkeypatch):
    """Code that the config imports may have done it; the same is set outside then."""
    monkeypatch.setattr(devices, "has_begun", lambda: True)
    message = refusal(machine_of(ONE, TWO), "engine.gpus=[GPU-22]")
    assert "start with CUDA_VISIBLE_DEVICES=GPU-22 and engine.gpus=1" in message


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("GPU-1", "Did you mean [GPU-1]?"),
        ("[cuda:0]", "must be indexes, or ids that begin with GPU- or MIG- (`nvidia-smi -L`), not cuda:0"),
        ("['0']", "must be indexes, or ids that begin with GPU- or MIG-"),
        ("[0, GPU-1]", "must be either indexes or ids, not both"),
        ("[GPU-1, GPU-1]", "must be different device ids"),
    ],
)
def test_what_no_machine_has_is_a_fault_of_the_config(asked, told, on):
    """Exit code 2, with what may stand there."""
    with pytest.raises(ConfigError) as caught:
        on(machine_of(ONE), f"engine.gpus={asked}")
    assert told in str(caught.value)


# ---- drivers and builds


def test_a_driver_older_than_the_build_of_torch_is_refused(refusal, on):
    """Both versions, the driver that is new enough, and another build; within a major release any driver will do."""
    message = refusal(machine_of(ONE, driver="560.35", supports=(12, 6), built_for=(13, 2)), "engine.gpus=auto")
    assert "driver 560.35 supports CUDA 12.6 at most, and this torch is built for CUDA 13.2" in message
    assert (
        "update the driver to 580 or newer, or `TORCH_BACKEND=auto bash env.sh` installs a build that fits" in message
    )
    assert on(machine_of(ONE, supports=(12, 0), built_for=(12, 8)), "engine.gpus=1").engine.gpus == 1


def test_a_build_without_cuda_is_told_from_a_machine_without_gpus(refusal, on):
    """`auto` runs on the CPU, and says which it is."""
    machine = machine_of(ONE, is_built=False, built_for=None)
    assert "and this machine has 1 GPU: this torch is built without CUDA" in refusal(machine, "engine.gpus=1")
    assert "built without CUDA, and cannot use this machine's 1 GPU" in on(machine, "engine.gpus=auto").notices[0].text


def test_a_driver_that_does_not_answer_says_why(refusal, on):
    """In place of `this machine has none`."""
    machine = Machine(trouble="the NVIDIA driver is not loaded")
    assert refusal(machine, "engine.gpus=1").startswith("asks for 1 GPU: the NVIDIA driver is not loaded; or ")
    assert "has none; the NVIDIA driver is not loaded" in on(machine, "engine.gpus=auto").notices[0].text


@pytest.mark.parametrize(("backend", "params"), [("ddp", "{}"), ("deepspeed_stage_2", "{process_group_backend: nccl}")])
def test_a_build_without_nccl_is_refused_where_it_is_needed(backend, params, on, monkeypatch):
    """Exit code 3 at `engine.backend`, with another backend of the process group; gloo and one GPU need none."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    engine = f"engine={{backend: {backend}, gpus: 2, params: {params}}}"
    with pytest.raises(SetupError, match=r"built without NCCL.*process_group_backend=gloo") as caught:
        on(machine_of(ONE, TWO), engine)
    assert [fault.key for fault in caught.value.faults] == ["engine.backend"]
    on(machine_of(ONE, TWO), "engine={backend: ddp, gpus: 2, params: {process_group_backend: gloo}}")
    on(machine_of(ONE, TWO), "engine.gpus=1")
    with pytest.raises(SetupError, match=r"or `engine.backend=null` for the one GPU"):
        on(machine_of(ONE, TWO), "engine={backend: fsdp, gpus: 1}")


# ---- GPUs that are there and not free

BUSY = replace(ONE, mode="exclusive", holders=(Holder(4711, 12_000 * MIB),))
FULL = replace(ONE, free=100 * MIB, holders=(Holder(4711, 80_000 * MIB), Holder(4712)))


def test_a_gpu_in_exclusive_mode_that_is_used_is_refused(refusal):
    """The process, a GPU that is free, and how to share it."""
    assert refusal(machine_of(BUSY, TWO), "engine.gpus=[0]") == (
        "GPU 0 (NVIDIA A100) is in exclusive mode and process 4711 (12,000 MiB) uses it; end that process, or "
        "`sudo nvidia-smi -i GPU-11 -c DEFAULT` lets several share it; free: `engine.gpus=[1]` (80,896 MiB free of "
        "81,920 MiB); `engine.gpus=null` runs on the CPU"
    )


def test_a_gpu_that_lets_no_process_compute_is_refused(refusal):
    """With the command that changes its mode."""
    message = refusal(machine_of(TWO, replace(ONE, mode="prohibited")), "engine.gpus=2")
    assert message.startswith("GPU 1 (NVIDIA A100) is in compute mode Prohibited")


def test_a_full_gpu_is_refused(refusal):
    """How much is free and of what, who holds it, and what a run needs at least."""
    message = refusal(machine_of(FULL), "engine.gpus=[0]")
    assert message.startswith(
        "GPU 0 (NVIDIA A100) has 100 MiB free of 81,920 MiB; processes 4711 (80,000 MiB), 4712 use it; a run needs at "
        "least 512 MiB for CUDA alone"
    )


def test_a_gpu_that_is_shared_with_room_is_taken(on):
    """So is one in exclusive mode that nobody uses, or this process alone."""
    shared = replace(FULL, free=4 * GIB)
    mine = replace(BUSY, uuid="GPU-2", holders=(Holder(os.getpid(), GIB),))
    cfg = on(machine_of(shared, mine, replace(BUSY, uuid="GPU-3", holders=())), "engine.gpus=3")
    assert cfg.engine.gpus == 3


def test_a_busy_gpu_that_is_not_asked_for_is_no_fault(on):
    """Only the chosen ones count, by index or by id."""
    machine = machine_of(BUSY, TWO)
    assert on(machine, "engine.gpus=[1]").engine.gpus == [1]
    assert on(machine, "engine.gpus=[GPU-22]").engine.gpus == ["GPU-22"]


def test_what_is_busy_now_is_a_warning_of_check(tiny, on, monkeypatch):
    """The config is right, and the GPU may be free when it runs; the warning has the place of the key."""
    on(machine_of(ONE))
    monkeypatch.setattr(devices, "machine", lambda: machine_of(BUSY))
    report = examine(tiny, ["engine.gpus=[0]"])
    assert report.faults == []
    (warning,) = report.at_start
    assert "exclusive mode" in warning.message
    assert warning.place == "override engine.gpus=[0]"


def test_gpus_that_cuda_may_number_otherwise_are_not_judged(on):
    """Where they differ and go by speed, the busy one may be another; an id leaves no doubt."""
    machine = machine_of(BUSY, TWO, by_bus=False)
    assert on(machine, "engine.gpus=[0]").engine.gpus == [0]
    with pytest.raises(SetupError, match="exclusive mode"):
        on(machine, "engine.gpus=[GPU-11]")


def test_one_of_several_processes_judges_its_own_gpu(on, monkeypatch):
    """The others may have begun already; after a restart the last ones may not be gone yet."""
    world = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    assert on(machine_of(BUSY, TWO), "engine={backend: ddp, gpus: 2}").engine.gpus == 2
    with pytest.raises(SetupError, match=r"GPU 1 .*exclusive mode"):
        on(machine_of(TWO, BUSY), "engine={backend: ddp, gpus: 2}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert on(machine_of(TWO, BUSY), "engine={backend: ddp, gpus: 2}").engine.gpus == 2


# ---- while a run starts


@pytest.mark.parametrize("words", gpus.ANSWERS)
def test_a_gpu_that_cuda_refuses_ends_with_exit_code_3(words, capsys):
    """An error at run time that is the machine's: its first line, what it means and the remedy, without a traceback."""
    assert report(RuntimeError(f"CUDA error: {words}\nCUDA kernel errors might be asynchronously reported")) == 3
    told = capsys.readouterr().err
    assert told == f"error: CUDA error: {words}: {gpus.ANSWERS[words]}\n"


def test_an_error_of_the_code_on_a_gpu_stays_one(capsys):
    """An illegal access is no fault of the machine, and keeps its traceback."""
    assert report(RuntimeError("CUDA error: an illegal memory access was encountered")) == 1
    assert gpus.unusable(ValueError("invalid device ordinal")) is None
    assert "Traceback" not in capsys.readouterr().out


def test_a_lack_of_memory_ends_with_exit_code_5(capsys):
    """The device's own figures, and three keys that help."""
    words = "CUDA out of memory. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is free."
    assert report(torch.OutOfMemoryError(words)) == 5
    told = capsys.readouterr().err
    assert "the device has no memory left: CUDA out of memory." in told
    assert "of which 1.25 GiB is free. A smaller data.batch_size helps" in told
    assert "engine.precision=bf16" in told


@pytest.mark.parametrize(
    "words",
    [
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory",
        "could not create a primitive",
        "can't start new thread",
    ],
)
def test_a_lack_of_the_machines_memory_is_no_fault_of_the_config(words, capsys):
    """Torch and oneDNN raise RuntimeError, also where a network is tried out with the data."""

    class Large(torch.nn.Module):
        def forward(self, images):
            raise RuntimeError(words)

    with pytest.raises(RuntimeError, match=re.escape(words)) as raised:
        try_network(Large(), torch.zeros(1), "own.Large does not take the data")
    assert report(raised.value) == 5
    assert "the machine has no memory left: " in capsys.readouterr().err


def test_what_onednn_does_not_support_is_no_lack_of_memory():
    """A descriptor is what it could not make then."""
    error = RuntimeError("could not create a primitive descriptor for a convolution forward propagation primitive")
    assert not lacks_memory(error)
    assert lacks_memory(MemoryError())


def test_an_error_after_a_lack_of_memory_keeps_its_traceback(capsys):
    """What code raises while it handles a lack of memory is an error of its own."""
    error = ValueError("a slip")
    error.__context__ = MemoryError()
    assert report(error) == 1
    assert "ValueError: a slip" in capsys.readouterr().err


@pytest.mark.run
@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
def test_cuda_and_torch_still_say_these_words():
    """In the libraries that are installed: each text that an answer is found by."""
    folder = Path(torch.__file__).parent
    files = [
        folder / "lib" / "libtorch_python.so",
        folder / "lib" / "libtorch_cuda.so",
        folder / "lib" / "libc10_cuda.so",
    ]
    files += folder.parent.glob("nvidia/**/libcudart.so*")
    missing = set(gpus.ANSWERS)
    for file in files:
        if file.exists() and missing:
            with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                missing -= {words for words in missing if content.find(words.encode()) >= 0}
    assert missing == set()
