"""Report the metric of a trial to its search after each validation, and end the run if the search prunes it.

The search is another process, perhaps on another machine. Each message and its answer are one line of JSON, sent over a
new connection.
"""

import json
import socket
import sys
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from deeplightning.callbacks.loop_position import call_early
from deeplightning.callbacks.record import Record
from deeplightning.process.streams import Interrupted
from deeplightning.words import stage_of

ANSWER_TIMEOUT_SECONDS = 60.0  # limit for an answer of the search


class Pruned(Interrupted):
    """Raised if the search prunes this trial."""

    def __init__(self, reason: str):
        super().__init__("SIGINT", 130, at_once=True)
        self.args = (reason,)


class Trial(Callback):
    """Report to the search on rank 0, and end the run on all ranks if it is pruned.

    Args:
        record: the run's record.
        address: JSON of `host` and `port` of the search, its `token`, the number of the `trial`, and the `metric`.
    """

    def __init__(self, record: Record, address: str):
        self.record, self.search = record, json.loads(address)
        self._validated = False

    def _send(self, trainer: Trainer, **fields: object) -> dict[str, object]:
        """Send a message on rank 0, and return the search's answer on all ranks."""
        answer = send_message(self.search, **fields) if trainer.is_global_zero else {}
        return trainer.strategy.broadcast(answer) if trainer.world_size > 1 else answer

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the run, so that a trial that fails before its first step has one; a resumed run opens later."""
        if self.record.opened:
            self._report_run(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None:
            self._report_run(trainer)

    def _report_run(self, trainer: Trainer) -> None:
        self._send(trainer, run=getattr(trainer.logger, "run_id", None), folder=str(self.record.folder.path))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metric = self.search["metric"]
        if trainer.enable_validation and not self._validated and stage_of(metric)[0] != "train":
            return  # the current value is already reported
        self._validated = False
        call_early(pl_module, "on_train_epoch_end")  # it may log the metric
        value, epoch = trainer.callback_metrics.get(metric), trainer.current_epoch + 1
        if value is None:
            self._send(trainer, absent=sorted(trainer.callback_metrics))
            return
        answer = self._send(trainer, step=epoch, value=float(value))
        if answer.get("tell") == "modules" and trainer.is_global_zero:
            send_message(self.search, modules=list(sys.modules))
        if answer.get("prune"):
            for logger in trainer.loggers:
                if hasattr(logger, "log_tags"):
                    logger.log_tags({"trial.state": "pruned"})
            raise Pruned(f"pruned after epoch {epoch}: {metric} is {float(value):.6g}")


def send_message(search: dict[str, Any], **fields: object) -> dict[str, object]:
    """Send the search a message and return its answer.

    Raises:
        Interrupted: the search has ended.
    """
    message = {"token": search["token"], "trial": search["trial"], **fields}
    try:
        with socket.create_connection((search["host"], search["port"]), timeout=ANSWER_TIMEOUT_SECONDS) as connection:
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as answer:
                return json.loads(answer.readline())
    except (OSError, ValueError) as error:
        raise Interrupted("the end of its search", 143, at_once=True) from error
