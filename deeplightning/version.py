"""Define the version of this package; pyproject.toml reads it from here."""

__version__ = "1.0.0"
