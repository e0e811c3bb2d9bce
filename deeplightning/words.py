"""An exception in few words, text that is safe to show, and the parts of a metric's name. Imports nothing of ours, so
that everything may use it."""

import re

MAX_LINE = 300  # characters

_STEERS = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # the direction of writing
    "\xad\u180e\u200b-\u200d\u2060-\u2065\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff"  # no width
    "\u2028\u2029\ud800-\udfff\ufffe\uffff]"  # line ends of Unicode; no characters
)

_STAGES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_STAGE = re.compile(f"({'|'.join(_STAGES)})[_/.-](.+)|(.+)[_/.-]({'|'.join(_STAGES)})", re.IGNORECASE)

_NO_MEMORY = ("allocate memory", "start new thread", "could not create a primitive", "could not create a memory object")
_UNSUPPORTED = "could not create a primitive descriptor"
"""Of oneDNN, which has one text for all reasons that it does not compute for; this one has others."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's text that is not empty; the exception's name where the text is empty."""
    return next((line.strip()[:MAX_LINE] for line in str(error).splitlines() if line.strip()), type(error).__name__)


def stage_of(metric: str) -> tuple[str, str]:
    """Return the stage that a metric is of ("train", "val", "test", or "" where its name does not say), and the rest of
    its name: ("val", "loss") of `val_loss`, `valid/loss` and `loss/val`."""
    match = _STAGE.fullmatch(metric)
    if match is None:
        return "", metric
    return _STAGES[(match[1] or match[4]).lower()], match[2] or match[3]


def lacks_memory(error: BaseException) -> bool:
    """Whether an exception says that the machine or a device has no memory left. Torch has no class for the memory of
    the CPU (2.15): its allocator and oneDNN raise RuntimeError, and Python does where a thread cannot be started."""
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return _UNSUPPORTED not in text and any(words in text for words in _NO_MEMORY)


def printable(text: str, keep: str = "") -> str:
    """Text from anywhere, for a terminal, a log or a page: what could steer a terminal, change the order of its letters
    or hide in it becomes an escape sequence. A string of JSON or a double-quoted one of YAML keeps its meaning.

    Args:
        keep: characters that the writer itself has set, such as the line ends between its lines.
    """
    return _STEERS.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def _escape(character: str) -> str:
    return "\\u007f" if character == "\x7f" else repr(character)[1:-1]  # the one that `json.dumps` leaves as it is
