"""The terminal output of a training, and the commands at its end."""

import io
import json
import logging
import math
import re
import sys
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
import torch

from deeplightning import transfer
from deeplightning.batches import samples_in
from deeplightning.callbacks import console, describe, log_lines
from deeplightning.callbacks.console import Console
from deeplightning.callbacks.results import Results
from deeplightning.callbacks.steps import LogSteps
from deeplightning.cli import listing
from deeplightning.config.packages import HOME
from deeplightning.process.terminal import has_colour, wrapped
from deeplightning.runfolder import RunFolder


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_bar_fits_the_terminal(columns, terminal, monkeypatch):
    """The bar is one line with epoch, steps, remaining time, and as many numbers as fit."""
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = Console(config("bar"), None, SimpleNamespace(best=None))
    shown._progress, shown._learning, shown._batches, shown._samples = console._bar(), 10.0, 50, 800
    trainer = trainer_of(val_acc=0.9123)
    trainer.global_rank = 0
    shown.on_validation_end(trainer, None)
    shown._steps, trainer.fit_loop.epoch_loop._batches_that_stepped = 300, 50
    shown._draw(trainer, 0.12345)
    with shown._progress.console.capture() as seen:
        shown._progress.console.print(shown._progress)
    (line,) = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.get()).rstrip("\n").splitlines()
    assert len(line) <= columns
    assert line.startswith("epoch 1/3 ")
    assert "50/300" in line
    numbers = "loss 0.1235  val_acc 0.9123  80 samples/s  5.00 it/s"
    assert numbers[: max(0, columns - 40)] in line
    assert (numbers in line) == (columns == 120)


def test_the_bar_of_a_run_without_a_known_length(terminal):
    """The bar has no total; it shows epoch, steps and loss, and `validating` during a validation."""
    shown = Console(config("bar", epochs=None), None, SimpleNamespace(best=None))
    trainer = trainer_of(batches=math.inf, epochs=-1)
    shown._progress = console._bar()
    trainer.fit_loop.epoch_loop._batches_that_stepped = 7
    shown._draw(trainer, 1.0)
    (task,) = shown._progress.tasks
    assert (task.description, task.total, task.completed, task.fields["text"]) == ("epoch 1", None, 7, "loss 1.0000")
    shown.on_validation_start(trainer, None)
    assert shown._progress.tasks[0].fields["text"] == "validating"


@pytest.mark.parametrize(("max_steps", "completed"), [(-1, 7), (36, 14)])
def test_the_bar_counts_what_its_total_counts(terminal, max_steps, completed):
    """After 7 batches with two optimizers, the bar shows 7 batches of an epoch, or 14 of `max_steps`."""
    shown, trainer = Console(config("bar"), None, SimpleNamespace(best=None)), trainer_of()
    trainer.max_steps, trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped = max_steps, 14, 7
    shown._progress = console._bar()
    shown._draw(trainer, 1.0)
    assert shown._progress.tasks[0].completed == completed


def test_a_line_inside_an_epoch_has_the_loss_of_its_batch_on_a_gpu_too(caplog, monkeypatch):
    """The loss of the previous line is not repeated."""
    caplog.set_level(logging.INFO, "deeplightning")
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(console.time, "monotonic", lambda: clock.seconds)
    monkeypatch.setattr(transfer, "is_asynchronous", lambda device: True)
    shown, trainer = Console(config("lines"), None, SimpleNamespace(best=None)), trainer_of()
    trainer.accumulate_grad_batches, trainer.lightning_module = 1, SimpleNamespace(automatic_optimization=True)
    shown.on_train_epoch_start(trainer, None)
    for number, loss in enumerate((2.0, 0.5)):
        shown.on_train_batch_end(trainer, None, torch.tensor(loss), {}, number)
        clock.seconds += 31
    shown.on_train_batch_end(trainer, None, torch.tensor(0.25), {}, 2)
    assert caplog.messages[-1] == "epoch 1, batch 3 of 100: train_loss 0.2500"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns as stdout."""
    stream = Terminal()
    monkeypatch.setattr(log_lines, "sys", SimpleNamespace(stdout=stream, stderr=stream))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def test_colour_is_for_terminals_that_want_it(terminal, monkeypatch):
    """NO_COLOR, a dumb terminal and a file have no colour."""
    assert has_colour(terminal)
    assert not has_colour(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colour(terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colour(terminal)


def test_a_terminal_breaks_lines_between_words(terminal, monkeypatch):
    """Lines continue below the text behind the label; a path that is too long is not broken; a file gets one line."""
    text = f"engine     {'words ' * 20}end"
    record = {"levelno": logging.INFO, "levelname": "INFO", "msg": text}
    log_lines._Terminal("").emit(logging.makeLogRecord(record))
    lines = terminal.getvalue().splitlines()
    assert [line[:12] for line in lines] == ["engine     w", "           w"]
    assert max(map(len, lines)) < 80
    assert " ".join(lines).split() == text.split()
    path = f"bundle     {'/a' * 50}"
    assert wrapped(path, 11) == path
    file = io.StringIO()
    monkeypatch.setattr(log_lines, "sys", SimpleNamespace(stdout=file, stderr=file))
    log_lines._Terminal("").emit(logging.makeLogRecord(record | {"terminal": ["something else"]}))
    assert file.getvalue() == f"{text}\n"


def config(progress, epochs=3):
    return SimpleNamespace(
        logger=SimpleNamespace(progress=progress),
        train=SimpleNamespace(num_epochs=epochs, checkpoint=SimpleNamespace(monitor="val_acc"), early_stop=None),
    )


def trainer_of(batches=100, epochs=3, **metrics):
    progress = SimpleNamespace(current=SimpleNamespace(ready=7))
    return SimpleNamespace(
        current_epoch=0, world_size=1, is_global_zero=True, state=SimpleNamespace(fn="fit"), callbacks=[],
        num_training_batches=batches, max_epochs=epochs, max_steps=-1, global_step=0, progress_bar_metrics={},
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress, _batches_that_stepped=0)),
        callback_metrics={name: torch.tensor(value) for name, value in metrics.items()},
    )  # fmt: skip


def test_an_epoch_is_a_line(terminal, caplog):
    """The line has all metrics, none of validation after an epoch without one, and no gap if nothing is logged."""
    caplog.set_level(logging.INFO, "deeplightning")
    shown = Console(config("lines"), None, SimpleNamespace(best={"epoch": 0}))
    trainer = trainer_of(train_loss=0.5, val_acc=0.25)
    shown.on_train_epoch_start(trainer, None)
    shown.on_validation_start(trainer, None)
    shown.on_validation_end(trainer, None)
    shown.on_train_epoch_start(trainer, None)
    (record,) = caplog.records
    assert record.message.startswith("epoch 1 of 3  train_loss 0.5000  val_acc 0.2500  best  (")
    caplog.clear()
    trainer.current_epoch = 1
    shown.on_train_epoch_start(trainer, None)  # no validation in this one
    shown.on_train_epoch_start(trainer, None)
    assert "val_acc" not in caplog.records[-1].message
    trainer.callback_metrics = {}
    shown.on_train_epoch_start(trainer, None)
    assert re.fullmatch(r"epoch 2 of 3  \(\d+\.\d s\)", caplog.records[-1].message)


def test_an_epoch_without_a_step_to_log_has_the_learning_rates():
    """A run resumed at step 3 that logs every tenth step has no such step in an epoch of three steps."""
    trainer, log_steps = trainer_of(), LogSteps(10)
    trainer.optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate) for rate in (0.5, 0.25)]
    log_steps.on_train_start(trainer, None)
    assert trainer.callback_metrics == {"lr": 0.5, "lr-0": 0.5, "lr-1": 0.25}


def test_an_epochs_samples_per_second_are_those_of_training_alone(caplog, monkeypatch):
    """Two processes with 26 samples each in 4 seconds have 13 samples/s; the time of validations does not count."""
    caplog.set_level(logging.INFO, "deeplightning")
    clock = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(console.time, "monotonic", lambda: clock.seconds)
    shown, trainer = Console(config("off"), None, SimpleNamespace(best=None)), trainer_of(train_loss=0.5)
    trainer.world_size, trainer.global_rank, trainer.accumulate_grad_batches = 2, 0, 1
    trainer.lightning_module = SimpleNamespace(automatic_optimization=True)

    def validates(seconds):
        shown.on_validation_start(trainer, None)
        clock.seconds += seconds
        shown.on_validation_end(trainer, None)

    for _ in range(2):
        shown.on_train_epoch_start(trainer, None)
        for number, size in enumerate((16, 10)):
            clock.seconds += 2
            shown.on_train_batch_end(trainer, None, torch.tensor(0.5), {"image": torch.zeros(size, 1)}, number)
            validates(3 if number == 0 else 5)
    shown.on_train_epoch_start(trainer, None)
    lines = [message for message in caplog.messages if message.startswith("epoch 1")]
    assert lines == ["epoch 1 of 3  train_loss 0.5000  (12.0 s, 13 samples/s)"] * 2


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ({"image": torch.zeros(3, 1), "index": torch.zeros(3)}, 3),
        ((torch.zeros(4), torch.zeros(4)), 4),
        (torch.zeros(5, 2), 5),
        ({"name": "a", "parts": [torch.zeros(6, 2)]}, 6),
        (make_dataclass("Pairs", ["name", "x"], slots=True)("a", torch.zeros(7, 2)), 7),
        ({"factor": torch.tensor(1.0)}, 0),
        ("text", 0),
    ],
)
def test_the_rows_of_a_batch_are_counted(batch, rows):
    """A batch may be a mapping, a sequence, a dataclass or a tensor; a number has no rows."""
    assert samples_in(batch) == rows


def test_a_line_is_one_write_so_that_lines_of_several_ranks_stay_apart(monkeypatch):
    """Standard output may be unbuffered, as in launched processes."""
    written = []
    stream = SimpleNamespace(write=written.append, flush=lambda: None, isatty=lambda: False)
    monkeypatch.setattr(log_lines, "sys", SimpleNamespace(stdout=stream))
    log_lines._Terminal("[rank 1] ").emit(logging.makeLogRecord({"msg": "one\ntwo", "levelno": logging.INFO}))
    assert written == ["[rank 1] one\n[rank 1] two\n"]


# ---- commands


def test_commands_can_be_pasted(tmp_path, monkeypatch):
    """Paths are relative to the working directory and quoted. A clone has scripts, an installation has the command, and
    a tracking server needs neither."""
    monkeypatch.chdir(HOME)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert describe.serve(HOME / "mlruns" / "0" / "a" / "artifacts") == "bash deploy.sh mlruns/0/a/artifacts"
    assert describe.monitor(None) == describe.monitor("mlruns") == "bash monitor.sh"
    assert describe.monitor("a b") == "bash monitor.sh --tracking-uri 'a b'"
    assert describe.monitor("https://tracker") is None
    monkeypatch.setattr(describe, "HOME", tmp_path / "site-packages")
    assert describe.serve(tmp_path / "a run") == f"deeplightning serve '{tmp_path}/a run'"


class MLflowLogger:
    name, run_id = "3", "abc"


def test_the_page_of_a_run_is_named():
    """It is a page of `monitor` for a store on disk, and of the server for a server; other trackers have none."""
    assert describe.page([MLflowLogger()], "mlruns") == "http://127.0.0.1:5001/#/experiments/3/runs/abc"
    assert describe.page([object(), MLflowLogger()], "https://u:p@tracker/") == (
        "https://***@tracker/#/experiments/3/runs/abc"
    )
    assert describe.page([object()], "mlruns") is None


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (None, None),
        (60, "status name result"),
        (75, "id status name result"),
        (200, "id status experiment name result folder"),
    ],
)
def test_the_table_of_runs_fits_the_terminal(columns, shown):
    """A narrow terminal omits columns, the least important first; without a terminal a line has all of them."""
    row = {"id": "0" * 32, "status": "FINISHED", "experiment": "Default", "name": "one", "result": "test_acc 0.9777"}
    rows = [row | {"folder": "/runs" * 12}, row | {"name": "two", "result": "", "folder": "/b"}]
    found = list(listing.lines(rows, columns))
    if columns is None:
        assert found == ["  ".join(row.values()) for row in rows]
        return
    assert found[0].split() == shown.split()
    assert max(map(len, found)) < columns
    assert len({line.find("one" if "one" in line else "two") for line in found[1:]}) == 1
    same = [row | {"name": "one"} for row in rows]
    assert all("0" * 32 in line for line in listing.lines(same, 40) if "one" in line)
    assert list(listing.lines([], columns)) == []


def test_a_metric_of_several_numbers_is_no_result(caplog, tmp_path):
    """It is left out of the line and the file of results, as it is of the line of an epoch."""
    caplog.set_level(logging.INFO, "deeplightning")
    trainer = trainer_of(test_acc=0.5, test_each=[0.1, 0.9])
    trainer.state.fn = SimpleNamespace(value="test")
    Console(config("lines"), None, SimpleNamespace(best=None)).on_test_end(trainer, None)
    assert caplog.messages == ["results    test_acc 0.5000"]
    Results(SimpleNamespace(folder=RunFolder(tmp_path), cfg=None)).on_test_end(trainer)
    assert json.loads((tmp_path / "test_results.json").read_text()) == {"test_acc": 0.5}


@pytest.mark.parametrize(("seconds", "shown"), [(3.14, "3.1 s"), (59.97, "1 min 0 s"), (119.7, "2 min 0 s")])
def test_a_duration_has_no_sixtieth_second(seconds, shown):
    """Seconds are rounded before they are divided into minutes."""
    assert console._duration(seconds) == shown


def test_a_terminal_shows_no_password_of_the_store(terminal, caplog, tmp_path):
    """The command that shows the store is redacted in the lines for a terminal, too."""
    caplog.set_level(logging.INFO, "deeplightning")
    cfg = config("lines")
    cfg.logger.params = {"tracking_uri": "postgresql://me:hunter-47-x@db/mlflow"}
    cfg.redact_message = lambda text: text.replace("me:hunter-47-x", "***")
    shown = Console(cfg, SimpleNamespace(folder=RunFolder(tmp_path)), None)
    shown._log_location(SimpleNamespace(loggers=[MLflowLogger()]))
    lines = str([record.terminal for record in caplog.records])
    assert "--tracking-uri" in lines
    assert "hunter" not in lines


def test_a_redirected_stderr_keeps_its_lines_beside_the_bar(terminal, monkeypatch):
    """With `2> FILE`, warnings go to the file while the bar is on the terminal."""
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", errors := io.StringIO())
    with console._bar():
        print("a warning", file=sys.stderr)
    assert errors.getvalue() == "a warning\n"
    assert "a warning" not in terminal.getvalue()


def test_an_unfinished_line_beside_the_bar_is_no_markup(terminal, monkeypatch):
    """What a module prints without a line end is shown as it is."""
    monkeypatch.setattr(sys, "stdout", terminal)
    with console._bar():
        print("[/data/x.png] [cached] :warning:", end="", flush=True)
    assert "[/data/x.png] [cached] :warning:" in terminal.getvalue()
