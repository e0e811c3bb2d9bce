"""Private names of the standard library (3.11 to 3.14): a process forked to live a life of its own ends as one."""

import atexit


def forget_exit_functions() -> None:
    """Unregisters what the parent of a forked process wants done at its own exit."""
    atexit._clear()


def run_exit_functions() -> None:
    """Does what was registered since, before `os._exit`, which does not."""
    atexit._run_exitfuncs()
