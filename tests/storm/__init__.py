"""The storm: thousands of randomized fault injections. `bash test.sh --storm` runs it.

A *kind* of case is one module in `storm/kinds`, listed in `KINDS` below. It defines

    WHAT = "kill -9 at any instant of a training"          # a cell of the table
    HOUR = 1000                                            # target number of cases per hour: its share of the time
    LIMIT = 120                                            # seconds a case may take on a busy machine (default 300)
    def case(draw: random.Random, place: Place) -> str: …  # runs ONE case; returns a short description of it

`case` takes every random choice from `draw`, which is seeded by seed, kind and number of the case, so that a case can
be repeated. It raises `Broken("…")` if a promise does not hold, `Skipped("no compiler")` if this machine cannot run it.
Any other exception also counts as broken. A call that tries several faults sets `place.count` to their number.

A case runs in a separate process, a fork of one that has imported torch, Lightning, MLflow and `deeplightning`. It may
fork trainings (`place.start("train", …)`, tenths of a second each), change its environment or limits, and damage
itself. It is a session leader; every process that it leaves running is a broken promise and is killed. `place.folder`
is its working directory, empty at first and removed if the promise held. `place.shared` is a folder that all cases of
the kind share in one run of the storm; `place.once("name", make)` fills a folder in it once, for example with an
undisturbed run.

A module may also define `environment() -> dict[str, str]`: variables that the importing process needs from its start,
such as LD_PRELOAD. It is called before any heavy import, may compile, and may raise `Skipped`. `PRELOAD =
("deepspeed",)` lists additional modules for the importing process. A kind has no heavy imports at its top.

    storm/place.py      what a case gets
    storm/worker.py     a case in a separate process
    storm/schedule.py   which case comes next, and until when
    storm/table.py      the table, and the command that repeats a case
    storm/__main__.py   the command line
"""

import importlib
from types import ModuleType

KINDS = (
    *("kills", "search", "io", "power", "mutations", "together", "tracking", "limits", "ranks", "network", "server"),
    "setup",
)
"""In the order of the table and of their first cases; `setup` takes minutes."""


def load_kinds() -> dict[str, ModuleType]:
    """Import the module of each kind."""
    return {name: importlib.import_module(f"storm.kinds.{name}") for name in KINDS}


def preload(modules: dict[str, ModuleType]) -> list[str]:
    """Return the additional modules that the importing process imports."""
    return sorted({name for module in modules.values() for name in getattr(module, "PRELOAD", ())})
