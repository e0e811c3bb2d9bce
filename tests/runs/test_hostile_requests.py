"""Our server and the application under gunicorn give the same status and message for each request of
`hostile/requests.tsv`, and of `hostile/requests_of_rows.tsv` if they serve rows, without internal errors or hangs."""

import concurrent.futures
import json
import re
import socket
from functools import partial
from pathlib import Path

import pytest
from exported import exported
from served import GUNICORN, Server, WsgiServer, colour_run, picture

HOSTILE = Path(__file__).parents[1] / "hostile"
RUNS = {"requests.tsv": colour_run, "requests_of_rows.tsv": lambda path: exported(path, "table_classification")[1]}
GOOD = {"requests.tsv": picture("green"), "requests_of_rows.tsv": json.dumps({"row": {"age": 30, "city": "Bern"}})}

ORDINARY = re.compile(
    r"POST /predict[^\s{]* HTTP/1\.1\\r\\nHost: localhost\\r\\n"
    r"(Content-(Type|Encoding): [^\\{]+\\r\\n)?Content-Length: \{length\}\\r\\n\\r\\n"
)
"""A recipe of a prediction whose head every HTTP server parses alike."""

LIMIT_SECONDS = 20
"""Limit of an exchange. Each client shuts down its side of the connection after its last byte."""


def lines(corpus):
    """Return name, expected statuses and recipe of each request."""
    texts = (HOSTILE / corpus).read_text().splitlines()
    return [text.split("\t") for text in texts if text and not text.startswith("#")]


def bytes_of(recipe):
    """Return the bytes of a recipe: escapes are Python's; `{TEXT*N}` is N times TEXT; `{picture}` is a valid green PNG;
    `{length}` is the number of bytes after the first blank line."""
    text = recipe.encode("latin-1").decode("unicode_escape")
    text = re.sub(r"\{([^{}]*?)\*(\d+)\}", lambda found: found[1] * int(found[2]), text)
    text = text.replace("{picture}", picture("green").decode("latin-1"))
    return text.replace("{length}", str(len(text.partition("\r\n\r\n")[2]))).encode("latin-1")


def exchange(port, data):
    """Return status, and message or label, of each answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS) as connection:
        received = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(65_536):
                received += more
        except (BrokenPipeError, ConnectionResetError):
            pass
    return list(answers(received))


def answers(received):
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        size = int(length[1]) if length and status != 100 else 0
        body, received = received[:size], received[size:]
        found = json.loads(body) if b"application/json" in head and body else {}
        yield status, found.get("ERROR") or found.get("label")


def statuses(found):
    """Return statuses in the file's notation: `404` or `200 400`, `404*17` for many equal ones, `-` for none."""
    found = [status for status, _ in found]
    if len(found) > 3 and len(set(found)) == 1:
        return f"{found[0]}*{len(found)}"
    return " ".join(map(str, found)) or "-"


@pytest.fixture(scope="module", params=RUNS)
def corpus(request):
    return request.param


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    return RUNS[corpus](tmp_path_factory.mktemp("run")).path


@pytest.fixture(scope="module")
def found(corpus, run, tmp_path_factory):
    """Our server's answers to all requests, to a good request after them, its exit code and its standard error."""
    kind = {"Content-Type": "application/json"} if corpus == "requests_of_rows.tsv" else {}
    server = Server(run, tmp_path_factory.mktemp("server") / "errors", "--max-wait", "60")
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            answered = list(threads.map(partial(exchange, server.port), [bytes_of(line[2]) for line in lines(corpus)]))
        alive = server.ask("POST", "/predict", GOOD[corpus], kind)
    finally:
        code = server.stop()
    return answered, alive, code, server.errors.read_text()


@pytest.fixture(scope="module")
def under_gunicorn(corpus, run, tmp_path_factory):
    """By name, the answers of the WSGI application under gunicorn, which parses HTTP itself, to requests with ordinary
    heads."""
    application = f"serve:create_app({str(run)!r}, max_wait=60)"
    server = WsgiServer(tmp_path_factory.mktemp("gunicorn"), *GUNICORN, application)
    chosen = [line for line in lines(corpus) if ORDINARY.match(line[2])]
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            answered = list(threads.map(partial(exchange, server.port), [bytes_of(line[2]) for line in chosen]))
        assert server.stop() == 0
    finally:
        server.process.kill()
        server.process.wait()
    assert "Traceback" not in server.output.read_text()
    return {line[0]: one for line, one in zip(chosen, answered, strict=True)}


def test_every_hostile_request_is_answered_as_its_line_says(corpus, found):
    """No answer is 5xx, except for 501 to an unknown coding or method and 505 to an unknown version; the next client
    gets an answer."""
    answered, alive, code, errors = found
    wrong = {
        name: (expected, statuses(one))
        for (name, expected, _), one in zip(lines(corpus), answered, strict=True)
        if statuses(one) != expected
    }
    assert wrong == {}
    assert not re.search(r"\b5\d\d", " ".join(re.sub("50[15]", "", line[1]) for line in lines(corpus)))
    assert (alive[0], code) == (200, 0)
    events = {json.loads(line)["event"] for line in errors.splitlines() if line.startswith("{")}
    assert events <= {"refused requests without a line"}
    assert "TIFF" not in errors
    assert "Traceback" not in errors


def test_all_servers_agree(corpus, found, under_gunicorn):
    """Our server and gunicorn give the same status and message to requests with ordinary heads."""
    names = [line[0] for line in lines(corpus)]
    assert len(set(names)) == len(names) >= (400 if corpus == "requests.tsv" else 20)
    ours = dict(zip(names, found[0], strict=True))
    assert len(under_gunicorn) >= (140 if corpus == "requests.tsv" else 20)
    different = {name: (ours[name], one) for name, one in under_gunicorn.items() if one != ours[name]}
    assert not different, different
