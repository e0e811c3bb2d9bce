"""The version of this program, the one place where it is set; pyproject.toml reads it from here."""

__version__ = "1.0.0"
