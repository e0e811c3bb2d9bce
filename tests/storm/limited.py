"""`deeplightning` in a process that comes up against a limit at some moment, as the variable LIMIT says."""

import atexit
import json
import os
import resource
import threading
import time


def main() -> None:
    """Instead of `deeplightning.cli:main`: {"what": …, "value": …, "after": seconds}."""
    import torch._dynamo.utils

    from deeplightning import cli

    # At its end a process that has imported torch's compiler imports tabulate. A command that does not compile imports
    # neither, but the process that this one is forked from has.
    atexit.unregister(torch._dynamo.utils.dump_compile_times)
    limit = json.loads(os.environ["LIMIT"])
    if limit["what"] == "size":
        for stream in (1, 2):
            _carry(stream)
    threading.Timer(limit["after"], _set, (limit["what"], limit["value"])).start()
    cli.main()


def _carry(stream: int) -> None:
    """What is written to a stream goes through a pipe, as to a terminal: the size of files does not bound it."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(writing)
        while part := os.read(reading, 65536):
            os.write(stream, part)
        os._exit(0)
    os.dup2(writing, stream)
    os.close(writing)
    os.close(reading)


def _set(what: str, value: int) -> None:
    if what == "clock":
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() + value
        time.time_ns = lambda: now_ns() + value * 10**9
        return
    kind = {"files": resource.RLIMIT_NOFILE, "size": resource.RLIMIT_FSIZE, "memory": resource.RLIMIT_AS}[what]
    if what == "memory":  # beside what it has
        with open("/proc/self/statm") as file:  # noqa: PTH123
            value += int(file.read().split()[0]) * resource.getpagesize()
    if what == "files":  # beside those that are open
        value += len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
