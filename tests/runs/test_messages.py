"""Each message by which we identify an exception of another library is still in use.

A function per `ErrorText`, with its name in lower case, provokes the exception.
"""

import os
import socket
import sqlite3
import subprocess
import sys

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.demos.boring_classes import BoringModel
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader

from deeplightning.private.messages import ErrorText, matches
from deeplightning.tracking.store import is_locked


def make_trainer(tmp_path, **more):
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 1}
    return pl.Trainer(default_root_dir=tmp_path, accelerator="cpu", enable_checkpointing=False, **options, **more)


class OldHook(BoringModel):
    def training_epoch_end(self, outputs):
        """Define a hook that Lightning 2.0 has removed."""


class Fixed(nn.Module):
    def forward(self, x):
        return x.reshape(4, -1)


def address_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        TCPStore("127.0.0.1", taken.getsockname()[1], 1, is_master=True, wait_for_workers=False)


def argument_by_position(tmp_path):
    class Positional(BoringModel):
        def predict_dataloader(self):
            return DataLoader(torch.zeros(4, 32), 2)

    make_trainer(tmp_path).predict(Positional())


def batch_size_is_fixed(tmp_path):
    torch.export.export(Fixed(), (torch.zeros(4, 2),), dynamic_shapes=({0: torch.export.Dim("batch")},))


def cannot_build(tmp_path):
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builder = CPUAdamBuilder()
    builder.is_compatible = lambda verbose=False: False
    builder.jit_load()


def hook_is_removed(tmp_path):
    make_trainer(tmp_path).fit(OldHook())


def no_cuda(tmp_path):
    """Run in a separate process that cannot see a GPU."""
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"]
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    raise RuntimeError(done.stderr)


def no_dataloader(tmp_path):
    make_trainer(tmp_path).test(BoringModel(), datamodule=pl.LightningDataModule())


def no_gradient(tmp_path):
    torch.zeros(1).backward()


def no_group(tmp_path):
    torch.distributed.barrier()


def no_metric(tmp_path):
    make_trainer(tmp_path, callbacks=[EarlyStopping("no_such_metric")]).fit(BoringModel())


def other_network(tmp_path):
    nn.Linear(2, 2).load_state_dict(nn.Conv2d(1, 1, 1).state_dict())


def other_optimizer(tmp_path):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    saved = torch.optim.SGD([{"params": [one.weight]}, {"params": [one.bias]}], lr=0.1).state_dict()
    torch.optim.SGD(two.parameters(), lr=0.1).load_state_dict(saved)


@pytest.mark.filterwarnings("ignore")  # Lightning warns about loaders without workers
@pytest.mark.parametrize("text", ErrorText, ids=lambda text: text.name)
def test_an_exception_of_a_library_matches_its_text(text, tmp_path):
    """The exception that a library raises matches its own text and no other."""
    provoke = globals()[text.name.lower()]
    with pytest.raises(Exception) as raised:  # noqa: PT011 (the library chooses the type)
        provoke(tmp_path)
    assert [other for other in ErrorText if matches(raised.value, other)] == [text]


def test_a_locked_database_is_known_by_its_error_code(tmp_path):
    """SQLite's error code identifies a locked database, whatever the message; other errors do not match."""
    first = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    first.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError) as raised:
        sqlite3.connect(tmp_path / "a.db", timeout=0).execute("CREATE TABLE runs (id INT)")
    assert is_locked(raised.value)
    with pytest.raises(sqlite3.OperationalError) as raised:
        first.execute("SELECT * FROM runs")
    assert not is_locked(raised.value)
    first.close()
