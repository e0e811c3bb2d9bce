"""Run `deeplightning` so that one CPU process keeps the configured engine, as one GPU does.

Without a GPU a single process needs no backend, and `settle` removes it. No test would then run fsdp and ZeRO in one
process, which is common on a machine with one GPU.
"""

from typing import Any

from deeplightning import cli
from deeplightning.config import examine


def keep_backend() -> None:
    """Let configs keep their backend as on a machine with one GPU."""
    settle = examine.settle

    def settled(cfg: Any) -> Any:
        asked = cfg.engine.backend
        found = settle(cfg)
        cfg.engine.backend = asked
        return found

    examine.settle = settled


def main() -> None:
    """Run the command with that backend, instead of `deeplightning.cli:main`."""
    keep_backend()
    cli.main()
