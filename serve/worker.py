"""A worker process: answers requests on a listening socket of its supervisor, until SIGTERM."""

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
from serve.service import Service

GRACE_SECONDS = 8
"""How long accepted requests may take to finish after SIGTERM; the process is gone within 10 seconds."""

OPENING_SECONDS = 0.1
"""How long connections that are about to open are still accepted after SIGTERM."""

TICK_SECONDS = 0.25
"""How often the log is written; every fourth time the connections are looked at."""

SPARE_FILES = 100
"""Descriptors that are not for connections."""

BACKLOG = 1024

STOPS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a worker when its requests are answered."""


def work(listener: socket.socket, service: Service, started: Callable[[], None]) -> None:
    """Answer requests until SIGTERM or SIGINT. Never returns: the process ends without running what its parent has set
    up.

    Args:
        listener: a listening socket.
        service: what answers.
        started: called once when requests are answered.
    """
    code = 1
    try:
        uvloop.run(_serve(listener, service, started))
        code = 0
    finally:
        os._exit(code)


async def _serve(listener: socket.socket, service: Service, started: Callable[[], None]) -> None:
    loop, end, parent = asyncio.get_running_loop(), asyncio.Event(), os.getppid()
    for number in STOPS:
        loop.add_signal_handler(number, end.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    dispatcher = Dispatcher(service)
    connections = Connections(dispatcher, _most_connections())

    opening: set[asyncio.Task[tuple[asyncio.BaseTransport, Connection]]] = set()

    def accept() -> None:
        """Takes all connections that wait."""
        with contextlib.suppress(OSError):  # none is left
            while True:
                client, _ = listener.accept()
                if len(connections.open) + len(opening) > connections.most + SPARE_FILES / 2:
                    client.close()  # there is no descriptor left to say why with
                    continue
                client.setblocking(False)
                opened = loop.create_task(loop.connect_accepted_socket(lambda: Connection(connections, loop), client))
                opening.add(opened)
                opened.add_done_callback(is_open)

    def is_open(opened: asyncio.Task[tuple[asyncio.BaseTransport, Connection]]) -> None:
        opening.discard(opened)
        if error := opened.exception():
            log_event("a connection could not be taken", error)

    listener.setblocking(False)
    # Not by the loop's own server, which takes one connection between two rounds of requests (libuv since 1.46): under
    # load the last of 128 clients then waited for 1.8 s, now 0.2 (two cores, November 2026).
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
    last = loop.time() + GRACE_SECONDS
    while connections.open and loop.time() < last:
        await asyncio.sleep(0.05)
        connections.check()
        dispatcher.flush()
    dispatcher.flush()


def _most_connections() -> int:
    """As many as there may be open files, which are made as many as they may be."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return max(most - SPARE_FILES, 1) if most != resource.RLIM_INFINITY else 1_000_000
