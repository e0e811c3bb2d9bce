"""The storm: what is promised under faults, tried thousands of times. `bash test.sh --storm` runs it.

A *kind* of case is one module in `storm/kinds`, named in `KINDS` below, which has

    WHAT = "kill -9 at any instant of a training"          # a cell of the table
    HOUR = 1000                                            # cases that an hour's run is to have; its share of the time
    LIMIT = 120                                            # seconds a case may take on a busy machine (default 300)
    def case(draw: random.Random, place: Place) -> str: …  # runs ONE case; returns in a few words what was done

`case` draws everything that may differ from `draw`, which is seeded by seed, kind and number of the case: so a case
can be repeated. It raises `Broken("…")` in words where a promise does not hold, `Skipped("no compiler")` where this
machine cannot try it. Any other exception counts as broken too. Where one call tries several things, it sets
`place.count` to their number.

A case runs in a process of its own, a fork of one that has imported torch, Lightning, MLflow and `deeplightning`. So it
may fork trainings (`place.start("train", …)`, tenths of a second each), change its environment or limits, and do harm
to itself. It is the leader of a session; whatever it has started and not ended is a broken promise too, and is killed.
`place.folder` is an empty folder, its working directory; it is removed when the promise held. `place.shared` is a
folder that all cases of the kind share in one run of the storm; `place.once("name", make)` fills a folder in it once,
such as the run that nothing disturbed.

A module may also have `environment() -> dict[str, str]`: variables that the importing process needs from its start,
such as LD_PRELOAD. It is called in a process that has imported nothing heavy, and may compile. It raises `Skipped` too.
`PRELOAD = ("deepspeed",)` names modules that the importing process imports too. At its top a kind imports nothing
heavy.

    storm/place.py      what a case is given
    storm/worker.py     a case in a process of its own
    storm/schedule.py   which case comes next, and how long
    storm/table.py      the table, and the file of failures
    storm/__main__.py   the arguments
"""

import importlib
from types import ModuleType

KINDS = (
    *("kills", "search", "io", "power", "mutations", "together", "tracking", "limits", "ranks", "network", "server"),
    "setup",
)
"""In the order of the table, and of the first case of each; a set-up takes minutes."""


def load_kinds() -> dict[str, ModuleType]:
    """The modules by their names."""
    return {name: importlib.import_module(f"storm.kinds.{name}") for name in KINDS}


def preload(modules: dict[str, ModuleType]) -> list[str]:
    """What they ask the importing process to import."""
    return sorted({name for module in modules.values() for name in getattr(module, "PRELOAD", ())})
