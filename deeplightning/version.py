"""The version of this program, as the package's metadata have it."""

__version__ = "0.1.0"
