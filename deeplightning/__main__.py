"""`python -m deeplightning` is `deeplightning`."""

from deeplightning.cli import main

if __name__ == "__main__":
    main()
