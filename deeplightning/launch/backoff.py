"""The pauses between a launcher's attempts to start processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

DEFAULT = {"base_s": 1.0, "factor": 2.0, "max_tries": 10}


class Backoff:
    """Growing pauses between `max_tries` tries: `base_s` seconds, then `factor` times as long each time.

    Args:
        params: these numbers; the defaults are 1 s, 2 and 10.

    Raises:
        ValueError: a number is out of range, or a name is unknown.
    """

    def __init__(self, params: Mapping[str, float] | None = None):
        given = dict(params or {})
        if unknown := set(given) - set(DEFAULT):
            raise ValueError(f"backoff takes {', '.join(DEFAULT)}, not {', '.join(sorted(unknown))}")
        values = DEFAULT | given
        for name, low in (("base_s", 0), ("factor", 1), ("max_tries", 1)):
            if isinstance(values[name], bool) or not values[name] >= low:
                raise ValueError(f"backoff.{name} must be at least {low}, not {values[name]}")
        self.base_s, self.factor, self.max_tries = values["base_s"], values["factor"], int(values["max_tries"])

    def __iter__(self) -> Iterator[float]:
        """Yield the seconds to wait after the first failed try, the second, …: one fewer than there are tries."""
        return (self.base_s * self.factor**number for number in range(self.max_tries - 1))
