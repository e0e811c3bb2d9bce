"""What a task finds wrong; each says whose turn it is by its `exit_code`."""


class LabelError(ValueError):
    """The data's labels do not fit the network's classes. Ends the run with exit code 3."""

    exit_code = 3


class MisfitError(ValueError):
    """Parts of the config that do not fit each other. Ends the run with exit code 2."""

    exit_code = 2
