"""Record secrets of a config, from the environment or written in clear, and redact them in all output."""

import base64
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from urllib.parse import quote, quote_plus

from deeplightning.config.tree import Entry, KeyPath, leaves, nodes, plain

CUT_CHARACTERS = 20  # a value that a message has truncated is recognised by this many first characters
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
"""Variables of `engine.env` that are certainly not secrets."""


@dataclass
class Secrets:
    """Values from the environment and secrets written in clear. They are never printed, saved or tracked.

    A secret in clear is treated as if the config had `${oc.env:NAME}`, with a name derived from its key.
    """

    texts: dict[KeyPath, str] = field(default_factory=dict)  # path of a value → its text with `${…}`
    values: dict[str, str] = field(default_factory=dict)  # value → its expression
    variable_paths: set[KeyPath] = field(default_factory=set)  # of values with the text of a variable, or its default
    literals: dict[str, tuple[KeyPath, str]] = field(default_factory=dict)  # variable → path and value in clear

    def is_env_var(self, path: KeyPath) -> bool:
        """Return whether the value at a path came from a variable, so that its text may stand for a number."""
        return any(path[:n] in self.variable_paths for n in range(len(path), 0, -1))

    def text_of(self, path: KeyPath) -> str | None:
        """Return the text of the value at a path as written, if the value or its section came from the environment."""
        return next((self.texts[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.texts), None)

    def record(self, path: KeyPath, text: str, seen: Mapping[str, str | None]) -> None:
        """Record that the text at a path refers to these variables."""
        if seen:
            self.variable_paths.add(path)
        found = {name: value for name, value in seen.items() if value is not None}
        if found:
            self.texts[path] = text
            self.values.update((value, f"${{oc.env:{name}}}") for name, value in found.items() if is_distinctive(value))

    def redact(self, text: str) -> str:
        """Redact the values from the environment in a text, in every form of `redact`."""
        return redact(text, self.values)

    def redact_message(self, text: str) -> str:
        """Redact a message, including text that looks like a secret."""
        from deeplightning.config.secret_scan import conceal  # 10 ms

        return conceal(redact(text, self.values), ".txt")[0]

    def in_clear(self) -> "Secrets":
        """Return only the secrets that are written in clear: the values of variables are references already."""
        return replace(self, values={t: self.values[t] for _, t in self.literals.values() if t in self.values})

    def variables(self) -> dict[str, str]:
        """Return the variables that replace secrets written in clear. With these set, the run and the processes that it
        starts can read what it saves."""
        return {name: value for name, (_, value) in self.literals.items()}


def redact(text: str, values: Mapping[str, str], other: str | None = None) -> str:
    """Replace values in a text: plain, as in Python's repr and JSON, quoted for a URL, in base64 (also within longer
    encoded data), and truncated to 20 or more characters of any of these.

    Args:
        values: value → its replacement.
        other: the replacement of a form other than the plain one; None: the same.
    """
    for value in sorted(values, key=len, reverse=True):
        for form in _forms(value):
            instead = values[value] if other is None or form == value else other
            text = text.replace(form, instead)
            begin = text.find(form[:CUT_CHARACTERS]) if len(form) > CUT_CHARACTERS else -1
            instead = values[value] if other is None else other
            while begin >= 0:
                end = begin + CUT_CHARACTERS
                while text[end : end + 1] == form[end - begin : end - begin + 1] != "":
                    end += 1
                text = text[:begin] + instead + text[end:]
                begin = text.find(form[:CUT_CHARACTERS], begin + len(instead))
    return text


def without_secrets(root: Entry, secrets: Secrets) -> Any:
    """Return the plain values of a tree as written, with references in place of secrets; keys stay unchanged."""
    for _, entry in nodes(root):
        text = entry.value if entry.written is None else entry.written
        if isinstance(text, dict | list):  # its items follow
            continue
        found = secrets.redact(text) if isinstance(text, str) else secrets.values.get(str(text), "")
        if found != text and (isinstance(text, str) or found.startswith("${oc.decode:")):
            entry.written = found
    return plain(root, written=True)


@cache
def _forms(value: str) -> tuple[str, ...]:
    """Return the forms in which messages of other libraries may contain a value."""
    forms = [value, repr(value)[1:-1], json.dumps(value)[1:-1]]
    content = value.encode("utf-8", "surrogateescape")
    forms += [quote(content), quote(content, safe=""), quote_plus(content), quote(content, safe="").lower()]
    for encode in (base64.b64encode, base64.urlsafe_b64encode) if len(value) >= 6 else ():
        forms.append(encode(content).decode())
        for before in range(3):  # preceding bytes shift the encoding; drop characters that contain their bits
            encoded = encode(bytes(before) + content).decode().rstrip("=")
            forms.append(encoded[-(-before * 8 // 6) : (len(content) + before) * 8 // 6])
    return tuple(dict.fromkeys(forms))


def record_literals(root: Entry, secrets: Secrets) -> None:
    """Record secrets that are written in clear, and the values that refer to them."""
    for path, entry in leaves(root):
        text = str(entry.value)
        name = next((part for part in reversed(path) if isinstance(part, str)), "")
        is_unknown = path[:2] == ("engine", "env") and not _SETTING.fullmatch(name)
        is_random = _LONG.search(text) and not _DOTTED.fullmatch(text)
        if not (is_unknown or _MAYBE_KEY.search(name) or _MAYBE_VALUE.search(text) or is_random):
            continue
        if isinstance(entry.value, bool | float | None) or secrets.text_of(path):
            continue
        if not is_unknown and (not is_distinctive(text) or (entry.written and _REFERENCE.search(entry.written))):
            continue
        from deeplightning.config.secret_scan import REDACTED, is_rare, secrets_in_value  # 10 ms, rarely needed

        if is_unknown and isinstance(entry.value, str):
            secrets.literals[name], secrets.texts[path] = (path, text), f"${{oc.env:{name}}}"
            if is_distinctive(text) and (is_rare(text) or secrets_in_value(name, text)):  # keep ordinary words
                secrets.values[text] = secrets.texts[path]
            continue
        parts, done = [], 0
        for number, (start, end) in enumerate(secrets_in_value(name, text), start=1):
            words = "_".join(map(str, path)).upper().encode("ascii", "backslashreplace").decode()  # as OmegaConf needs
            variable = re.sub(r"\W+", "_", words) + (f"_{number}" if number > 1 else "")
            expression = f"${{oc.env:{variable}}}"
            if not isinstance(entry.value, str):
                expression = f"${{oc.decode:{expression}}}"
            secrets.literals[variable] = path, text[start:end]
            secrets.values[text[start:end]] = expression
            password = text[start:end].partition(":")[2] if text[end : end + 1] == "@" else ""
            if is_distinctive(password):  # of an address; messages may contain it alone
                secrets.values.setdefault(password, REDACTED)
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
    """Escape `${` in a text, so that a config takes it literally."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def literal(text: str) -> str:
    """Escape a value, so that a config takes it neither as a reference nor as `???`, a missing value."""
    return f"\\{text}" if re.fullmatch(r"\\*\?\?\?", text) else escaped(text)


def is_distinctive(value: str) -> bool:
    """Return whether a value is worth redacting: it has at least 4 characters and is not the path of a file or folder,
    which messages about it must contain."""
    return len(value) >= 4 and not os.path.exists(value)  # noqa: PTH110  (Path's fails for a text that is too long)
