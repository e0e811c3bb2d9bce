"""A process that answers requests: uvicorn over a listening socket that its parent made, until SIGTERM."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from serve.connection import IDLE_SECONDS, Connection
from serve.door import Door
from serve.service import Service

GRACE_SECONDS = 8
"""How long accepted requests may take to finish after SIGTERM; the process is gone within 10 seconds."""

BACKLOG = 1024


class Worker(uvicorn.Server):
    """uvicorn's server, which watches its connections and ends when its parent does.

    Args:
        service: what answers.
        key: what clients must send; None: nothing.
        started: called once when requests are answered.
    """

    def __init__(self, service: Service, key: str | None, started: Callable[[], None]):
        self._service = service
        self._started = started
        self._parent = os.getppid()
        self._door = Door(service, key)
        super().__init__(
            uvicorn.Config(
                self._door,  # type: ignore[arg-type] # the types of ASGI's messages are uvicorn's own
                interface="asgi3",
                http=Connection,
                ws="none",
                lifespan="off",
                loop="uvloop",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=IDLE_SECONDS,
                backlog=BACKLOG,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the server, and the process with 0, where uvicorn would end by the signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await asyncio.to_thread(self._service.model.predict, self._service.model.samples[:1])
        self._service.ready = True
        self._started()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                connection.check(now)  # type: ignore[union-attr] # all are of our class
            if os.getppid() != self._parent:
                self._end()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers what has been accepted, and what waits to be, in `GRACE_SECONDS`; then the port is closed."""
        loop = asyncio.get_running_loop()
        end = loop.time() + GRACE_SECONDS
        Connection.ending = True
        for listener in sockets or []:
            waiting = listener.dup()  # uvloop closes its own
            for server in self.servers:
                server.close()
            await _accept_all(waiting, self._connection)
            waiting.close()
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections and loop.time() < end:
            await asyncio.sleep(0.05)
            for connection in list(self.server_state.connections):
                connection.check(loop.time())  # type: ignore[union-attr]
        self._door.flush()

    def _end(self) -> None:
        self._service.ready = False
        self.should_exit = True

    def _connection(self) -> Connection:
        return Connection(config=self.config, server_state=self.server_state, app_state={})


async def _accept_all(listener: socket.socket, factory: Callable[[], Connection]) -> None:
    """Takes the connections that the system has accepted and nobody has fetched."""
    listener.setblocking(False)
    with contextlib.suppress(OSError):  # there is none left
        while True:
            client, _ = listener.accept()
            client.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(factory, client)


def work(listener: socket.socket, service: Service, key: str | None, started: Callable[[], None]) -> None:
    """Answer requests until SIGTERM. Never returns: the process ends without running what its parent has set up."""
    code = 1
    try:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection takes one
        Worker(service, key, started).run(sockets=[listener])
        code = 0
    finally:
        os._exit(code)
