"""Entry point: `python -m deeplightning` is the same as `deeplightning`."""

import os
import sys

if sys.path[:1] in ([""], [os.getcwd()]):  # noqa: PTH109
    # `python -m` puts the working directory first, where a user's `random.py` would shadow the standard library's.
    del sys.path[0]

from deeplightning.process import streams
from deeplightning.process.terminal import say

if "DEEPLIGHTNING_ROOTS" in os.environ:  # started by a run; it may unpickle objects of the user's classes
    import deeplightning.own_code  # noqa: F401


def main() -> None:
    """Prepare streams and signals, then import and run the command."""
    try:
        streams.prepare()
        from deeplightning.cli import main as run

        run()
    except KeyboardInterrupt as error:
        say(f"error: {error}" if streams.received_signal else "interrupted", err=True)
        sys.exit(streams.TERMINATED_CODE if streams.received_signal else 130)


if __name__ == "__main__":
    main()
