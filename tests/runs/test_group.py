"""The process group of DeepSpeed: `deeplightning.engine.process_group`."""

import pytest

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
