"""A text becomes numbers: `TextSpec` takes texts to the tokens that a network was trained on.

Training and serving both call it, so they cannot disagree. numpy and the standard library only; a tokenizer in Hugging
Face's file format needs the package `tokenizers` as well. Letters: N texts, L tokens of the longest.

Our own tokenizer, "words": the text is brought to Unicode's form NFC and, if asked, to lower case. A word is a run of
letters, digits and underscores, with apostrophes inside (it's, n't); any other character that is no blank stands for
itself. A word that the vocabulary lacks becomes `<unknown>`; each text ends with `<end>`.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

PADDING, UNKNOWN, END = "<padding>", "<unknown>", "<end>"
SPECIAL = (PADDING, UNKNOWN, END)
"""The first tokens of each vocabulary of words: numbers 0, 1 and 2. No text has them: `<` is a token by itself."""

FILES = {"words": "vocabulary.txt", "hugging_face": "tokenizer.json"}
"""Kinds of tokenizers, with the name of the file in which a bundle keeps what one knows."""

_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")  # noqa: RUF001 (the second apostrophe is the typographer's)


class TextError(ValueError):
    """A text cannot be used; the message is one sentence for people.

    Attributes:
        status: what HTTP would say: 400 empty, 413 too long, 415 not text.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class VocabularyError(ValueError):
    """A vocabulary or a tokenizer's file is not as it should be; the message is one sentence, and names the line."""


@dataclass(frozen=True)
class TextSpec:
    """How texts are prepared for one network.

    Attributes:
        tokenizer: "words" (our own, see above) or "hugging_face".
        content: what the tokenizer knows, the text of its file: one token a line, the first three being `SPECIAL`; or
            a `tokenizer.json` of Hugging Face.
        lower: whether words are brought to lower case; a file of Hugging Face says this itself.
        max_length: longer texts are cut to so many tokens, of which the last stays the last; None: they are not.
        limit: the most tokens that the network takes; None: any number.

    Raises:
        ValueError: a value is impossible.
        VocabularyError: the content is none.
        ImportError: the package `tokenizers` is needed and not installed.
    """

    tokenizer: str
    content: str = field(repr=False)
    lower: bool = True
    max_length: int | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer, str) or self.tokenizer not in FILES:
            raise ValueError(f"tokenizer must be one of {', '.join(FILES)}, not {self.tokenizer!r}")
        for name in ("max_length", "limit"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be null or a whole number of tokens of at least 1, not {value!r}")
        if not isinstance(self.lower, bool):
            raise ValueError(f"lower must be true or false, not {self.lower!r}")
        self._encoder  # noqa: B018 (what is wrong with the content shows here)

    @property
    def file(self) -> str:
        """The name of the file in which a bundle keeps the content."""
        return FILES[self.tokenizer]

    @property
    def size(self) -> int:
        """How many tokens there are: they are numbered from 0."""
        return self._encoder.size

    @property
    def padding(self) -> int:
        """The token that fills up the shorter texts of a batch."""
        return self._encoder.padding

    @cached_property
    def _encoder(self) -> Any:
        if self.tokenizer == "words":
            return _Words(self.content, self.lower)
        from deeplightning.tokenizer_file import Tokenizer  # which needs a package that few have

        try:
            return Tokenizer(self.content)
        except ValueError as error:
            raise VocabularyError(str(error)) from error

    def encode(self, texts: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """The tokens of each text: at least one.

        Args:
            max_length: cut to so many; None: as the spec has it.
        """
        encoded, most = self._encoder.encode(texts), max_length or self.max_length
        return encoded if most is None else [cut(tokens, most) for tokens in encoded]

    def prepare(self, data: bytes | str) -> np.ndarray:
        """One text that a client sent, int64 (L,).

        Raises:
            TextError: it is no text in UTF-8, has nothing but blanks, or more tokens than the network takes.
        """
        if isinstance(data, bytes):
            try:
                data = data.decode()
            except UnicodeDecodeError:
                raise TextError("This is not text in UTF-8, which is what is read here.", 415) from None
        if not data.strip():
            raise TextError("The text is empty.", 400)
        (tokens,) = self.encode([data])
        if self.limit is not None and len(tokens) > self.limit:
            raise TextError(
                f"The text has {len(tokens):,} tokens, and the network takes at most {self.limit:,}; send less.", 413
            )
        return np.array(tokens, np.int64)

    def stack(self, rows: Sequence[np.ndarray | Sequence[int]]) -> np.ndarray:
        """The tokens of N texts as one array, int64 (N, L): the shorter ones are filled up at their end."""
        filled = np.full((len(rows), max(map(len, rows))), self.padding, np.int64)
        for place, row in zip(filled, rows, strict=True):
            place[: len(row)] = row
        return filled

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types, for a bundle; the content is another file of it."""
        return {
            "tokenizer": self.tokenizer,
            "file": self.file,
            "size": self.size,
            "lower": self.lower,
            "max_length": self.max_length,
            "limit": self.limit,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], content: str) -> "TextSpec":
        """The reverse of `to_dict`.

        Raises:
            ValueError: a key is missing or unknown, or a value is impossible or not that of this content.
        """
        known = ("tokenizer", "file", "size", "lower", "max_length", "limit")
        if not isinstance(values, Mapping):
            raise ValueError(f"a text spec must be a mapping, not {type(values).__name__}")
        if faults := [key for key in known if key not in values] + [str(key) for key in values if key not in known]:
            raise ValueError(f"a text spec has exactly the keys {', '.join(known)}; look at {', '.join(faults)}")
        spec = cls(values["tokenizer"], content, values["lower"], values["max_length"], values["limit"])
        for name in ("file", "size"):
            if getattr(spec, name) != values[name]:
                raise ValueError(f"{name} is {getattr(spec, name)!r}, not {values[name]!r}")
        return spec

    def limited(self, limit: int | None) -> "TextSpec":
        """The same for a network that takes at most so many tokens."""
        return replace(self, limit=limit)


class _Words:
    """Our own tokenizer."""

    padding = 0

    def __init__(self, content: str, lower: bool):
        words = content.removesuffix("\n").split("\n")
        if tuple(words[: len(SPECIAL)]) != SPECIAL:
            raise VocabularyError(f"a vocabulary begins with the lines {', '.join(SPECIAL)}")
        self._numbers = {word: number for number, word in enumerate(words)}
        if len(self._numbers) != len(words) or "" in self._numbers:
            number = next(n for n, word in enumerate(words) if not word or self._numbers[word] != n)
            raise VocabularyError(f"line {number + 1} is empty, or is there a second time: {words[number]!r}")
        self.size, self._lower = len(words), lower

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        find, unknown, end = self._numbers.get, 1, 2
        return [[*(find(word, unknown) for word in words_of(text, self._lower)), end] for text in texts]


def words_of(text: str, lower: bool = True) -> list[str]:
    """The words of a text, as the tokenizer "words" sees them."""
    text = unicodedata.normalize("NFC", text)
    return _WORD.findall(text.lower() if lower else text)


def vocabulary(texts: Iterable[str], lower: bool = True, min_count: int = 1, max_size: int | None = None) -> str:
    """The words of some texts as the content of a `TextSpec`, the frequent ones first; the same for the same texts in
    any order.

    Args:
        min_count: rarer words are left out.
        max_size: at most so many tokens, the special ones included; None: all.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words_of(text, lower))
    frequent = sorted((word for word, count in counts.items() if count >= min_count), key=lambda w: (-counts[w], w))
    return "\n".join([*SPECIAL, *frequent][:max_size]) + "\n"


def from_lines(text: str) -> str:
    """The content of a `TextSpec` of a file of words, one a line; `SPECIAL` stands before them or is added.

    Raises:
        VocabularyError: a line is empty, or is there twice.
    """
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    added = 0 if tuple(lines[: len(SPECIAL)]) == SPECIAL else len(SPECIAL)
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line or line in seen:
            raise VocabularyError(f"line {number} {'is there a second time: ' + repr(line) if line else 'is empty'}")
        seen.add(line)
    return "\n".join([*SPECIAL[:added], *lines]) + "\n"


def cut(tokens: list[int], length: int) -> list[int]:
    """At most so many tokens, of which the last is what was the last: the end."""
    return tokens if len(tokens) <= length else [*tokens[: length - 1], tokens[-1]]
