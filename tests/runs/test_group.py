"""The process group of DeepSpeed: `deeplightning.engine.process_group`."""

import inspect
import warnings

import pytest
import torch.distributed
from deepspeed.comm.torch import TorchBackend
from deepspeed.ops.op_builder.async_io import AsyncIOBuilder
from deepspeed.ops.op_builder.builder import OpBuilder

from deeplightning.engine import process_group

OWN = '''\
"""Says at the end of the process whether its group is still there."""

import atexit

import pytorch_lightning as pl
from torch import distributed

atexit.register(lambda: print("open" if distributed.is_initialized() else "left", flush=True))


class Ends(pl.Callback):
    def __init__(self, fails):
        self.fails = fails

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        assert distributed.is_initialized()
        if self.fails:
            raise KeyError("a fault of the user's")
'''


@pytest.mark.parametrize(("fails", "code"), [("true", 5), ("false", 0)])
def test_every_process_of_deepspeed_leaves_its_group(fails, code, jobs, tiny, tmp_path):
    """Also after a failed run; torch warns of a group of NCCL that is left open at the end of a process."""
    (tmp_path / "own_ends.py").write_text(OWN)
    callback = f"train.callbacks=[{{type: own_ends.Ends, params: {{fails: {fails}}}}}]"
    engine = ("engine.processes=2", "engine.backend=deepspeed_stage_2", "train.num_epochs=1")
    done = jobs("train", tiny, *engine, callback, cwd=tmp_path, ranks=2)
    assert [each.code for each in done.ranks] == [code, code], done
    assert [each.out.splitlines()[-1] for each in done.ranks] == ["left", "left"], done


def test_the_warning_of_a_barrier_is_silenced_by_its_own_words():
    """That of the installed torch, and no other warning."""
    words = "barrier(): using the device under current context. "
    assert words in inspect.getsource(torch.distributed.barrier)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        process_group.expect_barriers_of_one_process()
        warnings.warn(words + "You can specify …", stacklevel=2)
        warnings.warn("barrier(): something else", stacklevel=2)
    assert [str(warning.message) for warning in seen] == ["barrier(): something else"]


def test_deepspeed_binds_a_group_of_several_processes_itself():
    """Which is why no device is given to it here."""
    assert "known_world_size(world_size) != 1" in inspect.getsource(TorchBackend.init_process_group)


def test_what_an_nvme_disk_needs_is_named():
    """DeepSpeed's own text ends in `None`; ours has the packages."""
    assert "Unable to JIT load the {self.name} op" in inspect.getsource(OpBuilder.jit_load)
    assert AsyncIOBuilder.NAME == "async_io"
    error = RuntimeError(
        "Unable to JIT load the async_io op due to it not being compatible due to hardware/software issue. None"
    )
    told = process_group.why_not_built(error)
    assert "libaio" in told
    assert "apt-get install libaio-dev" in told
    assert "None" not in told


def test_another_operator_is_named_without_none(monkeypatch):
    """With the reason that its builder gives when it is asked, and ninja where that is missing."""
    told = process_group.why_not_built(RuntimeError("Unable to JIT load the no_such op due to … software issue. None"))
    assert told == "Unable to JIT load the no_such op due to … software issue"
    error = RuntimeError("Unable to JIT load the cpu_adam op due to ninja not being installed.")
    assert process_group.why_not_built(error) == "to compile its operator cpu_adam it needs ninja: pip install ninja"
