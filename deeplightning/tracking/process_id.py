"""Identify the process of a ledger: its machine, its number and its start, since a number is used again.

A process of this machine can be looked for; of one on another machine only the time of its last sign of life is known.
"""

import functools
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

AGE = 24 * 3600.0
"""Seconds of silence after which `runs --sync` takes another machine's process for dead."""


def this_process() -> dict[str, object]:
    """Return what a ledger says of its process, plain values."""
    pid = os.getpid()
    return {"process": pid, "start": started(pid), **_machine()}


def has_ended(owner: Mapping[str, object]) -> bool | None:
    """Return whether the process of a ledger has ended; None: it is of another machine, which alone knows."""
    here = _machine()
    if owner.get("boot") != here["boot"] or (not here["boot"] and owner.get("host") != here["host"]):
        # The machine was started again, or it is another one.
        is_this = owner.get("host") == here["host"] and owner.get("machine") == here["machine"]
        return True if is_this and here["machine"] else None
    if owner.get("space") != here["space"]:  # another container's; the kernel is the same, so the free lock is its end
        return True
    found, start = started(owner.get("process")), owner.get("start")
    return found is None or (start is not None and found != start)


def started(pid: object) -> int | None:
    """Return when a process of this machine started, in ticks since the machine did; None: it has ended, or nothing
    tells."""
    if not isinstance(pid, int):
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


@functools.cache
def _machine() -> dict[str, str]:
    found = {"host": socket.gethostname(), "machine": "", "boot": "", "space": ""}
    with suppress(OSError):
        found["machine"] = Path("/etc/machine-id").read_text().strip()
    with suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        found["space"] = str(Path("/proc/self/ns/pid").readlink())
    return found
