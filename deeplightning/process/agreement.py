"""Starting the processes of a run, connecting them and reporting the first cause when one of them fails.

Torch and Lightning are imported only where a run begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from deeplightning.faults import Fault, SetupError
from deeplightning.private.lightning import set_launcher, share_threads, subprocess_launcher
from deeplightning.process import failure, ranks
from deeplightning.process.identity import identity
from deeplightning.process.rendezvous import join
from deeplightning.process.streams import Interrupted, Terminated

if TYPE_CHECKING:
    import pytorch_lightning as pl


def connect(
    trainer: pl.Trainer,
    redact: Callable[[str], str],
    end: Callable[[BaseException], None],
    alike: Mapping[str, str] | None = None,
) -> None:
    """Let the processes of a trainer end together, and report the first cause once.

    Args:
        redact: removes secrets from messages.
        end: called with the error of the run if the main thread is blocked.
        alike: values that must be equal in all processes, by name; processes started one by one compare them.
    """
    ranks.prepare(redact, end)
    strategy: Any = trainer.strategy
    if getattr(strategy, "cluster_environment", None) is None or trainer.num_nodes * strategy.num_processes < 2:
        return

    def ending(error: BaseException) -> BaseException:
        if isinstance(error, failure.RankError) and error.exit_code in failure.INTERRUPTED.values():
            return Interrupted(error.cause.reason.removeprefix("interrupted by "), error.exit_code, at_once=True)
        return error

    class Launcher(subprocess_launcher()):  # type: ignore[misc]
        """Lightning's launcher without its observer, which kills the main process before it can report a failure."""

        _store: tuple[object] | None = None  # keeps torch's store alive

        def launch(self, function: Any, *args: object, trainer: Any = None, **kwargs: Any) -> Any:
            """Call the function in all processes; an error it raises is traced to its first cause."""
            environment = self.cluster_environment
            starts_others = not environment.creates_processes_externally
            rank = environment.node_rank() * self.num_processes + environment.local_rank()
            if (here := identity()) is not None and here.is_binding:
                rank = here.rank  # machines may have different numbers of processes
            group = ranks.begin(rank, starts_others and self.num_processes > 1)
            group.redact, group.end = redact, lambda error: end(ending(error))
            group.hear_signals()
            try:
                environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
                if self._store is None:
                    size = (self.num_processes, self.num_nodes)
                    self._store = (join(environment, rank, *size, alike or {}, self._start_others),)
                share_threads(self.num_processes)
                return function(*args, **kwargs)
            except KeyboardInterrupt as error:  # Lightning would end with exit code 1
                how = ("SIGTERM", 143) if isinstance(error, Terminated) else ("SIGINT", 130)
                raise group.cause_of(Interrupted(*how, at_once=True)) from None
            except BaseException as error:
                cause = group.cause_of(error)
                if cause is error:
                    raise
                raise ending(cause) from error

        def _start_others(self) -> None:
            group = ranks.here()
            assert group is not None
            os.environ["LOCAL_WORLD_SIZE"] = str(self.num_processes)
            try:
                self._call_children_scripts()
            except OSError as error:
                started = f"{1 + len(self.procs)} of {self.num_processes} processes could be started"
                for child in self.procs:
                    child.kill()
                raise SetupError(Fault(f"only {started}: {error.strerror}", "engine.processes")) from error
            finally:
                group.children = self.procs

    set_launcher(strategy, Launcher(strategy.cluster_environment, strategy.num_processes, trainer.num_nodes))


def all_ended() -> None:
    """Wait for the processes that this one started, once its own work is done.

    Raises:
        RankError: one of them failed after its last message.
    """
    if (group := ranks.here()) is not None and group.children:
        group.end_children()
        if (cause := group.failed_child()) is not None:
            group.record_cause(cause)
            raise failure.RankError(group.first() or cause)
