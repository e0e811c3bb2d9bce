"""Private names of Python's standard library (3.11 to 3.14): exit of a forked process, start of a spawned one."""

import atexit
import multiprocessing
from collections.abc import Callable


def forget_exit_functions() -> None:
    """Unregister the exit functions that a forked process inherited from its parent."""
    atexit._clear()


def run_exit_functions() -> None:
    """Run the registered exit functions before `os._exit`, which skips them."""
    atexit._run_exitfuncs()


def import_in_spawned(function: Callable[..., object]) -> None:
    """Make processes that `multiprocessing` spawns from this one import the module of `function` before they unpickle
    their arguments. If the name moves, a run fails at start."""
    multiprocessing.current_process()._config["deeplightning"] = function  # type: ignore[attr-defined]
