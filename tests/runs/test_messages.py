"""Each message by which we identify an exception of another library is still in use."""

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


def a_trainer(tmp_path, **more):
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

    a_trainer(tmp_path).predict(Positional())


def batch_size_is_fixed(tmp_path):
    torch.export.export(Fixed(), (torch.zeros(4, 2),), dynamic_shapes=({0: torch.export.Dim("batch")},))


def cannot_build(tmp_path):
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builder = CPUAdamBuilder()
    builder.is_compatible = lambda verbose=False: False
    builder.jit_load()


def hook_is_removed(tmp_path):
    a_trainer(tmp_path).fit(OldHook())


def no_cuda(tmp_path):
    """Run in a separate process that cannot see a GPU."""
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"]
    done = subprocess.run(words, env=hidden, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    raise RuntimeError(done.stderr)


def no_dataloader(tmp_path):
    a_trainer(tmp_path).test(BoringModel(), datamodule=pl.LightningDataModule())


def no_gradient(tmp_path):
    torch.zeros(1).backward()


def no_group(tmp_path):
    torch.distributed.barrier()


def no_metric(tmp_path):
    a_trainer(tmp_path, callbacks=[EarlyStopping("no_such_metric")]).fit(BoringModel())


def no_table(tmp_path):
    sqlite3.connect(":memory:").execute("SELECT * FROM runs")


def other_network(tmp_path):
    nn.Linear(2, 2).load_state_dict(nn.Conv2d(1, 1, 1).state_dict())


def other_optimizer(tmp_path):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    saved = torch.optim.SGD([{"params": [one.weight]}, {"params": [one.bias]}], lr=0.1).state_dict()
    torch.optim.SGD(two.parameters(), lr=0.1).load_state_dict(saved)


def table_exists(tmp_path):
    connection = sqlite3.connect(":memory:")
    for _ in range(2):
        connection.execute("CREATE TABLE runs (id INT)")


PROVOKED = {
    ErrorText.ADDRESS_IN_USE: address_in_use,
    ErrorText.BATCH_SIZE_IS_FIXED: batch_size_is_fixed,
    ErrorText.ARGUMENT_BY_POSITION: argument_by_position,
    ErrorText.CANNOT_BUILD: cannot_build,
    ErrorText.HOOK_IS_REMOVED: hook_is_removed,
    ErrorText.NO_CUDA: no_cuda,
    ErrorText.NO_DATALOADER: no_dataloader,
    ErrorText.NO_GRADIENT: no_gradient,
    ErrorText.NO_GROUP: no_group,
    ErrorText.NO_METRIC: no_metric,
    ErrorText.NO_TABLE: no_table,
    ErrorText.OTHER_NETWORK: other_network,
    ErrorText.OTHER_OPTIMIZER: other_optimizer,
    ErrorText.TABLE_EXISTS: table_exists,
}


@pytest.mark.filterwarnings("ignore")  # of Lightning, on loaders without workers
@pytest.mark.parametrize(("sentence", "provoke"), PROVOKED.items(), ids=lambda value: getattr(value, "name", ""))
def test_a_library_says_its_sentence(sentence, provoke, tmp_path):
    """The exception of the library matches its own sentence and no other."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 (its type is the library's matter)
        provoke(tmp_path)
    assert [other for other in ErrorText if matches(raised.value, other)] == [sentence]


def test_each_sentence_is_provoked():
    """Each `ErrorText` has a test."""
    assert {*PROVOKED} == {*ErrorText}


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
