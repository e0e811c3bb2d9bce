"""`deeplightning lr` proposes a learning rate and `deeplightning batch` a batch size, without recording a run."""

import signal
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from deeplightning_plan.batch_size import bytes_of
from deeplightning_plan.learning_rate import Curve, _RateRamp
from PIL import Image
from tiny import csv_rows

from deeplightning.faults import ConfigError

HUNGRY = "model.network={type: own.MemoryHungry}"


def test_the_proposed_rate_trains(command, tiny, place, store, tmp_path, train, tracked):
    """The curve is written as a table of growing rates and a picture. The last line on stdout is an override, which
    trains to a lower loss than a hundredth of its rate. No run is recorded."""
    before = {*store.glob("0/*")}
    out = tmp_path / "my curves"
    done = command("lr", tiny, "--out", out, cwd=place, code=0)
    *_, proposed, override = done.out.splitlines()
    assert proposed.startswith("proposed ")
    key, _, rate = override.partition("=")
    assert key == "model.optimizer.params.lr"
    rows = csv_rows(out / "tiny.lr.csv")
    rates = [float(row["lr"]) for row in rows]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(1e-6)
    assert 10 < len(rows) <= 100
    assert np.isfinite([float(row["smoothed_loss"]) for row in rows]).all()
    with Image.open(out / "tiny.lr.png") as picture:
        assert picture.size == (770, 462)
        assert np.asarray(picture.convert("L")).std() > 5
    assert sorted(path.name for path in out.iterdir()) == ["tiny.lr.csv", "tiny.lr.png"]
    assert {*store.glob("0/*")} == before
    losses = {}
    for factor in (0.01, 1):
        run = train(f"{key}={float(rate) * factor}", "train.num_epochs=5")
        losses[factor] = tracked(run.folder).metrics["train_loss_epoch"]
    assert losses[1] < 0.8 * losses[0.01]


def test_a_schedules_peak_is_proposed_too_and_the_second_test_replaces_the_first(command, tiny, place, tmp_path):
    """The second proposed value is `max_lr` of the schedule. Accumulated batches count as one step."""
    schedule = "model.scheduler={type: torch.optim.lr_scheduler.OneCycleLR, params: {max_lr: 0.1, total_steps: auto}}"
    words = ["train.accumulator_factor=2", "--steps", 40, "--out", tmp_path]
    for _ in range(2):
        done = command("lr", tiny, schedule, *words, cwd=place, code=0)
        assert "; 32 samples a step: 16 per process x 2 batches accumulated" in done.out
        first, second = done.out.splitlines()[-1].split()
        assert first.partition("=")[2] == second.partition("=")[2]
        assert second.startswith("model.scheduler.params.max_lr=")
    assert len((tmp_path / "tiny.lr.csv").read_text().splitlines()) <= 41


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--from", "1e-12", "--to", "1e-11"], 5, "the loss does not fall between the rates"),
        (["model.loss={type: own.NaN}"], 5, "the first loss is not finite, whatever the rate"),
        (["--from", "1", "--to", "0.1"], 2, "must be above 0, the first below the last"),
        (["model.optimizer.params.rl=1"], 2, "has no param `rl`"),
        (["model.optimizer={a: {type: torch.optim.SGD, params: {lr: 1}}}"], 2, "model.optimizer"),
        (["model.module={type: own.Raises}"], 5, "a fault of the user's"),
        (["data.module={type: deeplightning.data.image_folder.ImageFolder}", "data.root=absent"], 3, "absent"),
    ],
)
def test_a_failed_test_of_rates_is_reported(command, tiny, place, tmp_path, words, code, message):
    """The exit codes are those of training; the picture is also written if no rate can be proposed."""
    done = command("lr", tiny, *words, "--out", tmp_path / "out", cwd=place, code=code)
    assert message in done.err
    assert done.out == ""
    assert (tmp_path / "out" / "tiny.lr.png").exists() == ("rates" in message)


def test_the_steepest_descent_is_proposed_and_at_most_a_tenth_of_the_minimum():
    """This holds for a loss that falls fastest at 1e-3 and diverges from 1e-1, and for one that falls fastest just
    before it diverges; for noise alone and for few steps nothing is proposed."""
    rates = np.logspace(-6, 0, 121)
    position = np.log10(rates)
    falling = 2 - 1 / (1 + np.exp(-4 * (position + 3)))
    assert Curve(rates, np.where(position < -1, falling, 1e6)).proposed == pytest.approx(1e-3, rel=0.2)
    late = Curve(rates, np.where(position < -1, 2 - np.exp(2 * (position + 1)), 1e6))
    assert late.at_minimum / 12 < late.proposed <= late.at_minimum / 10
    noise = 2 + 0.1 * np.random.default_rng(0).standard_normal(121)
    assert Curve(rates, noise).proposed is None
    assert Curve(rates[:9], falling[:9]).proposed is None


def test_the_largest_batch_that_fits_is_found(command, tiny, place):
    """The search doubles from 16, then bisects. The proposed size fits; one at most an eighth larger does not."""
    done = command("batch", tiny, HUNGRY, "--memory", "1.4GB", "--steps", 1, cwd=place, code=0)
    head, *rows = done.out.splitlines()
    assert head.split() == ["batch_size", "samples/s", "memory"]
    assert [row.split()[0] for row in rows[:2]] == ["16", "32"]
    sizes = {int(row.split()[0]): "does not fit" not in row for row in rows if row.split()[0].isdecimal()}
    largest = int(rows[-1].removeprefix("data.batch_size="))
    assert largest == max(size for size, fits in sizes.items() if fits)
    least = min(size for size, fits in sizes.items() if not fits)
    assert largest < least <= largest + max(1, largest // 8)
    assert 32 <= largest < 134
    assert f"largest    {largest}; {least} does not fit" in done.out
    assert "fastest    " in done.out


def test_running_out_of_a_gpus_memory_is_no_error(command, tiny, place):
    """A smaller size is tried, down to one sample; if even that does not fit, the exit code is 5."""
    network, limit = "model.network={{type: own.MemoryHungry, params: {{most: {}}}}}", ("--memory", "8GB")
    found = command("batch", tiny, network.format(20), *limit, cwd=place)
    assert found.out.splitlines()[-1] == "data.batch_size=20", found
    none = command("batch", tiny, network.format(0), *limit, cwd=place, code=5)
    assert "not even a batch of one sample fits into the memory of 8 GB" in none.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "give a limit, for example --memory 8GB"),
        (["--memory", "lots"], 2, "must be a size such as 8GB or 500MiB, not 'lots'"),
        (["--memory", "8GB", "model.module={type: own.Raises}"], 5, "a fault of the user's"),
        (["--memory", "8GB", "data.batch_sise=3"], 2, "Did you mean batch_size?"),
    ],
)
def test_a_failed_search_for_a_batch_size_is_reported(command, tiny, place, words, code, message):
    """The exit codes are those of training."""
    assert message in command("batch", tiny, *words, cwd=place, code=code).err


def test_ctrl_c_ends_the_process_that_measures(command, tiny, place, tmp_path):
    """The exit code is 130, and no process remains."""
    until = tmp_path / "never"
    slow = f"model.module={{type: own.Stuck, params: {{file: '{until}'}}}}"
    running = command.start("batch", tiny, slow, "--memory", "8GB", cwd=place)
    running.says("stuck", "err")
    (pid,) = running.processes()
    children = psutil.Process(pid).children(recursive=True)
    assert children
    running.signal(signal.SIGINT)
    assert running.end().code == 130
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("500 MiB", 500 * 2**20), ("1.5gb", 15 * 10**8), ("1000", 1000)],
)
def test_sizes_are_read(text, size):
    """Sizes are in decimal or binary units, or in bytes."""
    assert bytes_of(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "1.2.3GB", "8 apples"])
def test_what_is_no_size_is_refused(text):
    """The error gives two examples."""
    with pytest.raises(ConfigError, match="such as 8GB or 500MiB"):
        bytes_of(text, "--memory")


def test_the_tested_rate_is_that_of_the_optimizers_params():
    """A group with its own rate, which comes first, keeps its ratio to `params.lr`."""
    one, two = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 0.001}, {"params": [two]}], lr=0.1)
    trainer, ramp = SimpleNamespace(optimizers=[optimizer]), _RateRamp(1e-6, 1.0, 20)
    ramp.on_train_start(trainer, None)
    ramp.on_train_batch_start(trainer)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-8, 1e-6])


def test_a_negative_loss_that_falls_does_not_end_the_test_of_rates(monkeypatch):
    """A loss such as a density's may be negative; only a rise ends the test."""
    monkeypatch.setattr("deeplightning_plan.learning_rate.batch_loss", lambda trainer, outputs: outputs)
    trainer, ramp = SimpleNamespace(global_step=0, should_stop=False), _RateRamp(1e-6, 1.0, 40)
    for step in range(30):
        trainer.global_step = step + 1
        ramp.on_train_batch_end(trainer, None, -1 - 0.02 * step)
        assert not trainer.should_stop
