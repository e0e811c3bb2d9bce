"""An exception in few words. Imports nothing, so that everything may use it."""

MAX_LINE = 300  # characters

_NO_MEMORY = ("allocate memory", "start new thread", "could not create a primitive", "could not create a memory object")
_UNSUPPORTED = "could not create a primitive descriptor"
"""Of oneDNN, which has one text for all reasons that it does not compute for; this one has others."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's text that is not empty; the exception's name where the text is empty."""
    return next((line.strip()[:MAX_LINE] for line in str(error).splitlines() if line.strip()), type(error).__name__)


def lacks_memory(error: BaseException) -> bool:
    """Whether an exception says that the machine or a device has no memory left. Torch has no class for the memory of
    the CPU (2.15): its allocator and oneDNN raise RuntimeError, and Python does where a thread cannot be started."""
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return _UNSUPPORTED not in text and any(words in text for words in _NO_MEMORY)
