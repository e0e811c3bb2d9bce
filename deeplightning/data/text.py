"""Labelled texts in tab-separated files become batches of tokens, padded to the longest text of each batch.

The format is SST-2's, and quotes are plain characters:

    sentence<TAB>label             index<TAB>sentence
    a charming journey<TAB>1       0<TAB>unflinchingly bleak

The first line may name the columns, as above; without it they are `sentence` and `label`, or `sentence` alone.
N samples, B batch, L tokens of a batch's longest text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from deeplightning.config.part_config import PartConfig
from deeplightning.data.data_errors import DataConfigError, DataError, require_whole
from deeplightning.data.datasets import Batch, Divisible, OnDemand
from deeplightning.data.loading import MOST_CLASSES, DataOfSets, checked_names
from deeplightning.text_spec import TextSpec, VocabularyError, from_lines, vocabulary

_COLUMNS = ("sentence", "label", "index")


@dataclass(frozen=True)
class Texts(Divisible):
    """Texts as they come.

    Attributes:
        texts: N of them.
        labels: int64 (N,); None: the file has none.
        lines: where each stands in its file, from 1, int64 (N,).
        path: of the file, or where else they come from; for messages.
        column: name of their column, by which `predict` finds the texts of other tables; None: it has none.
        encoding: of the file, in which `predict` reads others.
    """

    shared = ("path", "column", "encoding")

    texts: list[str]
    labels: np.ndarray | None
    lines: np.ndarray
    path: Path
    column: str | None = None
    encoding: str = "utf-8"

    def __len__(self) -> int:
        return len(self.texts)


def read_tsv(path: Path, labelled: bool = False) -> Texts:
    """Read the texts of a tab-separated file, and their labels where it has such. Blanks around a text are left out.

    Args:
        labelled: without names in its first line, the file has the columns sentence and label.

    Raises:
        DataError: the file is missing, empty or no UTF-8, or a line is not as it should be; it is named.
    """
    lines = _text_of(path).split("\n")
    while lines and not lines[-1].strip():  # a file ends with a line's end, or with several
        lines.pop()
    head = tuple(name.strip().lower() for name in lines[0].split("\t")) if lines else ()
    named = "sentence" in head and set(head) <= set(_COLUMNS) and len(set(head)) == len(head)
    if len(lines) <= named:
        raise DataError(f"{path} has no texts in it.")
    columns: Sequence[str] = head if named else _COLUMNS[: 2 if labelled or "\t" in lines[0] else 1]
    at, label_at = columns.index("sentence"), columns.index("label") if "label" in columns else None
    texts, labels = [], []
    for number, line in enumerate(lines[named:], 1 + named):
        cells = line.split("\t")
        if len(cells) != len(columns):
            raise DataError(f"{path}, line {number}: {len(cells)} columns, and there must be {', '.join(columns)}.")
        text = cells[at].strip()
        if not text:
            raise DataError(f"{path}, line {number}: there is no text in the column sentence.")
        texts.append(text)
        if label_at is not None:
            label = cells[label_at].strip()
            if not re.fullmatch("[0-9]{1,9}", label, re.ASCII):
                raise DataError(f"{path}, line {number}: the label {label[:40]!r} is not a whole number of at least 0.")
            labels.append(int(label))
    found = None if label_at is None else np.array(labels, np.int64)
    return Texts(texts, found, np.arange(len(texts)) + 1 + named, path)


class TokenSet(OnDemand):
    """The tokens of all texts side by side in one array. A batch has `tokens` int64 (B, L), `label` int64 (B,) where
    there are labels, and `index`.

    Args:
        texts: N of them.
        rows: the tokens of each.
        padding: the token that fills up shorter texts.

    Attributes:
        lengths: of each text, in tokens, int64 (N,).
    """

    needs_workers = False

    def __init__(self, texts: Texts, rows: Sequence[Sequence[int]], padding: int):
        labels = {} if texts.labels is None else {"label": torch.from_numpy(texts.labels)}
        super().__init__(texts, self._padded, labels)
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        self._starts = self.lengths.cumsum(0) - self.lengths
        self._tokens = torch.from_numpy(np.fromiter((token for row in rows for token in row), np.int32))
        self._padding = padding

    def _padded(self, _: Texts, positions: np.ndarray) -> Batch:
        lengths = self.lengths[positions]
        columns = torch.arange(int(lengths.max()))  # (L,)
        places = (self._starts[positions, None] + columns).clamp_(max=len(self._tokens) - 1)  # (B, L)
        return {"tokens": self._tokens[places].long().masked_fill_(columns >= lengths[:, None], self._padding)}


class TextData(DataOfSets):
    """Texts of tab-separated files in `data.root`, with a class for each. A data module of your own subclasses it and
    says in `read` which texts there are.

    Validation has a file of its own, or is fold `data.fold` of `data.num_splits` of the training file; with neither
    there is none. It is never the test set. Batches are padded to their longest text, and order and splits depend on
    `seed` alone. Each process holds all tokens in its memory, so there is no work for `data.num_workers`. With
    `data.sampler: {type: deeplightning.data.samplers.BucketedDistributedSampler, params: {buckets: 8, sort_key:
    lengths}}` texts of like length come together, and there is less padding.

    `deeplightning.text_spec.vocabulary` makes the vocabulary of the training texts without the fold that validates,
    unless a file is given: `vocabulary` or `tokenizer`.

    Args:
        cfg: the whole config; `seed` and `data` are read.
        train: name of the training file; it may be missing only where a subclass reads something else.
        validation: name of the validation file; None: there is none.
        test: name of the test file; its labels may be missing, and it can be predicted then and not tested.
        class_names: the name of each label, in order; None: the labels 0 to the highest in the training file.
        vocabulary: name of a file of words, one a line, in the order of their numbers; None: made of the training
            texts.
        min_count: words that are rarer among the training texts are left out of the vocabulary.
        max_size: how many tokens the vocabulary has at most, the three special ones included.
        lower: whether words are brought to lower case.
        tokenizer: name of a `tokenizer.json` of Hugging Face, or of its folder, in the place of all this.
        max_length: longer training texts are cut to so many tokens, of which the last stays the end; None: no cut.
        cut_always: other texts are cut too, in evaluation and when the run is served.
        limit: use at most this many training samples (validation included) and as many test samples, a seeded choice.

    Attributes:
        text_spec: how texts are prepared; there after `setup`.
        class_names: the name of each label, in order; there after `setup`, or from the start where they are given.
    """

    holds_out = False

    def __init__(
        self,
        cfg: PartConfig,
        train: str | None = None,
        validation: str | None = None,
        test: str | None = None,
        *,
        class_names: Sequence[str] | None = None,
        vocabulary: str | None = None,
        min_count: int = 2,
        max_size: int = 30_000,
        lower: bool = True,
        tokenizer: str | None = None,
        max_length: int | None = None,
        cut_always: bool = False,
        limit: int | None = None,
    ):
        super().__init__(cfg, limit=limit)
        if train is None and type(self).read is TextData.read:
            raise DataConfigError("data.module.params.train must name the training file; it is null.")
        self.name_files(train=train, val=validation, test=test, vocabulary=vocabulary, tokenizer=tokenizer)
        self.vocabulary, self.tokenizer = self._named.get("vocabulary"), self._named.get("tokenizer")
        require_whole("min_count", min_count)
        require_whole("max_size", max_size, 4)
        if max_length is not None:
            require_whole("max_length", max_length)
        if vocabulary is not None and tokenizer is not None:
            raise DataConfigError("data.module.params.vocabulary cannot be combined with tokenizer, which has its own.")
        if cut_always and max_length is None:
            raise DataConfigError("data.module.params.cut_always needs max_length, which is null.")
        self.min_count, self.max_size, self.lower = min_count, max_size, lower
        self.max_length, self.cut_always = max_length, cut_always
        self.class_names: list[str] = checked_names(class_names)
        self.text_spec: TextSpec | None = None

    # ---- reading

    def read(self) -> dict[str, Texts]:
        """Return the texts of each set; raise DataError if a file is not as it should be."""
        return {split: read_tsv(path, labelled=split != "test") for split, path in self.files.items()}

    def _found(self) -> dict[str, Any]:
        found: dict[str, Texts] = super()._found()
        train = found["train"]
        for split in ("train", "val"):
            if split in found and found[split].labels is None:
                raise DataError(f"{found[split].path} has no labels; only a test file may lack them.")
        assert train.labels is not None
        if not self.class_names:
            self.class_names = [str(number) for number in range(min(int(train.labels.max()), MOST_CLASSES) + 1)]
        classes = len(self.class_names)
        for texts in found.values():
            if texts.labels is not None and (texts.labels >= classes).any():
                position = int((texts.labels >= classes).argmax())
                raise DataError(
                    f"{texts.path}, line {texts.lines[position]}: the label {texts.labels[position]} is outside the "
                    f"{classes} classes, 0 to {classes - 1} ({', '.join(self.class_names[:5])}"
                    f"{', …' if classes > 5 else ''})."
                )
        return found

    def learn(self, train: Texts) -> None:
        self.text_spec = replace(self._spec(train), column=train.column, encoding=train.encoding)

    def _spec(self, train: Texts) -> TextSpec:
        most = self.max_length if self.cut_always else None
        if self.tokenizer is not None:
            path = self.tokenizer / "tokenizer.json" if self.tokenizer.is_dir() else self.tokenizer
            try:
                return TextSpec("hugging_face", _text_of(path), max_length=most)
            except ImportError as error:
                raise DataError(
                    f"{path} needs the package tokenizers, which is not installed ({error}): "
                    "pip install 'deeplightning[text]'"
                ) from error
            except VocabularyError as error:
                raise DataError(f"{path}: {error}.") from error
        if self.vocabulary is None:
            content = vocabulary(train.texts, self.lower, self.min_count, self.max_size)
            return TextSpec("words", content, self.lower, most)
        try:
            return TextSpec("words", from_lines(_text_of(self.vocabulary)), self.lower, most)
        except VocabularyError as error:
            raise DataError(f"{self.vocabulary}: {error}.") from error

    def _prepare(self, samples: Texts) -> TokenSet:
        assert self.text_spec is not None, "`setup` has read the texts"
        rows = self.text_spec.encode(samples.texts, self.max_length if samples is self._samples["train"] else None)
        return TokenSet(samples, rows, self.text_spec.padding)

    def sample(self, split: str, position: int) -> dict[str, str]:
        """Return the text, and the file and line that it comes from."""
        texts = self._samples[split]
        return {"text": texts.texts[position], "name": f"{texts.path.name}, line {texts.lines[position]}"}

    def example_batch(self, size: int) -> Batch:
        """Make up a batch to try out whether the parts of a config fit; read no data and need no `setup`.

        Returns:
            What a loader gives: texts of one to eight tokens, each the unknown word, and labels from the first class
            to the last. While `class_names` is empty, each label is 0.
        """
        last, lengths = max(0, len(self.class_names) - 1), torch.arange(size) % 8 + 1
        tokens = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        return {"tokens": tokens, "label": torch.linspace(0, last, size).round().long(), "index": torch.arange(size)}

    def longest_batch(self, size: int) -> Batch:
        """Return the training text with the most tokens, `size` times: what the memory of a training is planned by.
        Reads the data; where they are not on this machine, texts of `max_length` tokens.

        Raises:
            DataError: the data cannot be read, and there is no `max_length`.
        """
        try:
            self.setup("fit")
            found = self.dataset("train")
        except DataError:
            if self.max_length is None:
                raise
            tokens = torch.ones((size, self.max_length), dtype=torch.int64)
            return {"tokens": tokens, "label": torch.zeros(size, dtype=torch.int64), "index": torch.arange(size)}
        return found[np.full(size, int(found.lengths.argmax()))]

    def example_texts(self, size: int) -> list[str]:
        """Return some validation texts, or training texts where there is no validation; call `setup` first."""
        return list(self._samples["val" if "val" in self._samples else "train"].texts[:size])

    def test_dataloader(self) -> DataLoader:
        """Return the loader of the tests; raise DataError if there is no test set, or it has no labels."""
        self._expect("test")
        if self._samples["test"].labels is None:
            raise DataError(
                f"{self._samples['test'].path} has no labels to test with; stages=[predict] answers each of its texts."
            )
        return self._loader("test")


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
