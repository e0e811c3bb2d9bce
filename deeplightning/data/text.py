"""Load labelled texts from tab-separated files as batches of tokens, padded to the longest text of each batch.

The format is that of SST-2; quotes are ordinary characters:

    sentence<TAB>label             index<TAB>sentence
    a charming journey<TAB>1       0<TAB>unflinchingly bleak

The first line may name the columns, as above; without names they are `sentence` and `label`, or only `sentence`.
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
from deeplightning.data.loading import MAX_CLASSES, SplitData, checked_names
from deeplightning.text_spec import TextSpec, VocabularyError, from_lines, vocabulary

_COLUMNS = ("sentence", "label", "index")


@dataclass(frozen=True)
class Texts(Divisible):
    """Unprepared texts.

    Attributes:
        texts: N texts.
        labels: int64 (N,); None: the file has none.
        lines: the line number of each text in its file, from 1, int64 (N,).
        path: the file or another source, for messages.
        column: name of the column, by which `predict` finds texts in other tables; None: it has no name.
        encoding: of the file, and of those that `predict` reads.
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
    """Read the texts of a tab-separated file, and their labels if it has any. Blanks around a text are removed.

    Args:
        labelled: a file without column names has the columns sentence and label.

    Raises:
        DataError: the file is missing, empty or not UTF-8, or a line is invalid, which the message names.
    """
    lines = _read_text(path).split("\n")
    while lines and not lines[-1].strip():  # line ends at the end of the file
        lines.pop()
    head = tuple(name.strip().lower() for name in lines[0].split("\t")) if lines else ()
    has_header = "sentence" in head and set(head) <= set(_COLUMNS) and len(set(head)) == len(head)
    if len(lines) <= has_header:
        raise DataError(f"{path} has no texts in it.")
    columns: Sequence[str] = head if has_header else _COLUMNS[: 2 if labelled or "\t" in lines[0] else 1]
    text_at, label_at = columns.index("sentence"), columns.index("label") if "label" in columns else None
    texts, labels = [], []
    for number, line in enumerate(lines[has_header:], 1 + has_header):
        cells = line.split("\t")
        if len(cells) != len(columns):
            raise DataError(f"{path}, line {number}: {len(cells)} columns; there must be {', '.join(columns)}.")
        if not (text := cells[text_at].strip()):
            raise DataError(f"{path}, line {number}: there is no text in the column sentence.")
        texts.append(text)
        if label_at is not None:
            label = cells[label_at].strip()
            if not re.fullmatch("[0-9]{1,9}", label, re.ASCII):
                raise DataError(f"{path}, line {number}: the label {label[:40]!r} is not a whole number of at least 0.")
            labels.append(int(label))
    found = None if label_at is None else np.array(labels, np.int64)
    return Texts(texts, found, np.arange(len(texts)) + 1 + has_header, path)


class TokenSet(OnDemand):
    """The tokens of all texts, concatenated in one array. A batch has `tokens` int64 (B, L), `index` and, if there are
    labels, `label` int64 (B,).

    Args:
        texts: N texts.
        rows: the tokens of each text.
        padding: the token that fills up shorter texts.

    Attributes:
        lengths: of each text, in tokens, int64 (N,).
    """

    needs_workers = False

    def __init__(self, texts: Texts, rows: Sequence[Sequence[int]], padding: int):
        super().__init__(texts, self._pad, {} if texts.labels is None else {"label": torch.from_numpy(texts.labels)})
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        self._starts = self.lengths.cumsum(0) - self.lengths
        self._tokens = torch.from_numpy(np.fromiter((token for row in rows for token in row), np.int32))
        self._padding = padding

    def _pad(self, _: Texts, positions: np.ndarray) -> Batch:
        lengths = self.lengths[positions]
        columns = torch.arange(int(lengths.max()))  # (L,)
        indices = (self._starts[positions, None] + columns).clamp_(max=len(self._tokens) - 1)  # (B, L)
        return {"tokens": self._tokens[indices].long().masked_fill_(columns >= lengths[:, None], self._padding)}


class TextData(SplitData):
    """Texts in tab-separated files in `data.root`, each with a class. Your own data module subclasses it and returns
    its texts from `read`.

    Validation has its own file, or is fold `data.fold` of `data.num_splits` of the training file; with neither there is
    none. It is never the test set. Batches are padded to their longest text, and order and splits depend on `seed`
    alone. Each process keeps all tokens in its memory, so `data.num_workers` is not used. With
    `data.sampler: {type: deeplightning.data.samplers.BucketedDistributedSampler, params: {buckets: 8, sort_key:
    lengths}}`, batches have texts of similar length and less padding.

    `deeplightning.text_spec.vocabulary` makes the vocabulary from the training texts, without the validation fold,
    unless `vocabulary` or `tokenizer` names a file.

    Args:
        cfg: the whole config; `seed` and `data` are read.
        train: name of the training file; required unless a subclass overrides `read`.
        validation: name of the validation file; None: there is none.
        test: name of the test file; without labels it can be used for prediction, but not for tests.
        class_names: the name of each label, in order; None: the labels 0 to the highest in the training file.
        vocabulary: name of a file of words, one per line, in the order of their numbers; None: made from the training
            texts.
        min_count: words that occur less often in the training texts are not in the vocabulary.
        max_size: maximum number of tokens in the vocabulary, including the three special ones.
        lower: whether to convert words to lower case.
        tokenizer: name of a `tokenizer.json` of Hugging Face, or of its folder, instead of a vocabulary.
        max_length: truncate training texts to this number of tokens, keeping the end token; None: do not truncate.
        cut_always: also truncate other texts, in evaluation and when the run is served.
        limit: use at most this many training samples (validation included), and test samples, chosen by the seed.

    Attributes:
        text_spec: how texts are prepared; set by `setup`.
        class_names: the name of each label, in order; set by `setup` unless given.
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
        self.vocabulary, self.tokenizer = self._required_paths.get("vocabulary"), self._required_paths.get("tokenizer")
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
        """Return the texts of each set; raise DataError if a file is invalid."""
        return {split: read_tsv(path, labelled=split != "test") for split, path in self.files.items()}

    def _read_checked(self) -> dict[str, Any]:
        found: dict[str, Texts] = super()._read_checked()
        train = found["train" if "train" in found else "all"]
        for split in ("train", "val", "all"):
            if split in found and found[split].labels is None:
                raise DataError(f"{found[split].path} has no labels; only a test file may lack them.")
        assert train.labels is not None
        if not self.class_names:
            self.class_names = [str(number) for number in range(min(int(train.labels.max()), MAX_CLASSES) + 1)]
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
        max_length = self.max_length if self.cut_always else None
        if self.tokenizer is not None:
            path = self.tokenizer / "tokenizer.json" if self.tokenizer.is_dir() else self.tokenizer
            try:
                return TextSpec("hugging_face", _read_text(path), max_length=max_length)
            except ImportError as error:
                raise DataError(
                    f"{path} needs the package tokenizers, which is not installed ({error}): "
                    "pip install 'deeplightning[text]'"
                ) from error
            except VocabularyError as error:
                raise DataError(f"{path}: {error}.") from error
        if self.vocabulary is None:
            content = vocabulary(train.texts, self.lower, self.min_count, self.max_size)
            return TextSpec("words", content, self.lower, max_length)
        try:
            return TextSpec("words", from_lines(_read_text(self.vocabulary)), self.lower, max_length)
        except VocabularyError as error:
            raise DataError(f"{self.vocabulary}: {error}.") from error

    def _prepare(self, samples: Texts) -> TokenSet:
        assert self.text_spec is not None, "`setup` has read the texts"
        rows = self.text_spec.encode(samples.texts, self.max_length if samples is self._samples["train"] else None)
        return TokenSet(samples, rows, self.text_spec.padding)

    def sample(self, split: str, position: int) -> dict[str, str]:
        """Return the text, and its file and line as `name`."""
        texts = self._samples[split]
        return {"text": texts.texts[position], "name": f"{texts.path.name}, line {texts.lines[position]}"}

    def example_batch(self, size: int) -> Batch:
        """Make up a batch to test whether the parts of a config fit together, without data and `setup`.

        Returns:
            A batch like those of a loader: texts of one to eight tokens, each the unknown word, and labels from the
            first class to the last, or 0 as long as `class_names` is empty.
        """
        last, lengths = max(0, len(self.class_names) - 1), torch.arange(size) % 8 + 1
        tokens = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        return {"tokens": tokens, "label": torch.linspace(0, last, size).round().long(), "index": torch.arange(size)}

    def longest_batch(self, size: int) -> Batch:
        """Return the longest training text, `size` times, to plan the memory of a training. Reads the data; if that is
        missing, use texts of `max_length` tokens.

        Raises:
            DataError: the data cannot be read, and `max_length` is not set.
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
        """Return validation texts, or the shortest training texts if there are none (long ones are cut); call `setup`
        first."""
        if "val" in self._samples:
            return list(self._samples["val"].texts[:size])
        return sorted(filter(str.strip, self._samples["train"].texts), key=len)[:size]

    def test_dataloader(self) -> DataLoader:
        """Return the loader of the test set; raise DataError if there is none, or it has no labels."""
        self._require_split("test")
        if self._samples["test"].labels is None:
            raise DataError(
                f"{self._samples['test'].path} has no labels to test with; stages=[predict] predicts its labels."
            )
        return self._loader("test")


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
