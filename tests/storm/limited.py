"""Run `deeplightning` in a process that gets a limit after some seconds, given by the variable LIMIT."""

import atexit
import json
import os
import resource
import threading
import time


def main() -> None:
    """Run the command, instead of `deeplightning.cli:main`; LIMIT is {"what": …, "value": …, "after": seconds}."""
    import torch._dynamo.utils

    from deeplightning import cli

    # At exit, a process that has imported torch's compiler imports tabulate. A command that does not compile imports
    # neither, but this process is forked from one that has.
    atexit.unregister(torch._dynamo.utils.dump_compile_times)
    limit = json.loads(os.environ["LIMIT"])
    if limit["what"] == "size":
        for stream in (1, 2):
            _carry(stream)
    threading.Timer(limit["after"], _set, (limit["what"], limit["value"])).start()
    cli.main()


def _carry(stream: int) -> None:
    """Send a stream through a pipe, so that the limit of file sizes does not apply to it."""
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
    if what == "memory":  # in addition to what it has
        with open("/proc/self/statm") as file:  # noqa: PTH123
            value += int(file.read().split()[0]) * resource.getpagesize()
    if what == "files":  # in addition to those that are open
        value += len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
