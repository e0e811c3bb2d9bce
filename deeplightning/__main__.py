"""The command's entry: `python -m deeplightning` is `deeplightning`."""

import sys

from deeplightning import process


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
