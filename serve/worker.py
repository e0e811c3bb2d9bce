"""A worker process: answer requests on a listening socket of the supervisor, until SIGTERM."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable

import uvloop

from serve.connection import Connection, Connections
from serve.dispatch import Dispatcher
from serve.log import log_event
from serve.prediction import Service

GRACE_SECONDS = 8
"""Time limit for accepted requests to finish after SIGTERM; the process exits within 10 seconds."""

OPENING_SECONDS = 0.1
"""Time after SIGTERM during which new connections are still accepted."""

TICK_SECONDS = 0.25
"""Interval at which the log is written; the connections are checked every fourth time."""

SPARE_DESCRIPTORS = 100
"""File descriptors reserved for uses other than connections."""

BACKLOG = 1024

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a worker once its requests are answered."""


def run_worker(listener: socket.socket, service: Service, started: Callable[[], None], parent: int) -> None:
    """Answer requests until SIGTERM, SIGINT or the end of the process `parent`; `started` is called once, when the
    worker is ready. Never returns: exit without the parent's exit handlers."""
    code = 1
    try:
        uvloop.run(_serve(listener, service, started, parent))
        code = 0
    finally:
        os._exit(code)


async def _serve(listener: socket.socket, service: Service, started: Callable[[], None], parent: int) -> None:
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, end.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    dispatcher = Dispatcher(service)
    connections = Connections(dispatcher, _max_connections())
    opening: set[asyncio.Task[tuple[asyncio.BaseTransport, Connection]]] = set()

    def accept() -> None:
        """Accept all waiting connections."""
        with contextlib.suppress(OSError):  # none is waiting
            while True:
                client, _ = listener.accept()
                if len(connections.open) + len(opening) > connections.max_connections + SPARE_DESCRIPTORS / 2:
                    client.close()  # too few descriptors are left to send a refusal
                    continue
                client.setblocking(False)
                opened = loop.create_task(loop.connect_accepted_socket(lambda: Connection(connections, loop), client))
                opening.add(opened)
                opened.add_done_callback(is_open)

    def is_open(opened: asyncio.Task[tuple[asyncio.BaseTransport, Connection]]) -> None:
        opening.discard(opened)
        if error := opened.exception():
            log_event("a connection could not be accepted", error)

    listener.setblocking(False)
    # Not with `loop.create_server`, which accepts one connection per iteration of the loop (libuv since 1.46): under
    # load, the last of 128 clients waited 1.8 s with it, 0.2 s without (two cores, November 2026).
    listener.listen(BACKLOG)  # its pool ends that while a GPU is lost
    loop.add_reader(listener, accept)
    await asyncio.to_thread(service.model.predict, service.model.samples[:1])
    service.ready = True
    started()
    tick = 0
    while not end.is_set() and os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(end.wait(), TICK_SECONDS)
        dispatcher.flush()
        tick += 1
        if tick % 4 == 0:
            connections.check()
    service.ready = False
    connections.ending = True
    await asyncio.sleep(OPENING_SECONDS)
    loop.remove_reader(listener)
    accept()
    listener.close()
    while opening:
        await asyncio.wait(opening)
    for one in connections.open:
        one.end()
    deadline = loop.time() + GRACE_SECONDS
    while connections.open and loop.time() < deadline:
        await asyncio.sleep(0.05)
        connections.check()
        dispatcher.flush()
    dispatcher.flush()


def _max_connections() -> int:
    """Raise the soft limit of open files to the hard limit, and return the number of connections it allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = 10_240 if most == resource.RLIM_INFINITY else most  # macOS takes no unlimited one; this is its OPEN_MAX
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
    return max(soft - SPARE_DESCRIPTORS, 1)
