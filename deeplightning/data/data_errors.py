"""Exceptions for faults in data or its config, each with the exit code of the command line."""

from deeplightning.words import is_whole


class DataError(Exception):
    """The data on this machine is not what the config needs: missing, truncated, not images."""

    exit_code = 3

    def __init__(self, message: str):
        # torch passes a loader worker's whole traceback as the message (torch._utils.ExceptionWrapper, torch 2.15).
        if message.startswith("Caught DataError in DataLoader worker"):
            message = message.rpartition("DataError: ")[2].strip()
        super().__init__(message)


class DataConfigError(ValueError):
    """A value under `data` in the config is invalid, alone or in combination with another."""

    exit_code = 2


def require_whole(param: str, value: object, least: int = 1) -> None:
    """Raise DataConfigError unless a parameter of the data module is a whole number of at least `least`."""
    if not is_whole(value, least):
        raise DataConfigError(f"data.module.params.{param} must be a whole number of at least {least}, not {value!r}.")
