"""Convert texts to numbers: `TextSpec` converts texts to the tokens that a network was trained on.

Training and serving both call it, so they cannot disagree. Uses numpy and the standard library only; a tokenizer in
Hugging Face's file format also needs the package `tokenizers`. Letters: N texts, L tokens of the longest.

Our own tokenizer, "words", normalizes the text to Unicode's form NFC and, if asked, to lower case. A word is a run of
letters, digits and underscores, with apostrophes inside (it's, n't); any other character that is not a space is a token
by itself. A word that is not in the vocabulary becomes `<unknown>`; each text ends with `<end>`.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from deeplightning.words import InputError, is_whole, require_keys

PADDING, UNKNOWN, END = "<padding>", "<unknown>", "<end>"
SPECIAL = (PADDING, UNKNOWN, END)
"""First tokens of each vocabulary of words, with the numbers 0, 1 and 2. No text contains them: `<` is a token by
itself."""

PADDINGS = ("[PAD]", "<pad>", "<|padding|>", "<|endoftext|>")
"""Names of the padding token to look for in Hugging Face files that do not define one."""

FILES = {"words": "vocabulary.txt", "hugging_face": "tokenizer.json"}
"""Kinds of tokenizers, with the name of the file in which a bundle keeps the vocabulary or the tokenizer."""

_KEYS = ("tokenizer", "file", "size", "lower", "max_length", "limit")  # of a spec in a bundle
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")  # noqa: RUF001 (the second apostrophe is the typographer's)


class TextError(InputError):
    """Raised for a text that cannot be used.

    Attributes:
        status: 400 empty, 413 too long, 415 not text.
    """


class VocabularyError(ValueError):
    """Raised for an invalid vocabulary or tokenizer file; the message is one sentence and names the line."""


@dataclass(frozen=True)
class TextSpec:
    """Describe how texts are prepared for one network.

    Attributes:
        tokenizer: "words" (our own, see above) or "hugging_face".
        content: the text of the tokenizer's file: one token a line, the first three being `SPECIAL`; or a
            `tokenizer.json` of Hugging Face.
        lower: whether words are converted to lower case; a file of Hugging Face has its own setting.
        max_length: longer texts are cut to this number of tokens and keep their last token; None: they are not cut.
        limit: the most tokens that the network accepts; None: any number.
        column: name of the column of the training table that has the texts; None: unknown.
        encoding: encoding of the file with the training texts, such as cp1252.

    Raises:
        ValueError: a value is out of range.
        VocabularyError: the content is invalid.
        ImportError: the package `tokenizers` is needed and not installed.
    """

    tokenizer: str
    content: str = field(repr=False)
    lower: bool = True
    max_length: int | None = None
    limit: int | None = None
    column: str | None = None
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        if not isinstance(self.tokenizer, str) or self.tokenizer not in FILES:
            raise ValueError(f"tokenizer must be one of {', '.join(FILES)}, not {self.tokenizer!r}")
        for name in ("max_length", "limit"):
            value = getattr(self, name)
            if value is not None and not is_whole(value, 1):
                raise ValueError(f"{name} must be null or a whole number of tokens of at least 1, not {value!r}")
        if not isinstance(self.lower, bool):
            raise ValueError(f"lower must be true or false, not {self.lower!r}")
        if not isinstance(self.column, str | None) or not isinstance(self.encoding, str):
            raise ValueError(f"column must be null or a text, encoding a text, not {self.column!r}, {self.encoding!r}")
        self._encoder  # noqa: B018 (raises if the content is invalid)

    @property
    def file(self) -> str:
        """Name of the file in which a bundle keeps the content."""
        return FILES[self.tokenizer]

    @property
    def size(self) -> int:
        """Number of tokens; they are numbered from 0."""
        return self._encoder.size

    @property
    def padding(self) -> int:
        """Token that pads the shorter texts of a batch."""
        return self._encoder.padding

    @cached_property
    def _encoder(self) -> Any:
        return _Words(self.content, self.lower) if self.tokenizer == "words" else _HuggingFace(self.content)

    def encode(self, texts: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the tokens of each text, at least one.

        Args:
            max_length: cut to this number of tokens; None: to the spec's `max_length`.
        """
        encoded, most = self._encoder.encode([text.strip() for text in texts]), max_length or self.max_length
        return encoded if most is None else [cut(tokens, most) for tokens in encoded]

    def prepare(self, data: bytes | str) -> np.ndarray:
        """Convert one text that a client sent to int64 (L,).

        Raises:
            TextError: it is not UTF-8, has only white space, or has more tokens than the network accepts.
        """
        if isinstance(data, bytes):
            try:
                data = data.decode()
            except UnicodeDecodeError:
                raise TextError("The text is not UTF-8.", 415) from None
        if not isinstance(data, str):
            raise TextError(f"This is not a text, but of type {type(data).__name__}.", 415)
        if not data.strip():
            raise TextError("The text is empty.", 400)
        (tokens,) = self.encode([data])
        if self.limit is not None and len(tokens) > self.limit:
            raise TextError(
                f"The text has {len(tokens):,} tokens, and the network takes at most {self.limit:,}; shorten it.", 413
            )
        return np.array(tokens, np.int64)

    def stack(self, rows: Sequence[np.ndarray | Sequence[int]]) -> np.ndarray:
        """Stack the tokens of N texts as one array, int64 (N, L); shorter texts are padded at their end."""
        filled = np.full((len(rows), max(map(len, rows))), self.padding, np.int64)
        for target, row in zip(filled, rows, strict=True):
            target[: len(row)] = row
        return filled

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON types for a bundle, which stores the content in another file."""
        kept = {name: getattr(self, name) for name in (*_KEYS, "column")}
        return kept if self.encoding == "utf-8" else kept | {"encoding": self.encoding}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], content: str) -> "TextSpec":
        """Reverse `to_dict`.

        Raises:
            ValueError: a key is missing or unknown, or a value is out of range or does not match this content.
        """
        require_keys("a text spec", values, _KEYS, ["column", "encoding"])  # older bundles lack them
        spec = cls(content=content, **{name: value for name, value in values.items() if name not in ("file", "size")})
        for name in ("file", "size"):
            if getattr(spec, name) != values[name]:
                raise ValueError(f"{name} is {getattr(spec, name)!r}, not {values[name]!r}")
        return spec


class _Words:
    """Tokenizer "words", see the module's docstring."""

    padding = 0

    def __init__(self, content: str, lower: bool):
        words = content.removesuffix("\n").split("\n")
        if tuple(words[: len(SPECIAL)]) != SPECIAL:
            raise VocabularyError(f"a vocabulary must begin with the lines {', '.join(SPECIAL)}")
        self._numbers = {word: number for number, word in enumerate(words)}
        if len(self._numbers) != len(words) or "" in self._numbers:
            number = next(n for n, word in enumerate(words) if not word or words.index(word) != n)
            raise VocabularyError(f"word {number - 2} is empty or a duplicate: {words[number]!r}")
        self.size, self._lower = len(words), lower

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        find, unknown, end = self._numbers.get, 1, 2
        return [[*(find(word, unknown) for word in words_of(text, self._lower)), end] for text in texts]


class _HuggingFace:
    """Tokenizer of a Hugging Face `tokenizer.json`, including the special tokens that it adds.

    Raises:
        VocabularyError: it is not such a file, or has no padding token.
        ImportError: the package `tokenizers` is not installed; the extra `text` installs it.
    """

    def __init__(self, content: str):
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # the library raises Exception itself
            raise VocabularyError(f"this is not a tokenizer.json of Hugging Face ({str(error)[:200]})") from error
        known = self._tokenizer.get_vocab(with_added_tokens=True)
        named = (self._tokenizer.padding or {}).get("pad_token")
        found = next((name for name in (named, *PADDINGS) if name in known), None)
        if found is None:
            raise VocabularyError(f"it has no padding token, none of {', '.join(PADDINGS)}")
        self.padding, self.size = known[found], max(known.values()) + 1
        self._tokenizer.no_padding()  # TextSpec pads and cuts
        self._tokenizer.no_truncation()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text; a text without tokens gets one padding token."""
        return [encoding.ids or [self.padding] for encoding in self._tokenizer.encode_batch(list(texts))]


def words_of(text: str, lower: bool = True) -> list[str]:
    """Split a text into words, as the tokenizer "words" does."""
    text = unicodedata.normalize("NFC", text)
    return _WORD.findall(text.lower() if lower else text)


def vocabulary(texts: Iterable[str], lower: bool = True, min_count: int = 1, max_size: int | None = None) -> str:
    """Count the words of texts and return the content of a `TextSpec`, with the most frequent words first.

    The order of the texts does not matter.

    Args:
        min_count: rarer words are left out.
        max_size: maximum number of tokens, including the special ones; None: no limit.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words_of(text, lower))
    frequent = sorted((word for word, count in counts.items() if count >= min_count), key=lambda w: (-counts[w], w))
    return "\n".join([*SPECIAL, *frequent][:max_size]) + "\n"


def from_lines(text: str) -> str:
    """Return the content of a `TextSpec` from a file of words, one a line; `SPECIAL` is added if it is missing."""
    given = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    present = {*given}  # a word in both forms keeps both lines
    lines = [line if (nfc := unicodedata.normalize("NFC", line)) in present else nfc for line in given]
    added = () if tuple(lines[: len(SPECIAL)]) == SPECIAL else SPECIAL
    return "\n".join([*added, *lines]) + "\n"


def cut(tokens: list[int], length: int) -> list[int]:
    """Cut tokens to a length, and keep the last one, which ends the text."""
    return tokens if len(tokens) <= length else [*tokens[: length - 1], tokens[-1]]
