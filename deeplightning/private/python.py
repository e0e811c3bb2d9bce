"""Private names of the standard library (3.11 to 3.14): the end of a forked process, the start of a spawned one."""

import atexit
import multiprocessing
from collections.abc import Callable


def forget_exit_functions() -> None:
    """Unregisters what the parent of a forked process wants done at its own exit."""
    atexit._clear()


def run_exit_functions() -> None:
    """Does what was registered since, before `os._exit`, which does not."""
    atexit._run_exitfuncs()


def import_in_spawned(function: Callable[..., object]) -> None:
    """Have each process that `multiprocessing` spawns from this one import the module of a function before it unpickles
    what it works on. Where the name has moved, a run fails at its start."""
    multiprocessing.current_process()._config["deeplightning"] = function  # type: ignore[attr-defined]
