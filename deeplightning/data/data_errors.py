"""What can be wrong with data, in words for the user; the exit code tells the command line whose turn it is."""

from deeplightning.words import is_whole


class DataError(Exception):
    """The data on this machine are not as the config needs them: missing, cut off, not images."""

    exit_code = 3

    def __init__(self, message: str):
        # A loader worker hands its whole traceback over as the message (torch._utils.ExceptionWrapper, torch 2.15).
        if message.startswith("Caught DataError in DataLoader worker"):
            message = message.rpartition("DataError: ")[2].strip()
        super().__init__(message)


class DataConfigError(ValueError):
    """A value under `data` in the config is impossible, alone or beside another."""

    exit_code = 2


def require_whole(param: str, value: object, least: int = 1) -> None:
    """Raise DataConfigError unless a param of the data module is a whole number of at least `least`."""
    if not is_whole(value, least):
        raise DataConfigError(f"data.module.params.{param} must be a whole number of at least {least}, not {value!r}.")
