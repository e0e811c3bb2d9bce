"""What a task finds wrong; each says whose turn it is by its `exit_code`."""


class _AboutKey(ValueError):
    """
    Attributes:
        key: the config key that it is about, where the message does not begin with it.
    """

    def __init__(self, message: str, key: str | None = None):
        super().__init__(message)
        self.key = key


class LabelError(_AboutKey):
    """The data's labels do not fit the network's classes. Ends the run with exit code 3."""

    exit_code = 3


class MisfitError(_AboutKey):
    """Parts of the config that do not fit each other. Ends the run with exit code 2."""

    exit_code = 2
