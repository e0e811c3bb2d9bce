"""Run a command that ends when the program that started it ends.

`python -m deeplightning.process.die_with_parent COMMAND …` starts the command. The program keeps the other end of its
standard input open while it lives. When it ends in any way, even by SIGKILL, standard input ends, and the command gets
SIGTERM. SIGINT and SIGTERM are passed on. Importing this module loads little.
"""

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """Runs a command; returns its exit code, or 128 plus the number of the signal that ended it."""
    heard: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: heard.append(number))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def pass_on(number: int, frame: object = None) -> None:
        if child.poll() is None:
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    for early in heard:  # before there was a child
        pass_on(early)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        pass_on(signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
