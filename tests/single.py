"""`deeplightning` where one CPU process keeps the engine that it is asked for, as one GPU does.

Without a GPU a single process needs no backend, and `settle` takes it away: fsdp and ZeRO in one process, an everyday
case on a machine with one GPU, would be run by no test.
"""

from typing import Any

from deeplightning import cli
from deeplightning.checks import examine


def keep_backend() -> None:
    """Has configs settle as on a machine with one GPU, as far as the backend goes."""
    settle = examine.settle

    def settled(cfg: Any) -> Any:
        asked = cfg.engine.backend
        found = settle(cfg)
        cfg.engine.backend = asked
        return found

    examine.settle = settled


def main() -> None:
    """Instead of `deeplightning.cli:main`."""
    keep_backend()
    cli.main()
