"""Run a command that ends when the program that started it ends; or end this process with its parent (`end_with`).

`python -m deeplightning.process.die_with_parent COMMAND …` starts the command. The program holds the other end of its
standard input open while it lives. When the program ends for any reason, even SIGKILL, standard input ends and the
command gets SIGTERM. SIGINT and SIGTERM are forwarded. Importing this module loads little.
"""

import os
import signal
import subprocess
import sys
import threading
import time


def main(command: list[str]) -> int:
    """Run a command; return its exit code, or 128 plus the number of the signal that ended it."""
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: received.append(number))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def forward(number: int, frame: object = None) -> None:
        child.send_signal(number)  # which does nothing once it has ended

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    for early in received:  # before the child was started
        forward(early)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        forward(signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    return 128 - code if code < 0 else code


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int) -> None:
    """Kill this process when its parent ends."""
    import ctypes

    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError):  # not Linux
        threading.Thread(target=_watch_parent, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent:  # the parent ended before this took effect
        os._exit(5)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.25)
    os._exit(5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
