"""What a config got from the environment, or holds in clear as it should not: noted, and taken out of what is shown."""

import base64
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import quote, quote_plus

from deeplightning.config.tree import Entry, KeyPath, leaves, nodes, plain

CUT = 20  # characters: a value that a message has cut is known by its first ones
_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_MAYBE_KEY = re.compile(r"(?i)pass|pwd|secret|token|credential|key|salt|auth")
_MAYBE_VALUE = re.compile(r"://[^\s/]*@|-----BEGIN|=|\s")
_LONG, _DOTTED = re.compile(r"[\w+/-]{16}"), re.compile(r"(?:[^\W\d]+\.)+[^\W\d]+")
_SETTING = re.compile(
    r"(?:CUBLAS|CUBLASLT|CUDA|CUDNN|NCCL|NVIDIA|NVSHMEM|NVTE|HIP|HSA|MIOPEN|RCCL|ROCM|GLOO|MPI|OMPI|UCX|FI"
    r"|BLIS|DNNL|GOMP|KMP|MALLOC|MKL|NUMEXPR|OMP|ONEDNN|OPENBLAS|TBB|VECLIB"
    r"|NUMBA|PYTORCH|TORCH|TORCHELASTIC|TORCHINDUCTOR|TRITON|XLA|PL|DS|DEEPLIGHTNING|RAY|SLURM"
    r"|HF_DATASETS|HF_HUB|TOKENIZERS|TRANSFORMERS|LC|LD|XDG)_\w+"
    r"|PYTHON\w*|MASTER_ADDR|MASTER_PORT|HF_HOME|HOME|LANG|LANGUAGE|PATH|TMPDIR|TZ"
)
"""Variables of `engine.env` that are known to be no secrets."""


@dataclass
class Secrets:
    """What came from the environment, or should have: never printed, saved or tracked.

    A secret that is written in clear counts as if `${oc.env:NAME}` stood there, with a name made of its key.
    """

    texts: dict[KeyPath, str] = field(default_factory=dict)  # path of a value → how it was written, `${…}` and all
    values: dict[str, str] = field(default_factory=dict)  # value → the expression it came from
    words: set[KeyPath] = field(default_factory=set)  # paths of values that hold a variable's text, or its default
    literals: dict[str, tuple[KeyPath, str]] = field(default_factory=dict)  # variable → path and value in clear

    def is_word(self, path: KeyPath) -> bool:
        """Return whether a text at a path may be read as a number: a variable holds nothing but text."""
        return any(path[:n] in self.words for n in range(len(path), 0, -1))

    def text_of(self, path: KeyPath) -> str | None:
        """Return the text of the value at a path as written, if the value or its section came from the environment."""
        return next((self.texts[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.texts), None)

    def note(self, path: KeyPath, text: str, seen: Mapping[str, str | None]) -> None:
        """Note that a text at a path asked for these variables."""
        if seen:
            self.words.add(path)
        found = {name: value for name, value in seen.items() if value is not None}
        if found:
            self.texts[path] = text
            self.values.update((value, f"${{oc.env:{name}}}") for name, value in found.items() if tells(value))

    def redact(self, text: str) -> str:
        """Return a text without what came from the environment, in every form that `redact` knows."""
        return redact(text, self.values)

    def redact_message(self, text: str) -> str:
        """Redact a message, and remove what looks like a secret too."""
        from deeplightning.config.secret_scan import conceal  # 10 ms

        return conceal(redact(text, self.values), ".txt")[0]

    def variables(self) -> dict[str, str]:
        """Return the variables that replace secrets written in clear: with them set, what this run saves can be read by
        it and by the processes that it starts."""
        return {name: value for name, (_, value) in self.literals.items()}


def redact(text: str, values: Mapping[str, str], other: str | None = None) -> str:
    """Return a text without values: plain, as Python's repr and JSON write them, quoted for a URL, in base64 (also as a
    part of what was encoded), and of each of these the first 20 characters or more.

    Args:
        values: what replaces each.
        other: what replaces a form that is not the plain one; None: the same.
    """
    for value in sorted(values, key=len, reverse=True):
        for form in _forms(value):
            instead = values[value] if other is None or form == value else other
            text = text.replace(form, instead)
            begin = text.find(form[:CUT]) if len(form) > CUT else -1
            instead = values[value] if other is None else other
            while begin >= 0:
                end = begin + CUT
                while text[end : end + 1] == form[end - begin : end - begin + 1] != "":
                    end += 1
                text = text[:begin] + instead + text[end:]
                begin = text.find(form[:CUT], begin + len(instead))
    return text


@cache
def _forms(value: str) -> tuple[str, ...]:
    """Return how messages of other libraries may write a value."""
    forms = [value, repr(value)[1:-1], json.dumps(value)[1:-1]]
    content = value.encode("utf-8", "surrogateescape")
    forms += [quote(content), quote(content, safe=""), quote_plus(content), quote(content, safe="").lower()]
    for encode in (base64.b64encode, base64.urlsafe_b64encode) if len(value) >= 6 else ():
        forms.append(encode(content).decode())
        for before in range(3):  # characters in front of it shift it; those that they share are dropped
            whole = encode(bytes(before) + content).decode().rstrip("=")
            shared = len(content) + before
            forms.append(whole[-(-before * 8 // 6) : shared * 8 // 6])
    return tuple(dict.fromkeys(forms))


def note_literals(root: Entry, secrets: Secrets) -> None:
    """Note secrets that are written in clear, and which values refer to them."""
    for path, entry in leaves(root):
        text = str(entry.value)
        name = next((part for part in reversed(path) if isinstance(part, str)), "")
        is_unknown = path[:2] == ("engine", "env") and not _SETTING.fullmatch(name)
        is_random = _LONG.search(text) and not _DOTTED.fullmatch(text)
        if not (is_unknown or _MAYBE_KEY.search(name) or _MAYBE_VALUE.search(text) or is_random):
            continue
        if isinstance(entry.value, bool | float | None) or secrets.text_of(path):
            continue
        if not is_unknown and (not tells(text) or (entry.written and _REFERENCE.search(entry.written))):
            continue
        from deeplightning.config.secret_scan import BLOT, is_rare, secrets_in_value  # 10 ms, and few configs have any

        if is_unknown and isinstance(entry.value, str):
            secrets.literals[name], secrets.texts[path] = (path, text), f"${{oc.env:{name}}}"
            if tells(text) and (is_rare(text) or secrets_in_value(name, text)):  # messages need ordinary words
                secrets.values[text] = secrets.texts[path]
            continue
        parts, done = [], 0
        for number, (start, end) in enumerate(secrets_in_value(name, text), start=1):
            variable = re.sub(r"\W+", "_", "_".join(map(str, path)).upper()) + (f"_{number}" if number > 1 else "")
            expression = f"${{oc.env:{variable}}}"
            if not isinstance(entry.value, str):
                expression = f"${{oc.decode:{expression}}}"
            secrets.literals[variable] = path, text[start:end]
            secrets.values[text[start:end]] = expression
            password = text[start:end].partition(":")[2] if text[end : end + 1] == "@" else ""
            if tells(password):  # of an address: messages may cite it alone
                secrets.values.setdefault(password, BLOT)
            parts += [escaped(text[done:start]), expression]
            done = end
        if parts:
            secrets.texts[path] = "".join([*parts, escaped(text[done:])])
    clear = {text: secrets.values[text] for _, text in secrets.literals.values() if text in secrets.values}
    for path, entry in nodes(root) if clear else ():
        if secrets.text_of(path) is None and any(value in str(plain(entry)) for value in clear):
            if entry.written is not None and _REFERENCE.search(entry.written):
                secrets.texts[path] = entry.written
            elif isinstance(entry.value, str):
                secrets.texts[path] = redact(escaped(entry.value), clear)


def escaped(text: str) -> str:
    """Return the text as a config writes it literally: `${` in it is no reference."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def literal(text: str) -> str:
    """Return a whole text as a config writes it: neither a reference nor `???`, the word for a missing value."""
    return f"\\{text}" if re.fullmatch(r"\\*\?\?\?", text) else escaped(text)


def tells(value: str) -> bool:
    """Return whether a variable's value is distinguishable from other words: it is not among the shortest, and is no
    folder or file of this machine, which every message about it contains."""
    return len(value) >= 4 and not os.path.exists(value)  # noqa: PTH110  (Path's fails for a text that is too long)
