"""The command's entry: `python -m deeplightning` is `deeplightning`."""

import os
import sys

if sys.path[:1] in ([""], [os.getcwd()]):  # noqa: PTH109
    # `python -m` puts the working directory first: a user's `random.py` would come before the standard library's.
    sys.path.append(sys.path.pop(0))

from deeplightning import process

if "DEEPLIGHTNING_ROOTS" in os.environ:  # a process that a run has started, perhaps to unpickle what is the user's
    import deeplightning.config.own  # noqa: F401


def main() -> None:
    """Hears signals from here on, then imports and runs the command."""
    process.prepare()
    try:
        from deeplightning.cli import main as run
    except KeyboardInterrupt as error:
        print(f"error: {error}" if process.heard else "interrupted", file=sys.stderr)
        sys.exit(process.TERMINATED_CODE if process.heard else 130)
    run()


if __name__ == "__main__":
    main()
