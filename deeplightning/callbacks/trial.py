"""Report the metric of a trial to its search after each validation, and end the run if the search gives it up.

The search is another process, perhaps on another machine: a message is one line of JSON over a connection of its own,
and so is the answer.
"""

import json
import socket
import sys
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from deeplightning.callbacks.record import Record
from deeplightning.process.streams import Interrupted

PATIENCE = 60.0  # seconds that the search may take to answer


class Pruned(Interrupted):
    """The search has given this trial up."""

    def __init__(self, words: str):
        super().__init__("SIGINT", 130, at_once=True)
        self.args = (words,)


class Trial(Callback):
    """Report to the search, on rank 0, and end the run on all ranks.

    Args:
        record: knows the run's folder.
        address: JSON of `host` and `port` of the search, its `token`, the number of the `trial`, and the `metric`.
    """

    def __init__(self, record: Record, address: str):
        self.record, self.search = record, json.loads(address)
        self._validated = False

    def _ask(self, trainer: Trainer, **words: object) -> dict[str, object]:
        """Return the search's answer to rank 0, on all ranks."""
        answer: dict[str, object] = {}
        if trainer.is_global_zero:
            answer = say(self.search, **words)
        return trainer.strategy.broadcast(answer) if trainer.world_size > 1 else answer

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Name the run, so that a trial that fails before its first step has one; a resumed run opens later."""
        if self.record.opened:
            self._name_run(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None:
            self._name_run(trainer)

    def _name_run(self, trainer: Trainer) -> None:
        run = getattr(trainer.logger, "run_id", None)
        self._ask(trainer, run=run, folder=str(self.record.folder.path))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metric = self.search["metric"]
        if trainer.enable_validation and not self._validated:
            return  # what the metric is now was reported before
        self._validated = False
        value, epoch = trainer.callback_metrics.get(metric), trainer.current_epoch + 1
        if value is None:
            self._ask(trainer, absent=sorted(trainer.callback_metrics))
            return
        answer = self._ask(trainer, step=epoch, value=float(value))
        if answer.get("tell") == "modules" and trainer.is_global_zero:
            say(self.search, modules=list(sys.modules))
        if not answer.get("prune"):
            return
        for logger in trainer.loggers:
            if hasattr(logger, "log_tags"):
                logger.log_tags({"trial.state": "pruned"})
        raise Pruned(f"pruned after epoch {epoch}: {metric} is {float(value):.6g}")


def say(search: dict[str, Any], **words: object) -> dict[str, object]:
    """Send the search a message and return its answer.

    Raises:
        Interrupted: there is no search any more.
    """
    message = {"token": search["token"], "trial": search["trial"], **words}
    try:
        with socket.create_connection((search["host"], search["port"]), timeout=PATIENCE) as connection:
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as answer:
                return json.loads(answer.readline())
    except (OSError, ValueError) as error:
        raise Interrupted("the end of the search that this is a trial of", 143, at_once=True) from error
