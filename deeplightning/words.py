"""An exception in few words. Imports nothing, so that everything may use it."""

MAX_LINE = 300  # characters


def first_line(error: BaseException) -> str:
    """The first line of an exception's text that is not empty; the exception's name where the text is empty."""
    return next((line.strip()[:MAX_LINE] for line in str(error).splitlines() if line.strip()), type(error).__name__)
