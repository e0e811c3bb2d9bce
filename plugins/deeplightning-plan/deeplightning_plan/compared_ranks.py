"""Fork one or two CPU processes that run the same code, and compare what they build, log and exchange as they run.

The comparison kills them at the first difference, so that no process waits for a rank that never arrives.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from deeplightning.own_code import is_user_file, short
from deeplightning.process.failure import is_lost_message
from deeplightning_plan.fake_gpu import user_code_line
from deeplightning_plan.torch_private import DispatchMode

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

SILENCE_SECONDS = 120.0
"""Time without events from any process after which they are killed."""

UNTRIED = (
    "processes on the CPU could not be tried, because this process has already computed gradients; "
    "use `deeplightning check --dry-run`"
)
_FORK_ERROR = "autograd's threading in combination with fork"
"""Part of torch 2.15's error in a fork of a process whose autograd has started threads."""

_POINT_TO_POINT = ("send", "recv_", "recv_any_source_")  # the two ranks differ by design


class Event(NamedTuple):
    """Event of a process."""

    kind: str  # `parameters`, `log`, `collective`, `message` to or from one rank, `end`, or `error`, which also ends it
    what: str = ""  # the name, the collective, the error, or the parameters, one per line
    place: str = ""  # ` (file:line)` of the user's code that caused it, or empty
    key: str = "model.module"  # the config key that an error is about
    is_certain: bool = True  # False if the dry run itself may have caused the error


RankFunction = Callable[[int, "Reporter"], Event]
"""Function that a process runs: it takes the rank and a reporter of events, and returns the final event."""


class Ranks:
    """Processes, forked before this one has started threads; they wait until `difference` starts them.

    Args:
        function: run by each process.
        number: 1 or 2.

    Attributes:
        key: the config key that `difference` is about.
    """

    def __init__(self, function: RankFunction, number: int = 2):
        self.function, self.number = function, number
        self.key = "model.module"
        self.folder = tempfile.TemporaryDirectory()
        self.connections: list[Connection] = []
        self.processes: list[BaseProcess] = []

    def __enter__(self) -> Ranks:
        forks = multiprocessing.get_context("fork")
        for rank in range(self.number):
            parent_end, child_end = forks.Pipe()
            self.connections.append(parent_end)
            others = tuple(self.connections)  # an inherited copy would hide that this process has ended
            arguments = (rank, self.number, child_end, others, self.function, Path(self.folder.name))
            process = forks.Process(target=_run_rank, args=arguments)
            process.start()
            child_end.close()
            self.processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.kill()
            process.join()
            connection.close()
        self.folder.cleanup()

    def difference(self) -> tuple[str | None, bool]:
        """Start the processes; return the first difference between them, or the error of a single one.

        Returns:
            A description, or None if nothing differs or fails; and whether it is certain.
        """
        events: list[list[Event]] = [[] for _ in self.processes]
        for connection in self.connections:
            connection.send("begin")
        while True:
            open_ = [c for c, done in zip(self.connections, events, strict=True) if not _has_ended(done)]
            ready = wait(open_, SILENCE_SECONDS)
            if not ready:
                return self._describe_hang(events), False
            for rank, connection in enumerate(self.connections):
                if connection in ready:
                    try:
                        events[rank].append(connection.recv())
                    except (EOFError, ConnectionResetError):
                        events[rank].append(Event("error", "it was killed"))
            if self.number > 1:
                fault = compare(*events)
            else:
                fault = (events[0][-1].what if events[0][-1].kind == "error" else "") if _has_ended(events[0]) else None
            if fault is not None and _FORK_ERROR in fault:
                return UNTRIED, False
            if fault is not None:
                failed = [done[-1] for done in events if done and done[-1].kind == "error"]
                self.key = next((event.key for event in failed), self.key)
                differs = len(failed) < self.number or len({event.what for event in failed}) > 1
                return fault or None, (self.number > 1 and differs) or any(event.is_certain for event in failed)

    def _describe_hang(self, events: list[list[Event]]) -> str:
        """Describe where each process is when no events arrive."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, signal.SIGUSR1)
        for process in self.processes:
            process.join(0.5)  # time to write the stack
        where = []
        for rank, done in enumerate(events):
            file = Path(self.folder.name) / f"stack_{rank}"
            lines = re.findall(r'File "(.+)", line (\d+)', file.read_text()) if file.is_file() else []
            line = next((f" (now at {short(name)}:{line})" for name, line in lines if is_user_file(name)), "")
            where.append(f"rank {rank} {'has ended, and last' if _has_ended(done) else 'last'} {_entered(done)}{line}")
        number = {1: "a process", 2: "two processes"}[self.number]
        return f"{number} on the CPU did not end; no events for {SILENCE_SECONDS:.0f} s: {' and '.join(where)}"


def compare(one: list[Event], other: list[Event]) -> str | None:
    """Return the first difference of two event logs, "" if there is none, None if more events are needed."""
    both = (one, other)
    if (built := _parameter_difference(one, other)) is not None:
        return built
    entered = [[n for n, event in enumerate(events) if event.kind == "collective"] for events in both]
    pairs = [(one[a], other[b]) for a, b in zip(*entered, strict=False)]
    first = next((n for n, (a, b) in enumerate(pairs) if a.what != b.what), None)
    if first is None:
        least = min(len(entered[0]), len(entered[1]))
        ended = [_has_ended(events) and len(its) == least for events, its in zip(both, entered, strict=True)]
        if not all(ended) and not any(e and len(its) > least for e, its in zip(ended, reversed(entered), strict=True)):
            return None
        first = least
    # User code on one rank may have entered the same collective as a library on the other.
    first = next((n for n, (a, b) in enumerate(pairs[:first]) if bool(a.place) != bool(b.place)), first)
    positions = [its[first] if first < len(its) else len(events) - 1 for events, its in zip(both, entered, strict=True)]
    at = [events[position] for events, position in zip(both, positions, strict=True)]
    logged = [
        {event.what: event.place for event in events[:position] if event.kind == "log"}
        for events, position in zip(both, positions, strict=True)
    ]
    explicit = [  # a collective in the user's code, not from `self.log`
        there.kind == "collective" and there.place and (n == 0 or events[n - 1][::2][:2] != ("log", there.place))
        for events, there, n in zip(both, at, positions, strict=True)
    ]
    for rank in range(2) if not any(explicit) else ():
        for name in sorted(set(logged[rank]) - set(logged[1 - rank])):
            return (
                f"rank {rank} logs `{name}`{logged[rank][name]} and rank {1 - rank} does not: with `sync_dist=True` a "
                "run would hang there, and without it no callback can rely on the value. Log it on every "
                "rank, or with `rank_zero_only=True` and without `sync_dist`"
            )
    failed = [rank for rank in range(2) if at[rank].kind == "error"]
    if len(failed) == 2 and len({re.sub(r"cuda:\d+", "cuda", event.what) for event in at}) == 1:
        return f"with two processes it fails: {at[0].what}"
    if len(failed) == 2:  # one may have failed only because the other has ended
        failed = [rank for rank in failed if not is_lost_message(at[rank].what)] or failed
    if len(failed) == 2:
        return f"with two processes rank 0 fails: {at[0].what}; and rank 1: {at[1].what}"
    if failed:
        return f"rank {failed[0]} fails where rank {1 - failed[0]} does not: {at[failed[0]].what}"
    if at[0].kind == at[1].kind == "end":
        return ""
    if at[0].what == at[1].what and at[0].kind == at[1].kind:
        at = [event if event.place else Event(event.kind, f"{event.what} of a library") for event in at]
    return (
        f"rank 0 {_enters(at[0])} where rank 1 {_enters(at[1])}; a run would hang there. Every rank must "
        "enter the same collectives in the same order"
    )


def _parameter_difference(one: list[Event], other: list[Event]) -> str | None:
    """Return where the networks of two processes differ; None if they are equal, or one is not built yet."""
    built = [next((event for event in events if event.kind == "parameters"), None) for events in (one, other)]
    if built[0] is None or built[1] is None or built[0].what == built[1].what:
        return None
    lists = [event.what.splitlines() for event in built if event is not None]
    n = next((n for n, (a, b) in enumerate(zip(*lists, strict=False)) if a != b), min(map(len, lists)))
    has = [its[n] if n < len(its) else "no further parameter" for its in lists]
    return (
        f"the ranks build different networks: rank 0 has {has[0]} where rank 1 has {has[1]}. The network "
        "must depend on the config and the seed only, not on the rank, the time or the process"
    )


def _has_ended(events: list[Event]) -> bool:
    return bool(events) and events[-1].kind in ("end", "error")


def _enters(event: Event) -> str:
    return f"enters {event.what}{event.place}" if event.kind == "collective" else "enters no further collective"


def _entered(events: list[Event]) -> str:
    entered = [event for event in events if event.kind in ("collective", "message")]
    return f"entered {entered[-1].what}{entered[-1].place}" if entered else "entered no collective"


# ---- in the child process


def _run_rank(
    rank: int, number: int, connection: Connection, others: Sequence[Connection], function: RankFunction, folder: Path
) -> None:
    ended = Event("end")
    try:
        for other in others:
            other.close()
        connection.recv()
        devnull = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(devnull, stream)
        stack = (folder / f"stack_{rank}").open("w")
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(number), "CUDA_VISIBLE_DEVICES": ""}
        torch.set_num_threads(1)  # a forked process does not have the threads of OpenMP

        report = Reporter(connection)
        if number == 1:
            ended = function(rank, report)
            return
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        os.environ |= {"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}
        rendezvous = f"file://{folder / 'rendezvous'}"
        timeout = timedelta(seconds=SILENCE_SECONDS + 30)  # longer than the parent process waits
        distributed.init_process_group("gloo", rendezvous, timeout, rank=rank, world_size=number)
        with _Collectives(report):
            ended = function(rank, report)
    except BaseException as error:
        ended = Event("error", f"{type(error).__name__}: {error}".splitlines()[0])
    finally:
        with contextlib.suppress(OSError):
            connection.send(ended)
        os._exit(0)


class Reporter:
    """Send the events of a process, with the line of user code that caused each.

    Attributes:
        before_collective: called with the arguments and name of each collective before it is entered; it may raise.
    """

    def __init__(self, connection: Connection):
        self.connection = connection
        self.before_collective: Callable[[Any, str], None] | None = None

    def __call__(self, kind: str, what: str, line: str | None = None) -> None:
        line = user_code_line() if line is None else line
        self.connection.send(Event(kind, what, f" ({line})" if line else ""))


class _Collectives(DispatchMode):
    """Report each collective before it is entered, including those of DistributedDataParallel."""

    def __init__(self, report: Reporter):
        super().__init__()
        self.report = report

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            collective = {"allreduce_": "all_reduce", "allgather_": "all_gather"}.get(name, name.strip("_"))
            if self.report.before_collective is not None:
                self.report.before_collective(args, collective)
            if name == "allreduce_":
                collective += " of " + ", ".join(f"{str(t.dtype)[6:]} {tuple(t.shape)}" for t in args[0])
            self.report("message" if name in _POINT_TO_POINT else "collective", collective)
        return func(*args, **(kwargs or {}))
