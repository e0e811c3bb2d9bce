"""The command's entry: `python -m deeplightning` is `deeplightning`."""

import os
import sys

if sys.path[:1] in ([""], [os.getcwd()]):  # noqa: PTH109
    # `python -m` puts the working directory first: a user's `random.py` would come before the standard library's.
    del sys.path[0]

from deeplightning.process import streams
from deeplightning.process.terminal import say

if "DEEPLIGHTNING_ROOTS" in os.environ:  # a process that a run has started, perhaps to unpickle what is the user's
    import deeplightning.own_code  # noqa: F401


def main() -> None:
    """Listen to signals, then import and run the command."""
    try:
        streams.prepare()
        from deeplightning.cli import main as run

        run()
    except KeyboardInterrupt as error:
        say(f"error: {error}" if streams.heard else "interrupted", err=True)
        sys.exit(streams.TERMINATED_CODE if streams.heard else 130)


if __name__ == "__main__":
    main()
