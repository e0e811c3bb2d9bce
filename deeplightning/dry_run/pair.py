"""Two forked CPU processes, joined by gloo, that do the same: what each logs and which collectives it enters is
compared as they go, so that nobody waits for a rank that does not come."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from deeplightning.own_code import is_theirs, short
from deeplightning.private.torch import dispatch_mode
from deeplightning.process.failure import says_lost

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

LIMIT = 120.0
"""Seconds without news from either process, after which they are given up."""

UNTRIED = (
    "two processes on the CPU could not be tried, since this process has computed gradients before; "
    "`deeplightning check --dry-run` tries them"
)
_NO_FORK = "autograd's threading in combination with fork"
"""Torch's words (2.15) in a fork of a process whose autograd has threads."""

_PAIRED = ("send", "recv_", "recv_any_source_")  # between two ranks, which do different things by design


class Event(NamedTuple):
    """What a process does.

    Attributes:
        kind: `log`, `collective`, `end`, or `error`, which is an end too.
        what: the name, the collective, or the error.
        place: ` (file:line)` of the user's own code, if it comes from there.
    """

    kind: str
    what: str = ""
    place: str = ""


class Pair:
    """Forks two processes, before this one has started threads; they wait until they are compared.

    Args:
        act: what each does; it is given a function that notes a name as logged, and returns what is wrong, if anything.
    """

    def __init__(self, act: Callable[[Callable[[str], None]], str | None]):
        self.act = act
        self.folder = tempfile.TemporaryDirectory()
        self.connections: list[Connection] = []
        self.processes: list[BaseProcess] = []

    def __enter__(self) -> Pair:
        forks = multiprocessing.get_context("fork")
        for rank in range(2):
            mine, its = forks.Pipe()
            process = forks.Process(target=_be, args=(rank, its, self.act, Path(self.folder.name)))
            process.start()
            its.close()
            self.connections.append(mine)
            self.processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.kill()
            process.join()
            connection.close()
        self.folder.cleanup()

    def difference(self) -> tuple[str | None, bool]:
        """Lets them begin, and tells where they part.

        Returns:
            What differs, in words; None: nothing. And whether that is certain.
        """
        events: list[list[Event]] = [[], []]
        for connection in self.connections:
            connection.send("begin")
        while True:
            open_ = [c for c, done in zip(self.connections, events, strict=True) if not _has_ended(done)]
            ready = wait(open_, LIMIT)
            if not ready:
                last = " and ".join(f"rank {rank} last {_last(done)}" for rank, done in enumerate(events))
                return f"two processes on the CPU did not end; for {LIMIT:.0f} s there was no news: {last}", False
            for rank, connection in enumerate(self.connections):
                if connection in ready:
                    try:
                        events[rank].append(connection.recv())
                    except EOFError:
                        events[rank].append(Event("error", "it was killed"))
            fault = compare(*events)
            if fault is not None and _NO_FORK in fault:
                return UNTRIED, False
            if fault is not None:
                return fault or None, True


def compare(one: list[Event], other: list[Event]) -> str | None:
    """Where two processes part, by what they have done so far; "": nowhere, and both ended; None: wait for more."""
    both = (one, other)
    entered = [[n for n, event in enumerate(events) if event.kind == "collective"] for events in both]
    pairs = enumerate(zip(*entered, strict=False))
    parting = next((n for n, (a, b) in pairs if one[a].what != other[b].what), None)
    if parting is None:
        least = min(len(entered[0]), len(entered[1]))
        ended = [_has_ended(events) and len(its) == least for events, its in zip(both, entered, strict=True)]
        if not all(ended) and not any(e and len(its) > least for e, its in zip(ended, reversed(entered), strict=True)):
            return None
        parting = least
    positions = [
        its[parting] if parting < len(its) else len(events) - 1 for events, its in zip(both, entered, strict=True)
    ]
    at = [events[position] for events, position in zip(both, positions, strict=True)]
    logged = [
        {event.what: event.place for event in events[:position] if event.kind == "log"}
        for events, position in zip(both, positions, strict=True)
    ]
    by_hand = [  # a collective of the user's own code that no `self.log` enters
        there.kind == "collective" and there.place and (n == 0 or events[n - 1][::2] != ("log", there.place))
        for events, there, n in zip(both, at, positions, strict=True)
    ]
    for rank in range(2) if not any(by_hand) else ():
        for name in sorted(set(logged[rank]) - set(logged[1 - rank])):
            return (
                f"rank {rank} logs `{name}`{logged[rank][name]} and rank {1 - rank} does not: with `sync_dist=True` a "
                "run would wait there for ever, and without it no callback can rely on the value. Log it on every "
                "rank, or with `rank_zero_only=True` and without `sync_dist`"
            )
    failed = [rank for rank in range(2) if at[rank].kind == "error"]
    if len(failed) == 2 and at[0].what == at[1].what:
        return f"with two processes it fails: {at[0].what}"
    if len(failed) == 2:  # one may have failed only because the other has ended
        failed = [rank for rank in failed if not says_lost(at[rank].what)] or failed
    if failed:
        return f"rank {failed[0]} fails where rank {1 - failed[0]} does not: {at[failed[0]].what}"
    if at[0].kind == at[1].kind == "end":
        return ""
    return (
        f"rank 0 {_did(at[0])} where rank 1 {_did(at[1])}; a run would wait there for ever. Every rank must enter the "
        "same collectives in the same order"
    )


def _has_ended(events: list[Event]) -> bool:
    return bool(events) and events[-1].kind in ("end", "error")


def _did(event: Event) -> str:
    return f"enters {event.what}{event.place}" if event.kind == "collective" else "enters none any more"


def _last(events: list[Event]) -> str:
    entered = [event for event in events if event.kind == "collective"]
    return f"entered {entered[-1].what}{entered[-1].place}" if entered else "entered none"


# ---- inside one of the two


def _be(rank: int, connection: Connection, act: Callable[[Callable[[str], None]], str | None], folder: Path) -> None:
    ended = Event("end")
    try:
        connection.recv()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        os.environ |= {"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}
        torch.set_num_threads(1)  # a forked process does not have the threads that OpenMP believes in
        meeting = f"file://{folder / 'meeting'}"
        distributed.init_process_group("gloo", meeting, timedelta(seconds=LIMIT), rank=rank, world_size=2)

        def note(name: str) -> None:
            connection.send(Event("log", name, _place()))

        with _Collectives(connection):
            wrong = act(note)
        if wrong is not None:
            ended = Event("error", wrong)
    except BaseException as error:
        ended = Event("error", f"{type(error).__name__}: {error}".splitlines()[0])
    finally:
        with contextlib.suppress(OSError):
            connection.send(ended)
        os._exit(0)


class _Collectives(dispatch_mode()):  # type: ignore[misc]
    """Notes each collective before it is entered, those of DistributedDataParallel too."""

    def __init__(self, connection: Connection):
        super().__init__()
        self.connection = connection

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional") and name not in _PAIRED and "wait" not in name:
            words = {"allreduce_": "all_reduce", "allgather_": "all_gather"}.get(name, name.strip("_"))
            if name == "allreduce_":
                words += " of " + ", ".join(f"{str(t.dtype)[6:]} {tuple(t.shape)}" for t in args[0])
            self.connection.send(Event("collective", words, _place()))
        return func(*args, **(kwargs or {}))


def _place() -> str:
    """` (file:line)` of the innermost line of the user's own code that runs now."""
    frame = sys._getframe(1)
    while frame.f_code is not _be.__code__ and not is_theirs(frame.f_code.co_filename):
        assert frame.f_back is not None
        frame = frame.f_back
    if frame.f_code is _be.__code__:
        return ""
    return f" ({short(frame.f_code.co_filename)}:{frame.f_lineno})"
