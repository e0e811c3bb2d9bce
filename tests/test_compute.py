"""How a process computes: order in memory, threads, memory that is kept."""

import os
import resource

import pytest
import torch

from deeplightning.callbacks import threads
from deeplightning.engine.compute import keep_memory


@pytest.fixture(autouse=True)
def own_threads(monkeypatch):
    """Threads of this process are what they were, whatever a test does."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    yield
    torch.set_num_threads(before)


def test_channels_last_lays_out_weights_and_learns_the_same(fit):
    """Convolutions have their weights in that order, and the losses are those without it but for rounding."""
    plain, laid = fit(), fit("engine.channels_last=true")
    weights = [p for p in laid.task.network.parameters() if p.ndim == 4]
    assert weights
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    assert not all(
        p.is_contiguous(memory_format=torch.channels_last) for p in plain.task.network.parameters() if p.ndim == 4
    )
    one, other = (dict(fitted.series("train_loss")) for fitted in (plain, laid))
    assert one == pytest.approx(other, abs=1e-4)


def test_channels_last_on_two_processes(job, tracked):
    """Two processes learn with it as one does."""
    alone = job("engine.channels_last=true", ranks=1)
    outcome = job("engine.backend=ddp", "engine.channels_last=true", "data.batch_size=8")
    one, other = (tracked(run.folder).series()["val_loss"] for run in (alone, outcome))
    assert [value for _, value in one] == pytest.approx([value for _, value in other], abs=2e-3)


def test_a_number_of_threads_is_taken(fit):
    """`engine.threads: 2` is what torch computes with, whatever the environment says, and processes that it starts."""
    fit("engine.threads=2", "train.max_steps=1")
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (2, "2")


def test_threads_are_measured(fit, monkeypatch, caplog):
    """`auto` gives one thread and all some batches each, says what each took, and keeps the faster."""
    torch.set_num_threads(2)
    caplog.set_level("INFO", logger="deeplightning")
    now = iter(range(10**6))
    # Each batch of one thread begins and ends three ticks apart, of two threads one tick.
    monkeypatch.setattr(
        threads.time, "perf_counter", lambda: next(now) * (3 if torch.get_num_threads() == 1 else 1) * 1e-3
    )
    fit("engine.threads=auto", "data.batch_size=4")
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("threads")]
    assert line == "threads    2 (3.0 ms a batch with 1, 1.0 ms a batch with 2)"
    assert torch.get_num_threads() == 2


def test_kept_memory_is_not_fetched_again():
    """What is freed and needed again costs no page faults, where malloc is glibc's; without, each page does."""

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            several = [torch.ones(2**18) for _ in range(8)]  # 8 MiB
            del several
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    if os.confstr("CS_GNU_LIBC_VERSION") is None:
        pytest.skip("malloc is not glibc's")
    keep_memory()
    faults()
    assert faults() < 100  # of 40,960 pages
