"""`check` and the manual translate the terms of other tools to ours, and errors have what the user needs."""

import errno
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import click
import pytest
import torch
from checks import GOOD

from deeplightning.cli import cli
from deeplightning.cli.exit_codes import run_verb
from deeplightning.config import allowed, other_tools, schema, strategy
from deeplightning.config.examine import examine
from deeplightning.config.signature_check import Meanings
from deeplightning.engine import checkpoint_io
from deeplightning.faults import PLUGINS, CheckpointError, SetupError
from deeplightning.run.load import checkpoint_of
from deeplightning.runfolder import RunFolder

ROOT = Path(__file__).resolve().parents[2]


class Habit(NamedTuple):
    """A config as a user of another tool would write it: a file, or one override of a valid config.

    Attributes:
        answers: the wrong keys, each with our term, or "" if we have none.
    """

    by_hand: bool
    tool: str
    answers: dict[str, str]
    text: str


def habits() -> Iterator[Habit]:
    """Yield the lines of habits.tsv."""
    for line in (Path(__file__).parent / "habits.tsv").read_text().splitlines():
        how, tool, answers, text = line.split("\t")
        pairs = dict(pair.split("=", 1) for pair in answers.split("; "))
        yield Habit(how == "hand", tool, pairs, json.loads(text) if how == "hand" else text)


@pytest.mark.slow
def test_words_of_other_tools_get_ours(tmp_path, monkeypatch):
    """Of 300 configs in the style of other tools, of which 60 are complete files, none passes, and two in three get our
    term as a suggestion: the table has the most common terms."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(GOOD)
    cases, silent, wrong = list(habits()), [], []
    for habit in cases:
        (tmp_path / "c.yaml").write_text(habit.text if habit.by_hand else GOOD)
        faults = examine("c.yaml", [] if habit.by_hand else [habit.text]).faults
        found = {str(fault.key or ""): fault.to_dict()["suggestion"] or "" for fault in reversed(faults)}
        if not all(any(f"{key}.".startswith(f"{at}.") for at in found) for key in habit.answers):
            silent.append((habit.tool, habit.answers, found))
        if any(found.get(key) != word for key, word in habit.answers.items()):
            wrong.append((habit.tool, habit.answers, found))
    assert silent == []
    assert len(cases) >= 300
    assert sum(habit.by_hand for habit in cases) >= 60
    assert len(wrong) <= 0.35 * len(cases), wrong


TAKEN_BY = {
    "data.loader": ["torch.utils.data.DataLoader"],
    "data.module.params": ["deeplightning.data.image_folder.ImageFolder", "deeplightning.data.text.TextData"],
    "data.sampler.params": ["deeplightning.data.samplers.BucketedDistributedSampler"],
    "model.network.params": ["deeplightning.model.cnn.SimpleCNN", "deeplightning.model.vit.ViT"],
    "model.optimizer.params": ["torch.optim.SGD", "torch.optim.AdamW"],
    "engine.params": [*strategy.DDP, *strategy.FSDP, *strategy.DEEPSPEED],
    "engine.launcher.params": ["deeplightning.launch.Local"],
    "logger.params": ["deeplightning.tracking.MLflowLogger"],
}  # fmt: skip
"""Keys whose values are passed on, and the classes that take them."""


def wrong_rows(rows: dict[str, str], meanings: Meanings) -> dict[str, str]:
    """Return the rows whose new key is neither in the schema nor an argument of the class that takes it.

    Raises:
        AssertionError: a class in a comment does not exist.
    """
    keys = {f"{path}.{f.name}".lstrip(".") for path, cls in allowed.sections(schema.Config) for f in schema.keys(cls)}
    keys |= {f"{key}.{name}" for key in ("data.module", "model.module") for name in ("type", "params")}
    keys |= {f"{section}.params" for section in ("model.network", "model.optimizer", "logger")}
    keys |= {"_base_", "type", "params", "model.network.type", "logger.type"}
    missing = {name for names in PLUGINS.values() for name in names if name.endswith(":") and name[:-1] not in keys}
    keys.add("engine.launcher.params.cpus_per_worker")  # of the plug-in `ray`, and checked in its tests
    keys |= {f"engine.params.config.{word}" for word in strategy._JSON_KEYS}
    for section, names in TAKEN_BY.items():
        keys |= {f"{section}.{p.name}" for name in names for p in meanings.signature(name).parameters}
    wrong = {}
    for word, new in rows.items():
        key = (other_tools.key_of(new) or "").lstrip(".")
        is_zero = key.startswith("engine.params.config.zero_optimization.")  # validated by DeepSpeed
        if key and key not in keys and not is_zero and f"{key.partition('.')[0]}:" not in missing:
            wrong[word] = new
        for name in re.findall(r"\b(?:deeplightning|torch|pytorch_lightning)(?:\.\w+)+", new):
            assert meanings.of(name) is not None
    return wrong


def test_each_row_of_the_table_is_true():
    """Each row has an existing key of ours, and its comment has existing classes."""
    assert wrong_rows(other_tools.ROWS, Meanings()) == {}


@pytest.mark.slow
def test_check_answers_each_word_of_the_table(tmp_path, monkeypatch):
    """Each term of the table is refused as an override, with our term."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(GOOD)
    words = {word.lstrip("/"): new for word, new in other_tools.ROWS.items()}
    messages = {}
    plain, dotted = ([word for word in words if ("." in word) == has] for has in (False, True))
    # At most 50 errors are reported at once.
    for some in [*(plain[n : n + 40] for n in range(0, len(plain), 40)), *([word] for word in dotted)]:
        faults = examine("c.yaml", [f"{word}=1" for word in some]).faults
        messages |= {fault.key: fault.message for fault in faults if fault.key in some}
    for word, new in words.items():
        key = re.escape(str(other_tools.key_of(new)).lstrip("."))
        answer = "No equivalent here" if new.startswith("none") else f"(Here it is called|Did you mean) {key}"
        assert re.search(answer, messages[word]), word


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("tunee", "tune")])
def test_a_misspelt_verb_gets_the_nearest_one(monkeypatch, capsys, typed, meant):
    """A misspelt verb, also of a plug-in, ends with exit code 2 and a suggestion."""
    monkeypatch.setattr("sys.argv", ["deeplightning", typed, "config.yaml", "--fast"])
    assert run_verb(cli) == 2
    assert f"No such command '{typed}'. Did you mean {meant}?" in capsys.readouterr().err


def test_a_tag_is_one_fault(tmp_path, monkeypatch):
    """A value with a tag is one error; it is not reported as missing as well."""
    monkeypatch.chdir(tmp_path)
    text = GOOD.replace("num_epochs: 1", "num_epochs: !!python/name:os.system ")
    Path("c.yaml").write_text(text.replace("optimizer: {", "optimizer: !x {"))
    errors = [str(fault) for fault in examine("c.yaml").faults]
    assert [error.split(": ")[1] for error in errors] == ["model.optimizer", "train.num_epochs"]
    assert all("the tag !" in error for error in errors)


def test_a_folder_of_checkpoints_without_best_and_last(tmp_path):
    """The error lists the checkpoints in the folder."""
    for name in ("epoch=1.ckpt", "epoch=2.ckpt"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"it holds epoch=1\.ckpt, epoch=2\.ckpt"):
        checkpoint_of(RunFolder(tmp_path))


def test_a_full_disk_is_reported_with_its_numbers(tmp_path, monkeypatch):
    """The error has the free space and the command that removes runs; no partial file is left."""

    def full(content, file):
        file.write(b"x" * 1000)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2_000_000))
    content = {"state_dict": {"weight": torch.zeros(1_000_000)}}
    with pytest.raises(SetupError, match="deeplightning runs --clean --delete") as error:
        checkpoint_io.write_file(content, tmp_path / "last.ckpt")
    assert f"No space left on device; {tmp_path} has 2 MB free; remove runs" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_the_message_of_an_exit_in_own_code_is_shown(monkeypatch, capsys):
    """`sys.exit(message)` in own code ends with exit code 5 and the message, as an exception does."""

    @click.command()
    def verb():
        sys.exit("no data; run prepare.sh")

    monkeypatch.setattr(sys, "argv", ["deeplightning"])
    assert run_verb(verb) == 5
    assert "error: no data; run prepare.sh" in capsys.readouterr().err
