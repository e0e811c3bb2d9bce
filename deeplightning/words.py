"""Shorten exceptions, recognise addresses and lack of memory, escape text, find similar words, check values.

It imports no module of ours, so that every module may use it.
"""

import contextlib
import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

MAX_LINE_CHARACTERS = 300

_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # the direction of writing
    "\xad\u180e\u200b-\u200d\u2060-\u2065\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff"  # no width
    "\u2028\u2029\ud800-\udfff\ufffe\uffff]"  # line ends of Unicode; no characters
)

_ADDRESS = re.compile(  # `Path` reduces two slashes to one; `zip::s3://…` is a file inside another
    r"((?:[A-Za-z][A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+):/{1,2}(.*)", re.DOTALL
)

_STAGES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_STAGE = re.compile(f"({'|'.join(_STAGES)})[_/.-](.+)|(.+)[_/.-]({'|'.join(_STAGES)})", re.IGNORECASE)

_NO_MEMORY = (
    *("allocate memory", "start new thread", "could not create a primitive", "could not create a memory object"),
    *("CUDA error: out of memory", "_STATUS_ALLOC_FAILED"),  # of a CUDA context, cuBLAS and cuDNN
)
_UNSUPPORTED = "could not create a primitive descriptor"
"""oneDNN does not report the reason of a failure; this message has other causes than memory."""


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an exception's text, or the exception's name if the text is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()[:MAX_LINE_CHARACTERS]


def stage_of(metric: str) -> tuple[str, str]:
    """Return the stage of a metric ("train", "val", "test", or "" if its name has none) and the rest of its name.

    `val_loss`, `valid/loss` and `loss/val` give ("val", "loss").
    """
    match = _STAGE.fullmatch(metric)
    return ("", metric) if match is None else (_STAGES[(match[1] or match[4]).lower()], match[2] or match[3])


def lacks_memory(error: BaseException) -> bool:
    """Return whether an exception means that the machine or a device is out of memory.

    Torch has no exception class for CPU memory (2.15): its allocator and oneDNN raise RuntimeError, and so does Python
    if a thread cannot be started.
    """
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return _UNSUPPORTED not in text and any(words in text for words in _NO_MEMORY)


def free_memory() -> int | None:
    """Return the available memory in bytes, from Linux's estimate and the control group's limit, or None if unknown."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # "max" means that there is no limit
        limit, taken = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        kept = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        found.append(limit - taken + int(kept["inactive_file"]) + int(kept["active_file"]))  # can be reclaimed
    return max(0, min(found)) if found else None


def printable(text: str, keep: str = "") -> str:
    """Escape characters that control a terminal, change the direction of writing, or are invisible.

    A JSON string or a double-quoted YAML string keeps its meaning.

    Args:
        keep: characters that are not escaped, such as line ends that the caller has added.
    """
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def _escape(character: str) -> str:
    return "\\u007f" if character == "\x7f" else repr(character)[1:-1]  # the only one that `json.dumps` does not escape


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return a sentence that names the most similar word, with a leading blank, or "" if none is similar."""
    close = difflib.get_close_matches(word, [*words], 1)
    return f" Do you mean {close[0]}?" if close else ""


class InputError(ValueError):
    """Raised for an input that cannot be used; the message is one sentence for users.

    Attributes:
        status: status of the HTTP response.
    """

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def are_numbers(values: object) -> bool:
    """Return whether `values` is a list or tuple of finite numbers."""
    return isinstance(values, list | tuple) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) for value in values
    )


def is_number(cell: str) -> bool:
    """Return whether a value of a CSV file is a number rather than part of a header; `nan` and `inf` are numbers."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


def require_keys(what: str, values: object, known: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raise ValueError unless `values` is a mapping with these keys, and no others but the optional ones.

    Args:
        what: its name in the message.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} must be a mapping, not {type(values).__name__}")
    faults = [key for key in known if key not in values]
    if faults := faults + [str(key) for key in values if key not in (*known, *optional)]:
        raise ValueError(f"{what} has exactly the keys {', '.join(known)}; look at {', '.join(faults)}")


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an address, other than `pkg://`."""
    found = _ADDRESS.fullmatch(os.fspath(path))
    return found is not None and found[1] != "pkg"


def address_shown(address: str | os.PathLike[str]) -> str:
    """Return an address for messages: without query and fragment, which may contain a signature, and without user and
    password."""
    return re.sub(r"://[^/]*@", "://", _ADDRESS.sub(r"\1://\2", os.fspath(address))).partition("?")[0].partition("#")[0]
