"""The supervisor's sockets during shutdown."""

import socket
import sys

import pytest

from serve.supervisor import _drop_new_connections


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux filters the packets of a listening socket")
def test_before_a_port_closes_no_connection_opens_that_nobody_would_accept():
    """Open connections stay; a later client gets no answer, and retries when the port is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as early:
            _drop_new_connections(listener)
            accepted, _ = listener.accept()
            with accepted:
                early.sendall(b"asked")
                assert accepted.recv(5) == b"asked"
                accepted.sendall(b"answered")
                assert early.recv(8) == b"answered"
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.2)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)


def test_a_socket_that_is_closed_already_is_no_fault():
    listener = socket.create_server(("127.0.0.1", 0))
    listener.close()
    _drop_new_connections(listener)
    assert listener.fileno() == -1
