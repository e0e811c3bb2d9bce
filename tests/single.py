"""Run `deeplightning` so that one CPU process keeps the configured engine, as one GPU does.

Without a GPU a single process needs no backend, and `resolve_engine` removes it. This keeps it, so that tests cover
fsdp and ZeRO in one process, which is common on a machine with one GPU.
"""

from typing import Any

from deeplightning import cli
from deeplightning.config import examine


def keep_backend() -> None:
    """Keep the backend of a config as on a machine with one GPU."""
    resolve_engine = examine.resolve_engine

    def resolved(cfg: Any) -> Any:
        backend, found = cfg.engine.backend, resolve_engine(cfg)
        cfg.engine.backend = backend
        return found

    examine.resolve_engine = resolved


def main() -> None:
    """Run the command with that backend, instead of `deeplightning.cli:main`."""
    keep_backend()
    cli.main()
