"""Words of other tools are told with ours, in `check` and in the manual."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from deeplightning.config import old_words, reference, schema, strategy
from deeplightning.config.compare import Meanings
from deeplightning.configure import examine

ROOT = Path(__file__).resolve().parents[2]
BASE = """\
data:
  module: {type: deeplightning.data.digits.Digits}
  batch_size: 32
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1, image_size: 8}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.1}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 1}
"""


class Habit(NamedTuple):
    """A config as a user of another tool would write it: a file, or one override of a right config.

    Attributes:
        answers: the keys that are wrong, each with our word; "" where there is none.
    """

    by_hand: bool
    tool: str
    answers: dict[str, str]
    text: str


def habits() -> Iterator[Habit]:
    """The lines of habits.tsv."""
    for line in (Path(__file__).parent / "habits.tsv").read_text().splitlines():
        how, tool, answers, text = line.split("\t")
        pairs = dict(pair.split("=", 1) for pair in answers.split("; "))
        yield Habit(how == "hand", tool, pairs, json.loads(text) if how == "hand" else text)


def test_words_of_other_tools_get_ours(tmp_path, monkeypatch):
    """Of 300 configs with the habits of other tools, 60 of them whole files, none passes, and at least 95 % are told
    with our word as the suggestion of the key that holds the old one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    cases, silent, wrong = list(habits()), [], []
    for habit in cases:
        (tmp_path / "c.yaml").write_text(habit.text if habit.by_hand else BASE)
        faults = examine("c.yaml", [] if habit.by_hand else [habit.text]).faults
        told = {str(fault.key or ""): fault.to_dict()["suggestion"] or "" for fault in reversed(faults)}
        if not all(any(f"{key}.".startswith(f"{at}.") for at in told) for key in habit.answers):
            silent.append((habit.tool, habit.answers, told))
        if any(told.get(key) != word for key, word in habit.answers.items()):
            wrong.append((habit.tool, habit.answers, told))
    assert silent == []
    assert len(cases) >= 300
    assert sum(habit.by_hand for habit in cases) >= 60
    assert len(wrong) <= 0.05 * len(cases), wrong


@pytest.fixture(scope="module")
def meanings() -> Meanings:
    return Meanings()


TAKEN_BY = {
    "data.loader": ["torch.utils.data.DataLoader"],
    "data.module.params": ["deeplightning.data.image_folder.ImageFolder", "deeplightning.data.text.TextData"],
    "data.sampler.params": ["deeplightning.data.samplers.BucketedDistributedSampler"],
    "model.network.params": ["deeplightning.model.cnn.SimpleCNN", "deeplightning.model.vit.ViT"],
    "model.optimizer.params": ["torch.optim.SGD", "torch.optim.AdamW"],
    "engine.params": [*strategy.DDP, *strategy.FSDP, *strategy.DEEPSPEED],
    "engine.launcher.params": ["deeplightning.engine.launch.Slurm", "deeplightning.engine.launch.Ray",
                               "deeplightning.engine.launch.Local"],
    "logger.params": ["deeplightning.tracking.MLflowLogger"],
}  # fmt: skip
"""Keys whose values are handed on, and what takes them."""


def test_each_row_of_the_table_is_true(meanings):
    """Our side of a row is a key of the schema, or an argument of what takes it; a class in a remark is there."""
    keys = {f"{path}.{f.name}".lstrip(".") for path, cls in reference.sections(schema.Config) for f in schema.keys(cls)}
    keys |= {f"{key}.{name}" for key in ("data.module", "model.module") for name in ("type", "params")}
    keys |= {f"{section}.params" for section in ("model.network", "model.optimizer", "logger")}
    keys |= {"_base_", "type", "params", "model.network.type", "logger.type"}
    keys |= {f"engine.params.config.{word}" for word in strategy._JSON}
    keys |= {f"engine.params.config.zero_optimization.{word}" for word in strategy._ZERO}
    for section, names in TAKEN_BY.items():
        keys |= {f"{section}.{p.name}" for name in names for p in meanings.signature(name).parameters}
    found = {word: old_words.key_of(new) for word, new in old_words.ROWS.items()}
    assert {word: key for word, key in found.items() if key is not None and key.lstrip(".") not in keys} == {}
    for remark in old_words.ROWS.values():
        for name in re.findall(r"\b(?:deeplightning|torch|pytorch_lightning)(?:\.\w+)+", remark):
            assert meanings.of(name) is not None


def test_no_two_systems_give_a_word_two_meanings():
    """A word has one row, since a message cannot know which system it comes from."""
    words = [word for rows in old_words.SYSTEMS.values() for old in rows for word in old.split()]
    assert sorted(words) == sorted(set(words))


def test_each_row_of_the_manual_is_what_check_says(tmp_path, monkeypatch):
    """docs/migrating.md has the rows of each system, and `check` answers the old word of each with the new one."""
    page = (ROOT / "docs" / "migrating.md").read_text()
    assert page == old_words.renewed(page)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(BASE)
    rows = re.findall(r"^\| (`.+`) \| (?:the same in )?(`[\w.-]+`|none: .+?)(?: .*)?\|$", page, re.MULTILINE)
    assert len(rows) > 200
    written = [word for old, _ in rows for word in re.findall("`([^`]+)`", old)]
    assert set(written) == {word.lstrip("/") for word in old_words.ROWS}
    told = {}
    plain, dotted = ([word for word in written if ("." in word) == has] for has in (False, True))
    for words in [*(plain[n : n + 40] for n in range(0, len(plain), 40)), *([word] for word in dotted)]:  # 50 are told
        faults = examine("c.yaml", [f"{word}=1" for word in words]).faults
        told |= {fault.key: fault.message for fault in faults if fault.key in words}
    for old, new in rows:
        for word in re.findall("`([^`]+)`", old):
            answer = "There is none here" if new.startswith("none") else f"Today it is {new.strip('`')}"
            assert answer in told[word], word
