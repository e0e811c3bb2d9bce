"""What a terminal shows while a run trains: `deeplightning.callbacks.progress`, and the commands at its end."""

import io
import logging
from types import SimpleNamespace

import pytest
import torch

from deeplightning.callbacks import console, describe
from deeplightning.callbacks.console import Console
from deeplightning.callbacks.progress import Bar, EpochTable, clock, number
from deeplightning.cli import listing
from deeplightning.config.packages import HOME
from deeplightning.config.source import read
from deeplightning.process.terminal import has_colour, wrapped


def drawn(bar, columns):
    """The lines of a bar on a terminal of so many columns."""
    from rich.console import Console as Rich

    rich = Rich(file=io.StringIO(), width=columns, color_system=None, legacy_windows=False)
    rich.print(bar)
    return [line.rstrip() for line in rich.file.getvalue().splitlines()]


FULL = Bar(3, 10, 120, 450, 31.2, 12_345.6, 3723, {"loss": 0.12345, "val_acc": 0.9123})


@pytest.mark.parametrize(("columns", "lines"), [(70, 2), (80, 2), (120, 1), (200, 1)])
def test_the_bar_fits_the_terminal(columns, lines):
    """Every number is there at each width; a wide terminal has them on one line, a narrow one on two."""
    shown = drawn(FULL, columns)
    assert len(shown) == lines
    assert max(map(len, shown)) < columns
    for text in ("epoch 3/10", "120/450", "31 it/s", "12,346 samples/s", "1:02:03 left", "loss 0.1235", "val_acc 0.91"):
        assert text in "\n".join(shown)
    assert shown[0].index("120/450") - len("epoch 3/10") > 10  # that the bar has
    assert max(map(len, drawn(FULL, 40))) < 40


def test_the_bar_of_a_run_without_a_known_length():
    """Neither total nor time left is made up."""
    (line,) = drawn(Bar(2, None, 7, None, 3.25, 0.0, None, {"loss": 1.0}), 120)
    assert line.startswith("epoch 2 ")
    assert line.endswith("step 7  3.25 it/s  loss 1.0000")
    assert "left" not in line
    assert "validating" in drawn(Bar(validates=True), 80)[0]


def test_the_columns_of_the_table_keep_their_places():
    """A row per epoch; one without a validation leaves its cells empty; new metrics get a header."""
    table = EpochTable(10)
    first = {"train_loss": 1.5, "val_acc": 0.5}
    rows = table.rows(1, first, 3.25, 1234.5, True, 80)
    rows += table.rows(2, {"train_loss": 12.25}, 120, 9.5, False, 80)
    rows += table.rows(10, {"train_loss": 0.25, "val_acc": 0.75}, 3, 0, True, 80)
    assert rows == [
        "epoch  train_loss   val_acc     time  samples/s",
        " 1/10      1.5000    0.5000    3.2 s      1,234 *",
        " 2/10     12.2500               2:00       9.50",
        "10/10      0.2500    0.7500    3.0 s            *",
    ]
    more = table.rows(11, {"train_loss": 1.0, "val_acc": 1.0, "val_f1": 0.5}, 1, 1, False, 80)
    assert more[0].split() == ["epoch", "train_loss", "val_acc", "val_f1", "time", "samples/s"]
    assert table.has_best


def test_a_narrow_table_keeps_what_matters():
    """The monitored metric and the losses stay; the header says that there are more."""
    values = {f"val_metric_{letter}": 0.5 for letter in "abcdefgh"} | {"train_loss": 1.0, "val_loss": 2.0}
    for columns in (60, 80, 200):
        header, row = EpochTable(3, ["val_metric_h", "val_loss", "train_loss"]).rows(1, values, 1, 1, True, columns)
        assert max(len(header), len(row)) <= columns
        assert {"val_metric_h", "val_loss"} <= set(header.split())
        assert header.endswith("…") == (columns < 200)


def test_numbers_and_times_are_short():
    """What four decimals cannot show has an exponent."""
    assert [number(v) for v in (0.5, 0.0, 12.0, 1e-5, 2.5e6, float("nan"))] == [
        *("0.5000", "0.0000", "12.0000", "1.000e-05", "2.500e+06", "nan")
    ]
    assert [clock(s) for s in (0.4, 61, 3600)] == ["0:00", "1:01", "1:00:00"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A stdout of 80 columns that says it is a terminal."""
    stream = Terminal()
    monkeypatch.setattr(console, "sys", SimpleNamespace(stdout=stream, stderr=stream))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def test_colour_is_for_terminals_that_want_it(terminal, monkeypatch):
    """NO_COLOR, a dumb terminal and a file get none."""
    assert has_colour(terminal)
    assert not has_colour(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colour(terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colour(terminal)


def handled(*records):
    handler = console._Terminal("")
    for level, text, extra in records:
        record = logging.makeLogRecord(
            {"levelno": level, "levelname": logging.getLevelName(level), "msg": text} | extra
        )
        handler.emit(record)


def test_a_terminal_breaks_lines_between_words(terminal, monkeypatch):
    """Under the label; a line with a path that is too long stays whole; a file has one line."""
    text = f"engine     {'words ' * 20}end"
    handled((logging.INFO, text, {}))
    lines = terminal.getvalue().splitlines()
    assert [line[:12] for line in lines] == ["engine     w", "           w"]
    assert max(map(len, lines)) < 80
    assert " ".join(lines).split() == text.split()
    path = f"bundle     {'/a' * 50}"
    assert wrapped(path, 11) == path
    file = io.StringIO()
    monkeypatch.setattr(console, "sys", SimpleNamespace(stdout=file, stderr=file))
    handled((logging.INFO, text, {"terminal": ["something else"]}))
    assert file.getvalue() == f"{text}\n"


@pytest.mark.parametrize("how", ["auto", "lines", "off"])
def test_a_terminal_has_a_table_and_a_file_has_lines(how, terminal, monkeypatch, caplog):
    """The log names every value; the row of the table is what the terminal shows, green where it is the best."""
    caplog.set_level(logging.INFO, "deeplightning")
    cfg = SimpleNamespace(
        logger=SimpleNamespace(progress=how),
        train=SimpleNamespace(num_epochs=3, checkpoint=SimpleNamespace(monitor="val_acc"), early_stop=None),
    )
    shown = Console(cfg, None, SimpleNamespace(best={"epoch": 0}))
    trainer = SimpleNamespace(
        current_epoch=0, world_size=1, is_global_zero=True, state=SimpleNamespace(fn="fit"), callbacks=[],
        callback_metrics={"train_loss": torch.tensor(0.5), "val_acc": torch.tensor(0.25)}, progress_bar_metrics={},
    )  # fmt: skip
    shown.on_train_epoch_start(trainer, None)
    shown.on_validation_start(trainer, None)
    shown.on_validation_end(trainer, None)
    shown.on_train_epoch_start(trainer, None)
    (record,) = caplog.records
    assert record.message.startswith("epoch 1 of 3  train_loss 0.5000  val_acc 0.2500  best  (")
    if how != "auto":
        assert record.terminal is None
        return
    header, row = record.terminal
    assert header == "\x1b[2mepoch  train_loss   val_acc     time  samples/s\x1b[0m"
    assert row.startswith("\x1b[32m  1/3      0.5000    0.2500    0.0 s")
    assert row.endswith(" *\x1b[0m")
    caplog.clear()
    trainer.current_epoch = 1
    shown.on_train_epoch_start(trainer, None)  # no validation in this one
    shown.on_train_epoch_start(trainer, None)
    assert "val_acc" not in caplog.records[-1].message


# ---- the config's line, and commands


def test_changes_are_those_of_overrides_and_of_a_file_over_its_bases(tmp_path, monkeypatch):
    """A list counts whole; a config without bases has only its overrides; an option of a group is no base."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(
        "seed: 1\nstages: [train]\ndata: {batch_size: 2}\nmodel: {scheduler: {type: x}}\n"
    )
    (tmp_path / "top.yaml").write_text("_base_: base.yaml\nstages: [train, test]\nmodel: {~scheduler: null}\n")
    (tmp_path / "more.yaml").write_text("seed: 5\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "small.yaml").write_text("batch_size: 1\n")
    (tmp_path / "grouped.yaml").write_text("_base_: [{data: small}]\nseed: 1\n")
    assert read("base.yaml").changes() == []
    assert read("base.yaml", ["data.batch_size=4", "~seed"]).changes() == ["~seed", "data.batch_size"]
    assert read("top.yaml").changes() == ["stages", "~model.scheduler"]
    assert sorted(read("base.yaml", ["more.yaml", "engine.gpus=null"]).changes()) == ["engine.gpus", "seed"]
    assert read("grouped.yaml", ["data.num_workers=1"]).changes() == ["data.num_workers"]
    assert read("top.yaml").names == ["top.yaml"]


def test_commands_can_be_pasted(tmp_path, monkeypatch):
    """Relative to the working directory, quoted; scripts in a clone, the command elsewhere; a server needs neither."""
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
    """That of `monitor` for a store on disk, that of the server for a server; none for another tracker."""
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
    """Columns that have no room are left out, the least needed first; elsewhere a line has everything."""
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
