"""HTTP/1.1 from well-behaved and slow clients: order, keep-alive, size limits, and memory use. Hostile clients are in
`hostile/requests.tsv`."""

import asyncio
import json
import os
import re
import socket
import sys
import time

import pytest
from served import picture

from serve import connection as limits_of
from serve import dispatch as dispatch_of
from serve.admission import Hosts
from serve.bundle import Bundle
from serve.connection import Connection, Connections
from serve.dispatch import Dispatcher
from serve.limits import Limits, Refusal
from serve.log import Log
from serve.prediction import Service
from serve.supervisor import _drop_new_connections

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
PREDICT = b"POST /predict HTTP/1.1\r\nHost: x\r\n"


class Transport:
    """Records what is written."""

    def __init__(self):
        self.written = b""
        self.ended = None
        self.reading = True

    def write(self, data):
        assert self.ended is None
        self.written += data

    def close(self):
        self.ended = self.ended or "closed"

    def write_eof(self):
        self.ended = "answered"

    def abort(self):
        self.ended = "aborted"

    def is_closing(self):
        return self.ended is not None

    def get_extra_info(self, name):
        return ("127.0.0.1", 1)

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def answers(self):
        """Return status, headers and body of each response."""
        found, left = [], self.written
        while left:
            head, _, left = left.partition(b"\r\n\r\n")
            status, *lines = head.decode().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            size = int(headers.get("content-length", 0))
            found.append((int(status.split()[1]), headers, left[:size]))
            left = left[size:]
        return found


@pytest.fixture(scope="module")
def dispatcher(run_folder):
    service = Service(Bundle.open(run_folder.path), Limits(max_upload_mb=1, max_wait=600))
    return Dispatcher(service, log=Log(os.open(os.devnull, os.O_WRONLY)))


@pytest.fixture
def talk(dispatcher):
    """`talk(part, …)` sends parts on one connection, and returns the transport after `answers` or at its end."""

    def talk(*parts, answers=1, **options):
        async def conversation():
            connections = Connections(dispatcher, options.get("most", 10), options.get("ending", False))
            connection, transport = Connection(connections, asyncio.get_running_loop()), Transport()
            connection.connection_made(transport)
            for part in parts:
                if callable(part):
                    part(connection, transport)
                elif transport.ended is None:
                    connection.data_received(part)
            while len(re.findall(rb"HTTP/1\.1 \d{3} ", transport.written)) < answers and transport.ended is None:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.01)
            connection.connection_lost(None)
            assert connections.open == set()
            return transport

        transport = asyncio.run(asyncio.wait_for(conversation(), 20))
        assert dispatcher._buffered_bytes == 0
        return transport

    return talk


def post(data, *lines, path="/predict"):
    head = "".join(f"{line}\r\n" for line in (f"POST {path} HTTP/1.1", "Host: x", *lines))
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def labels(transport):
    return [json.loads(body).get("label") for _, _, body in transport.answers()]


def test_a_request_may_come_in_any_pieces(talk):
    """A request that arrives byte by byte gets the same answer, and the connection stays open."""
    request = post(picture("green"))
    transport = talk(*[request[start : start + 1] for start in range(len(request))])
    assert labels(transport) == labels(talk(request)) == ["green"]
    assert transport.ended is None


def test_requests_of_one_connection_are_answered_in_their_order(talk):
    """Pipelined requests are answered in order, even if a slow answer precedes a fast one."""
    colours = ["red", "green", "blue", "green"]
    together = b"".join(post(picture(colour, size=(2000, 1000) if colour == "red" else (8, 8))) for colour in colours)
    assert labels(talk(together + HEALTH, answers=5)) == [*colours, None]


@pytest.mark.parametrize(
    "after",
    [b"garbage\r\n\r\n", PREDICT + b"Content-Length: 9000000\r\n\r\n" + b"\0" * 1000],
    ids=["garbage", "too large"],
)
def test_a_refused_request_does_not_cancel_earlier_ones(talk, after):
    """Earlier requests are answered, even slow ones, before the connection closes."""
    transport = talk(post(picture("red", size=(2000, 1000))) + post(picture("blue")) + after, answers=9)
    assert (labels(transport), transport.ended) == (["red", "blue"], "answered")


def test_too_many_at_once_end_the_connection(talk):
    """The allowed number of requests is answered, the last one with `connection: close`."""
    answers = limits_of.MAX_PIPELINED + 1
    transport = talk(HEALTH * 2000, HEALTH * 10, answers=2000)
    assert transport.ended == "answered"
    found = transport.answers()
    assert [status for status, _, _ in found] == [200] * answers
    assert [headers.get("connection") for _, headers, _ in found] == [None] * (answers - 1) + ["close"]


def test_flask_reads_a_body_in_chunks(talk):
    """A chunked form that only werkzeug's parser accepts, here with an extra empty line in front, is answered."""
    disposition = b'Content-Disposition: form-data; name="image"; filename="a.png"'
    form = b"\r\n\r\n--x\r\n" + disposition + b"\r\n\r\n" + picture("green") + b"\r\n--x--\r\n"
    head = PREDICT + b"Content-Type: multipart/form-data; boundary=x\r\n"
    chunks = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(form), form)
    assert labels(talk(head + chunks)) == labels(talk(head + b"Content-Length: %d\r\n\r\n%b" % (len(form), form)))
    assert labels(talk(head + chunks)) == ["green"]


def test_refused_requests_have_a_bounded_number_of_short_lines(capfd):
    """At most 100 refused requests per second get a log line; of the rest only the number is logged."""
    log = Log(1)
    for _ in range(1000):
        log.add('"status": 404', refused=True)
    log.flush()
    time.sleep(1.01)
    log.flush()
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert len(lines) in range(100, 201)
    event = json.loads(err.splitlines()[-1])
    assert (event["event"], len(err.splitlines())) == ("refused requests without a line", 2 if len(lines) > 200 else 1)


@pytest.mark.parametrize(
    ("listening", "allowed", "host", "status"),
    [
        ("::1", [], b"a.localhost", 200),
        ("::1", [], b"evil.example", 421),
        ("127.0.0.1", [], b"localhost,evil.example", 400),
        ("127.0.0.1", ["Good.example"], b"good.EXAMPLE:80", 200),
        ("127.0.0.1", ["*"], b"evil.example", 200),
        ("0.0.0.0", [], b"any.example", 200),
        ("0.0.0.0", ["good.example"], b"any.example", 421),
        ("0.0.0.0", ["good.example"], b"127.0.0.1:5000", 200),
    ],
)
def test_only_names_of_its_own_are_answered(listening, allowed, host, status):
    """A request under a foreign name that resolves to this machine (DNS rebinding) is refused."""
    hosts = Hosts(listening, allowed)
    for _ in range(2):
        if status == 200:
            hosts.check(host)
        else:
            with pytest.raises(Refusal) as refused:
                hosts.check(host)
            assert refused.value.status == status
    hosts.check(None)


@pytest.mark.parametrize(
    ("head", "ending", "ended"),
    [
        (b"1.1\r\nHost: x", False, None),
        (b"1.1\r\nHost: x\r\nConnection: close", False, "closed"),
        (b"1.1\r\nHost: x", True, "closed"),
        (b"1.0", False, "closed"),
        (b"1.0\r\nConnection: Keep-Alive", False, None),
        (b"1.0\r\nConnection: Upgrade\r\nUpgrade: h2c", False, "closed"),
        (b"1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket", False, None),
    ],
)
def test_a_connection_closes_when_it_should(talk, head, ending, ended):
    """A connection closes if the client asks for it and during shutdown; an offered upgrade is ignored."""
    transport = talk(b"GET /health HTTP/" + head + b"\r\n\r\n", ending=ending)
    ((status, headers, body),) = transport.answers()
    assert (status, json.loads(body), transport.ended) == (200, {"status": "ok"}, ended)
    kept = "keep-alive" if head.startswith(b"1.0") else None  # without it, such a client takes it for closed
    assert headers.get("connection") == ("close" if ended else kept)


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b"FOO /health HTTP/1.1\r\n\r\n"], 501),
        ([b"FO", b"O /x HTTP/1.1\r\n\r\n"], 501),
        ([PREDICT + b"Transfer-Encoding: gzip, chunked\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n"], 501),
        ([b"GET /x HTTP/", b"2", b".0\r\n", b"\r\n"], 505),
        ([b"FOO /health HTTP/3\r\n\r\n"], 400),
        ([b"F", b"\0"], 400),
        ([b"GET /health HTTP/1.1\r\n\r\n\0\r\n\r\n"], 400),
    ],
)
def test_an_unknown_method_or_version_is_not_a_malformed_request(talk, pieces, status):
    """An unknown method or coding gets 501, an unknown version 505; then the connection closes (RFC 9110, 9.1 and
    15.6.6). The first line of a read may belong to an earlier request."""
    transport = talk(*pieces, answers=9)
    found, headers, _ = transport.answers()[-1]
    assert (found, headers["connection"], transport.ended) == (status, "close", "closed")


def test_another_method_than_a_route_has_is_405(talk):
    """A wrong method gets 405 with the allowed methods (RFC 9110, section 15.5.6)."""
    for method in ("GET", "PROPFIND"):
        ((status, headers, _),) = talk(f"{method} /predict HTTP/1.1\r\nHost: x\r\n\r\n".encode()).answers()
        assert (status, sorted(headers["Allow"].split(", "))) == (405, ["OPTIONS", "POST"])


@pytest.mark.parametrize(("coding", "status"), [("identity, br", 415), ("", 200)])
def test_a_body_in_a_coding_is_refused_before_it_is_read(talk, coding, status):
    """`Accept-Encoding` in the refusal says that the problem is the coding, not the type (RFC 9110, section 12.5.3)."""
    ((found, headers, body),) = talk(post(picture("green"), f"Content-Encoding: {coding}")).answers()
    assert (found, headers.get("Accept-Encoding")) == (status, "identity" if status == 415 else None)
    assert status == 200 or f"Content-Encoding {coding} " in json.loads(body)["ERROR"]


def test_a_body_may_come_with_an_upgrade(talk):
    """The body of a request that offers HTTP/2, as Java's client sends, is read, and the connection stays open."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA")
    request = post(picture("green"), *offer)
    assert labels(talk(request + post(picture("red")), answers=2)) == ["green", "red"]
    assert labels(talk(*[request[start : start + 7] for start in range(0, len(request), 7)])) == ["green"]


def test_head_has_the_head_of_get(talk):
    """HEAD gets the same Content-Length as GET, and no body."""
    got = talk(b"GET /info HTTP/1.1\r\nHost: x\r\n\r\n").answers()[0]
    head = talk(b"HEAD /info HTTP/1.1\r\nHost: x\r\n\r\n").written
    assert head.endswith(b"\r\n\r\n")
    assert int(re.search(rb"content-length: (\d+)", head)[1]) == len(got[2]) > 0


def test_100_continue_is_sent_only_to_an_admitted_request(talk):
    """`Expect: 100-continue`, which curl sends for large files, gets 100 only if the request is admitted."""
    admitted = talk(post(picture("red"), "Expect: 100-continue"), answers=2).written
    assert admitted.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    refused = talk(PREDICT + b"Content-Length: 1000001\r\nExpect: 100-continue\r\n\r\n")
    ((status, headers, _),) = refused.answers()
    assert (status, headers.get("connection")) == (413, "close")  # the client may never send its body
    old = post(picture("red"), "Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    assert talk(old).written.startswith(b"HTTP/1.1 200 OK\r\n")  # RFC 9110, section 15.2


@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "in chunks"])
def test_what_is_too_large_is_not_kept(talk, dispatcher, chunked):
    """Too large a body is refused as soon as possible and dropped; the connection continues with the next request."""
    kept = []
    part = b"\0" * 100_000
    if chunked:
        head = PREDICT + b"Transfer-Encoding: chunked\r\n\r\n"
        body = [b"186a0\r\n" + part + b"\r\n"] * 30 + [b"0\r\n\r\n"]
    else:
        head, body = PREDICT + b"Content-Length: 3000000\r\n\r\n", [part] * 30
    steps = [step for one in body for step in (one, lambda *_: kept.append(dispatcher._buffered_bytes))]
    transport = talk(head, *steps, post(picture("blue")), answers=2)
    (status, _, _), (_, _, answer) = transport.answers()
    assert (status, json.loads(answer)["label"]) == (413, "blue")
    assert max(kept) <= 1_100_000
    assert kept[-1] == 0


def test_what_comes_of_a_refused_body_has_an_end(talk, monkeypatch):
    """A client that keeps sending a refused body is disconnected after a number of bytes."""
    monkeypatch.setattr(limits_of, "REST_BYTES", 500_000)
    transport = talk(PREDICT + b"Content-Length: 9000000\r\n\r\n", *[b"\0" * 100_000] * 10, answers=9)
    assert transport.ended == "aborted"
    assert [status for status, _, _ in transport.answers()] == [413]


def test_unfinished_bodies_have_room_together(talk, monkeypatch):
    """Above the limit for all incomplete bodies, a request gets 429."""
    monkeypatch.setattr(dispatch_of, "MAX_BUFFERED_BYTES", 150_000)
    transport = talk(PREDICT + b"Content-Length: 300000\r\n\r\n", *[b"\0" * 100_000] * 3)
    ((status, headers, _),) = transport.answers()
    assert (status, headers["Retry-After"]) == (429, "5")


def test_a_client_that_does_not_read_is_not_answered_further(talk):
    """A client that does not read gets no further answers until it reads."""
    stuck = talk(lambda connection, _: connection.pause_writing(), HEALTH, answers=0)
    assert (stuck.written, stuck.reading) == (b"", False)
    read = talk(
        lambda connection, _: connection.pause_writing(), HEALTH, lambda connection, _: connection.resume_writing()
    )
    assert (len(read.answers()), read.reading) == (1, True)


def test_one_connection_too_many_gets_503(talk):
    """A connection above the limit gets 503 and is closed."""
    transport = talk(most=0)
    assert [(status, headers["Retry-After"]) for status, headers, _ in transport.answers()] == [(503, "1")]
    assert transport.ended == "closed"


@pytest.mark.parametrize(
    ("parts", "seconds", "status"),
    [
        ((), limits_of.HEAD_SECONDS, None),
        ((b"GET / HT",), limits_of.HEAD_SECONDS, 408),
        ((PREDICT + b"Content-Length: 9\r\n\r\n1",), limits_of.PAUSE_SECONDS, 408),
        ((HEALTH,), limits_of.IDLE_SECONDS, 200),
        ((PREDICT + b"Content-Length: 9000000\r\n\r\n1",), limits_of.REST_SECONDS, 413),
    ],
    ids=["nothing", "head", "body", "idle", "rest"],
)
def test_a_slow_client_is_cut_off(dispatcher, parts, seconds, status):
    """A slow client is disconnected after its time limit and not earlier, with 408 if there is a request."""

    async def connect_and_wait():
        loop = asyncio.get_running_loop()
        connection, transport = Connection(Connections(dispatcher, 10), loop), Transport()
        connection.connection_made(transport)
        for part in parts:
            connection.data_received(part)
        while status in (200, 413) and not transport.written:
            await asyncio.sleep(0.005)
        now = loop.time
        loop.time = lambda: now() + seconds - 1
        connection.check()
        before = transport.ended
        loop.time = lambda: now() + seconds + 0.5
        connection.check()
        loop.time = now
        connection.connection_lost(None)
        return before, transport

    before, transport = asyncio.run(connect_and_wait())
    assert (before, transport.ended) == (None, "closed")
    assert [found for found, _, _ in transport.answers()] == ([status] if status else [])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux filters the packets of a listening socket")
def test_before_a_port_closes_no_connection_opens_that_nobody_would_accept():
    """Open connections stay open; a later client gets no answer, and is refused when the port is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as early:
            _drop_new_connections(listener)
            accepted, _ = listener.accept()
            with accepted:
                early.sendall(b"request")
                assert accepted.recv(7) == b"request"
                accepted.sendall(b"answer")
                assert early.recv(6) == b"answer"
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.2)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)


def test_a_socket_that_is_closed_already_is_no_fault():
    """Dropping the connections of a socket that is already closed does nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.close()
    _drop_new_connections(listener)
    assert listener.fileno() == -1


def test_a_trailer_changes_no_header(talk):
    """Fields after a chunked body are no headers (RFC 9112, section 7.1.2)."""
    body = picture("green")
    chunks = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nContent-Type: text/html\r\n\r\n" % (len(body), body)
    assert labels(talk(PREDICT + chunks)) == ["green"]


def test_the_time_to_read_an_answer_begins_with_the_answer(dispatcher):
    """A client whose answer took long has as much time to read it as any other."""

    async def conversation():
        loop = asyncio.get_running_loop()
        connection, transport = Connection(Connections(dispatcher, 10), loop), Transport()
        transport.get_write_buffer_size = lambda: 1
        connection.connection_made(transport)
        connection.data_received(HEALTH)
        now, found = loop.time, []
        loop.time = lambda: now() + limits_of.BODY_SECONDS + 1
        while not transport.written:
            await asyncio.sleep(0.005)
        connection.check()
        found.append(transport.ended)
        loop.time = lambda: now() + 2 * limits_of.BODY_SECONDS + 3
        connection.check()
        loop.time = now
        connection.connection_lost(None)
        return [*found, transport.ended]

    assert asyncio.run(conversation()) == [None, "aborted"]


def test_a_proxy_gives_up_an_idle_connection_first():
    """If the server closed first, a POST that a proxy has just sent would be lost (Caddy keeps 120 s, nginx 60)."""
    assert limits_of.IDLE_SECONDS > 120


def test_the_body_of_an_aborted_upload_is_not_kept(talk):
    """A connection and its parser refer to each other, so what they hold waits for the garbage collector."""
    kept = []
    parts = [b"\0" * 100_000] * 3
    talk(PREDICT + b"Content-Length: 900000\r\n\r\n", *parts, lambda one, _: kept.append(one), answers=0)
    assert len(kept[0]._body) == 0


def test_a_refused_body_that_flows_is_read_on(dispatcher):
    """A refused body is dropped as long as it keeps coming; a close would reset the connection and lose the answer."""

    async def upload():
        loop = asyncio.get_running_loop()
        connection, transport = Connection(Connections(dispatcher, 10), loop), Transport()
        connection.connection_made(transport)
        connection.data_received(PREDICT + b"Content-Length: 9000000\r\n\r\n1")
        now, ended = loop.time, []
        for seconds in (4, 8, 12, 18):
            loop.time = lambda seconds=seconds: now() + seconds
            if seconds < 18:
                connection.data_received(b"1")
            connection.check()
            ended.append(transport.ended)
        loop.time = now
        connection.connection_lost(None)
        return ended

    assert asyncio.run(upload()) == [None, None, None, "closed"]
