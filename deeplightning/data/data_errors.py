"""What can be wrong with data, in words for the user; the exit code tells the command line whose turn it is."""


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
