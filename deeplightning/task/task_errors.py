"""What a task finds wrong; each says whose turn it is by its `exit_code`."""


class LabelError(ValueError):
    """The data's labels do not fit the network's classes. Ends the run with exit code 3.

    Attributes:
        key: the config key that it is about, where the message does not begin with it.
    """

    exit_code = 3

    def __init__(self, message: str, key: str | None = None):
        super().__init__(message)
        self.key = key


class MisfitError(ValueError):
    """Parts of the config that do not fit each other. Ends the run with exit code 2.

    Attributes:
        key: the config key that it is about, where the message does not begin with it.
    """

    exit_code = 2

    def __init__(self, message: str, key: str | None = None):
        super().__init__(message)
        self.key = key
