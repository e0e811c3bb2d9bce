"""Points of training steps go to the loggers; on a GPU without a wait for it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, stack

from deeplightning.transfer import Deferred


class Points:
    """Hands the values of logged steps to loggers: at once where they are at hand; values of a GPU when the next ones
    come, by when they have long arrived. `log_pending` hands over what waits.
    """

    def __init__(self) -> None:
        self._pending: tuple[Sequence[Any], list[str], Deferred, int] | None = None

    def log(self, loggers: Sequence[Any], values: dict[str, Tensor], step: int) -> None:
        """
        Args:
            values: of one step by name, tensors () of one device and type.
        """
        self.log_pending()
        if not values:
            return
        self._pending = loggers, list(values), Deferred(stack(list(values.values()))), step
        if not self._pending[2].is_late:
            self.log_pending()

    def log_pending(self) -> None:
        """Hands over the values of the last logged step, where they wait."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        loggers, names, values, step = pending
        points = dict(zip(names, values.read(), strict=True))
        for logger in loggers:
            logger.log_metrics(points, step)
