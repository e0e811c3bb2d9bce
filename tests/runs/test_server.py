"""The server process starts and stops cleanly, loses no accepted request, and survives lost workers and bundles."""

import base64
import concurrent.futures
import errno
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from commands import environment, free_port, python
from served import COLOURS, ROOT, Server, children, colour_run, gone, negative_run, picture, wait_until
from test_hostile_files import tamper_with_bundle

from serve.predict import main as ask
from serve.worker import GRACE_SECONDS


@pytest.fixture
def start(run_folder, serving):
    return lambda *arguments, folder=run_folder.path, **options: serving(folder, *map(str, arguments), **options)


@pytest.fixture(scope="module")
def server(run_folder, tmp_path_factory):
    """A server shared by the tests that do not change it."""
    server = Server(run_folder.path, tmp_path_factory.mktemp("server") / "errors", "--max-upload-mb", "1")
    yield server
    server.stop(signal.SIGKILL)


def test_the_process_imports_no_torch_and_leaves_cleanly(start):
    """The first line has task, address and process count; no training library is imported; SIGTERM ends everything."""
    server = start(flags=("-X", "importtime"))
    assert server.line.startswith(f"Serving image_classification (3 classes) on {server.url}: ")
    status, answer = server.ask("POST", "/predict", picture("blue"))
    assert (status, answer["label"]) == (200, "blue")
    assert server.ask("GET", "/health") == (200, {"status": "ok"})
    assert server.ask("GET", "/ready") == (200, {"status": "ready"})
    workers = server.ask("GET", "/info")[1]["processes"]
    assert f"{workers} process" in server.line
    processes = server.processes()
    assert len(processes) == 2 + workers
    maps = "".join(Path(f"/proc/{process}/maps").read_text() for process in processes)
    assert "onnxruntime" in maps
    assert "torch" not in maps
    assert server.stop() == 0
    assert all(map(gone, processes))
    with pytest.raises(ConnectionRefusedError):
        server.ask("GET", "/health")
    imported = {line.split("|")[-1].strip() for line in server.errors.read_text().splitlines() if "import time" in line}
    packages = {name.partition(".")[0] for name in imported}
    assert {"flask", "httptools", "numpy", "onnxruntime", "PIL"} <= packages
    assert packages.isdisjoint(
        ["torch", "torchvision", "pytorch_lightning", "lightning", "mlflow", "sklearn", "matplotlib", "onnx", "yaml"]
    )
    ours = {name for name in imported if name.startswith("deeplightning")}
    assert ours == {
        "deeplightning",
        "deeplightning.image_spec",
        "deeplightning.kinds",
        "deeplightning.runfolder",
        "deeplightning.version",
        "deeplightning.words",
    }


@pytest.mark.parametrize(
    "module",
    ["serve.bundle", "deeplightning.export.bundle", pytest.param("deeplightning.export.int8", marks=pytest.mark.slow)],
)
def test_onnxruntime_reports_to_nobody(tmp_path, monkeypatch, module):
    """Telemetry, on by default from 1.29, is off before it can start a thread or write to the user's home."""
    code = f"import os, {module}; print('threads', len(os.listdir('/proc/self/task')))"
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    done = python("-c", code, cwd=ROOT, HOME=str(tmp_path))
    assert (done.stdout, done.stderr) == ("threads 1\n", "")
    assert list(tmp_path.iterdir()) == []


def half_sent(server, data):
    """Return a connection on which the headers and part of the body have been sent."""
    connection = server.connect()
    connection.putrequest("POST", "/predict")
    connection.putheader("Content-Length", str(len(data)))
    connection.endheaders()
    connection.send(data[:20])
    return connection


def answer(connection):
    """Return the JSON of a pending response."""
    return json.loads(connection.getresponse().read())


class Clients:
    """Threads that send requests until the port is closed or `stop` is set. Each keeps its connection until the server
    closes it or, with `fresh`, opens one per request.

    Attributes:
        counts: the number of answers to each client.
        faults: client numbers and exceptions of requests without an answer; the client continues.
        labels: all answers.
    """

    def __init__(self, server, number, fresh=False):
        self.server, self.counts, self.faults, self.labels, self.fresh = server, [0] * number, [], [], fresh
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self._ask, args=(client,)) for client in range(number)]
        for thread in self.threads:
            thread.start()

    def _ask(self, client):
        while not self.stop.is_set():
            connection = self.server.connect()
            try:
                connection.connect()
            except (ConnectionRefusedError, ConnectionResetError):
                return
            try:
                closes = False
                while not (closes or self.stop.is_set()):
                    connection.request("POST", "/predict", picture("blue"))
                    response = connection.getresponse()
                    closes = response.will_close or self.fresh
                    self.labels.append(json.loads(response.read())["label"])
                    self.counts[client] += 1
            except (OSError, http.client.HTTPException, KeyError) as error:
                self.faults.append((client, error))
            finally:
                connection.close()

    def wait_for_answers(self):
        """Wait until each client has got further answers."""
        before = list(self.counts)
        wait_until(lambda: all(now > then + 1 for now, then in zip(self.counts, before, strict=True)), 60)

    def join(self):
        self.stop.set()
        for thread in self.threads:
            thread.join(60)


def refused(port):
    """Return whether the port is closed."""
    with socket.socket() as probe:
        probe.settimeout(0.1)  # just before the port closes, an attempt to connect gets no answer
        return probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_at_sigterm_what_was_accepted_is_answered(start):
    """At SIGTERM the server answers a partly sent request and one on an idle connection, then closes both. A connection
    without a request, such as browsers open, does not delay it."""
    server = start()
    sending, idle, silent = half_sent(server, picture("green")), server.connect(), server.connect()
    silent.connect()
    idle.request("GET", "/health")
    assert answer(idle) == {"status": "ok"}
    port = f":{server.port:04X}"

    def fetched():
        """Return whether the server has read all connections: the kernel buffers nothing of what was sent on them."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        established = [row for row in rows if row[1].endswith(port) and row[3] == "01"]
        return len(established) == 3 and not any(int(row[4].partition(":")[2], 16) for row in established)

    wait_until(fetched)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: refused(server.port))
    idle.request("GET", "/ready")
    late = idle.getresponse()
    assert (late.status, late.headers["Connection"]) == (503, "close")
    sending.send(picture("green")[20:])
    response = sending.getresponse()
    assert (json.loads(response.read())["label"], response.headers["Connection"]) == ("green", "close")
    for connection in (sending, idle, silent):
        connection.close()
    assert server.process.wait(timeout=10) == 0


def test_under_load_nothing_that_was_accepted_is_lost(start):
    """At SIGTERM, under load by sixteen clients, every connection that was opened gets an answer."""
    server = start()
    clients = Clients(server, 16, fresh=True)
    wait_until(lambda: sum(clients.counts) > 300, 30)
    server.process.send_signal(signal.SIGTERM)
    for thread in clients.threads:
        thread.join(20)
    assert (clients.faults, set(clients.labels)) == ([], {"blue"})
    assert server.process.wait(timeout=10) == 0


def test_requests_to_a_killed_worker_are_answered_before_the_server_ends(start):
    """Requests sent after all workers were killed are answered even if SIGTERM arrives before new workers (found by the
    storm, server)."""
    server = start()
    (pool,) = psutil.Process(server.process.pid).children()
    for worker in pool.children():
        worker.kill()
    asked = [server.connect() for _ in range(8)]
    for connection in asked:
        connection.request("POST", "/predict", picture("blue"))
    server.process.send_signal(signal.SIGTERM)
    assert [answer(connection)["label"] for connection in asked] == ["blue"] * 8
    for connection in asked:
        connection.close()
    assert server.process.wait(timeout=10) == 0


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_after_sigint_or_sigkill(start, sign):
    """Ctrl-C ends the server with exit code 0; the workers of a killed parent exit by themselves."""
    server = start()
    processes = server.processes()
    assert server.stop(sign) == (0 if sign == signal.SIGINT else -sign)
    wait_until(lambda: all(map(gone, processes)))


def test_a_crashed_worker_is_replaced(start):
    """A crashed worker is logged and replaced, and the first line is not printed again. If the pool dies, its workers
    finish their requests, and new ones answer with a reloaded model."""
    server = start()
    parent, workers = server.processes()[0], server.workers()
    os.kill(workers[0], signal.SIGSEGV)
    wait_until(lambda: gone(workers[0]) and len(server.workers()) == len(workers))
    for _ in range(10):
        assert server.ask("POST", "/predict", picture("red"))[1]["label"] == "red"
    assert server.events() == ["a worker died"]
    assert server.log.read_text().count("Serving") == 1
    assert parent == server.process.pid
    pool, workers = children(parent)[0], server.workers()
    os.kill(pool, signal.SIGKILL)
    wait_until(lambda: all(map(gone, [pool, *workers])), 60)
    wait_until(lambda: server.events()[1:] == ["the worker pool of the model died", "the model is reloaded"], 60)
    assert server.ask("POST", "/predict", picture("red"))[1]["label"] == "red"
    assert len(server.workers()) == len(workers)


@pytest.mark.parametrize("signalled", [False, True], ids=["polling", "SIGHUP"])
def test_a_changed_bundle_is_taken_up_without_a_failed_request(start, run_folder, tmp_path, signalled):
    """While the bundle is replaced, no request fails: the old or the new model answers each, then only the new one."""
    folder = shutil.copytree(run_folder.path, tmp_path / "copy")
    new = colour_run(tmp_path / "new", ("rot", "grün", "blau"))
    server = start(folder=folder)
    clients = Clients(server, 8)
    wait_until(lambda: sum(clients.counts) > 50)
    (folder / "bundle").rename(folder / "old")
    new.bundle.rename(folder / "bundle")
    if signalled:
        server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: clients.labels[-100:] == ["blau"] * 100, 20)
    clients.join()
    assert (clients.faults, set(clients.labels)) == ([], {"blue", "blau"})
    wait_until(lambda: len(server.workers()) == server.ask("GET", "/info")[1]["processes"])
    assert server.ask("GET", "/info")[1]["labels"] == ["rot", "grün", "blau"]


def test_a_damaged_or_unreadable_bundle_is_not_taken_up(start, run_folder, tmp_path):
    """The loaded model continues to answer; a damaged bundle is logged with the reason."""
    folder = shutil.copytree(run_folder.path, tmp_path / "copy")
    server = start(folder=folder)
    card = folder / "bundle" / "bundle.json"
    card.write_text(card.read_text().replace("green", "amber"))
    wait_until(lambda: server.errors.read_text().count("\n") == 1)
    assert "the previous model is kept: The bundle" in server.events()[0]
    assert server.ask("POST", "/predict", picture("green"))[1]["label"] == "green"
    (folder / "bundle").rename(folder / "old")
    (folder / "bundle").symlink_to("x" * 300)  # stat: File name too long
    time.sleep(2.5)
    assert server.ask("POST", "/predict", picture("green"))[1]["label"] == "green"


def test_too_large_a_body_gets_an_answer(server):
    """Clients that send the complete body before they read get 413, with a Content-Length and with chunks."""
    body = b"\0" * 20_000_000
    assert server.ask("POST", "/predict", body)[0] == 413
    assert server.ask("POST", "/predict", iter([body]))[0] == 413  # http.client makes chunks of it


def test_requests_do_not_wait_for_a_client_that_pauses(server):
    """While 50 clients pause in mid-body, sixty concurrent requests of others get correct answers."""
    pausing = [half_sent(server, b"\0" * 1000) for _ in range(50)]
    asked = [list(COLOURS)[number % 3] for number in range(60)]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        found = threads.map(lambda colour: server.ask("POST", "/predict", picture(colour))[1]["label"], asked)
        assert list(found) == asked
    for connection in pausing:
        connection.close()


def test_a_client_that_leaves_is_no_fault(server):
    """A client that disconnects in mid-body or before its answer is logged as 499 and causes no error event."""
    half_sent(server, b"\0" * 1000).close()
    leaves = server.connect()
    leaves.request("POST", "/predict", picture())
    leaves.close()
    wait_until(lambda: any(line["status"] == 499 for line in server.requests()))
    assert server.ask("POST", "/predict", picture())[0] == 200
    assert server.events() == []


def test_a_key_is_asked_for_and_kept_secret(start):
    """The server requires the key from the environment variable and does not log it. A public server prints at start-up
    that it is public, and answers only for the hosts in its list."""
    public = ("--host", "0.0.0.0", "--allowed-hosts", "model.example,10.0.0.5")
    server = start("--api-key-env", "OWN_KEY", *public, OWN_KEY="s3cret-value")
    assert "public" in server.line
    names = ["model.example", "10.0.0.5:80", "localhost", "other.example"]
    assert [server.ask("GET", "/health", headers={"Host": name})[0] for name in names] == [200, 200, 200, 421]
    assert server.ask("POST", "/predict", picture())[0] == 401
    assert server.ask("POST", "/predict", picture(), {"X-API-Key": "s3cret-value"})[0] == 200
    assert "s3cret" not in server.log.read_text() + server.errors.read_text() + str(server.ask("GET", "/health"))
    assert b"s3cret" not in Path(f"/proc/{server.process.pid}/cmdline").read_bytes()


def test_above_the_limit_there_are_refusals_and_no_faults(start):
    """Above the limit of the queue, clients get only 200, 429 and 504, and a 429 has Retry-After."""
    server = start("--max-queue", 2, "--max-wait", 0.2)
    image = picture("red", "JPEG", (1500, 1500))

    def ask(_):
        connection = server.connect()
        connection.request("POST", "/predict", image)
        response = connection.getresponse()
        connection.close()
        return response.status, response.headers["Retry-After"]

    with concurrent.futures.ThreadPoolExecutor(24) as threads:
        found = set(threads.map(ask, range(192)))
    assert {200, 429} <= {status for status, _ in found} <= {200, 429, 504}
    assert all(int(seconds) >= 1 for status, seconds in found if status == 429)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["RUN", "--port", "TAKEN"], 3, "cannot listen on 127.0.0.1, port TAKEN: Address already in use."),
        (["RUN", "--port", "0", "--host", "no.such.host.invalid"], 3, "no.such.host.invalid"),
        (["RUN", "--port", "0", "--host", "203.0.113.1"], 3, "203.0.113.1"),
        (["/nowhere", "--port", "0"], 4, "/nowhere"),
        (["RUN", "--api-key-env", "UNSET"], 2, "UNSET"),
        (["RUN", "--api-key-env", "EMPTY"], 2, "EMPTY"),
        ([], 2, "usage: python -m serve"),
        (["x", "--port", "70000"], 2, "usage: python -m serve"),
        (["x" * 300, "--port", "0"], 4, "File name too long"),
        (["~nobody-here/run", "--port", "0"], 4, "home directory"),
        (["RUN", "--port", "0", "--host", "a..b"], 3, "cannot listen on a..b, port 0"),
        (["x", "--precision", "int4"], 2, "usage: python -m serve"),
    ],
)
def test_a_start_that_fails_is_explained(run_folder, monkeypatch, arguments, code, words):
    """A port, address, bundle or key that cannot be used ends the start with one error and its exit code; wrong
    arguments end it with exit code 2 and the usage."""
    monkeypatch.setenv("EMPTY", "")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"RUN": str(run_folder.path), "TAKEN": str(taken.getsockname()[1])}
        done = python("-m", "serve", *(known.get(word, word) for word in arguments), cwd=ROOT)
    assert (done.returncode, done.stdout) == (code, "")
    assert words.replace("TAKEN", known["TAKEN"]) in done.stderr
    assert (done.stderr.count("\n"), done.stderr[:7]) == (1, "error: ") or words.startswith("usage")


# The client.


def predict(url, *arguments, cwd=ROOT):
    done = python("-m", "deeplightning", "ask", *arguments, cwd=cwd, PREDICT_URL=url)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_the_client_prints_one_line_per_image(start, tmp_path):
    """The client prints the answers in order, each with its file's name; without arguments it sends the ten sample
    digits. `--url` takes precedence over PREDICT_URL."""
    server = start()
    url = f"http://127.0.0.1:{server.port}/predict"
    paths = [tmp_path / "a red one.png", tmp_path / "grün.png"]
    for path, colour in zip(paths, ("red", "green"), strict=True):
        path.write_bytes(picture(colour))
    code, lines, err = predict(url, *paths)
    assert (code, err) == (0, "")
    assert [(line["image"], line["label"]) for line in lines] == [(str(paths[0]), "red"), (str(paths[1]), "green")]
    code, lines, err = predict(url, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert [Path(line["image"]).name for line in lines] == [f"{digit}.png" for digit in range(10)]

    body = tmp_path / "two pictures.json"
    body.write_text(json.dumps({"images": [base64.b64encode(picture(colour)).decode() for colour in ("blue", "red")]}))
    code, (line,), err = predict(url, body)
    assert (code, err, line["file"]) == (0, "", str(body))
    assert [answer["label"] for answer in line["predictions"]] == ["blue", "red"]
    body.write_text("{")
    assert "the server answers 400: The body is not JSON" in predict(url, body)[2]

    (tmp_path / "text.png").write_text("no picture")
    code, lines, err = predict(url, paths[0], tmp_path / "text.png", paths[1])
    assert (code, len(lines), err.count("\n")) == (3, 1, 1)
    assert "text.png: the server answers 415: This is not an image" in err
    code, (line,), _ = predict("http://127.0.0.1:9/predict", "--url", url.removesuffix("/predict"), paths[0])
    assert (code, line["label"]) == (0, "red")
    code, lines, err = predict(f"http://127.0.0.1:{server.port}/", paths[0])
    assert (code, lines) == (3, [])
    assert "405" in err


@pytest.mark.parametrize(
    ("url", "image", "words"),
    [
        ("http://127.0.0.1:9/predict", "1.png", "deeplightning serve last (in a clone: bash deploy.sh RUN)"),
        ("http://127.0.0.1:9/predict", "no.png", "no.png cannot be read: No such file"),
        ("http://127.0.0.1:9/predict", "", "cannot be read: Is a directory"),
        ("file:///etc/hostname", "1.png", "The server's address is 'file:///etc/hostname'"),
        ("http://127.0.0.1:x/", "1.png", "The server's address is"),
        ("http://[::1:5000/predict", "1.png", "The server's address is"),
        ("http://a..b/predict", "1.png", "No server answers at http://a..b/predict"),
        ("http://127.0.0.1:9/prédict", "1.png", "No server answers at"),
    ],
)
def test_the_client_says_why_there_is_no_answer(capsys, url, image, words):
    """An unreachable server, a wrong address and an unreadable file end the client with exit code 3 and one error."""
    code = ask(["--url", url, str(ROOT / "examples" / "digits" / image)])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert words in err


OPENS_A_FILE = "import os, runpy; os.open(os.devnull, os.O_RDONLY); runpy.run_module('serve', run_name='__main__')"
"""Libraries open files before the server checks its streams (libffi since 3.4.5), and get their free descriptors."""


@pytest.mark.parametrize(
    ("start", "closed"),
    [("-m serve", ">&-"), ("-m serve", "<&- >&- 2>&-"), (f'-c "{OPENS_A_FILE}"', ">&-")],
    ids=["stdout", "all", "stdout is reused"],
)
def test_closed_streams_are_as_dev_null(run_folder, start, closed):
    """The server answers although its standard streams are closed, and writes no log line to a client's socket."""
    port = int(free_port())
    command = f'exec "{sys.executable}" {start} "$0" --port {port} --device cpu {closed}'
    with subprocess.Popen(["bash", "-c", command, str(run_folder.path)], cwd=ROOT) as process:
        try:
            wait_until(lambda: process.poll() is None and not refused(port), 60)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            for colour in COLOURS:
                connection.request("POST", "/predict", picture(colour))
                assert answer(connection)["label"] == colour
            connection.close()
            worker = children(children(process.pid)[0])[0]
            assert not str(Path(f"/proc/{worker}/fd/1").readlink()).startswith("socket")
        finally:
            process.terminate()
        assert process.wait(timeout=15) == 0


# Models that never finish or need more memory than the machine has.


LIMITED = "import sys; from serve import __main__, pool; pool.{} = {}; sys.exit(__main__.main())"


def hostile_bundle(run_folder, folder, *graph):
    """Copy the run, with another model and valid digests in its bundle."""
    shutil.copytree(run_folder.path, folder)
    tamper_with_bundle(folder / "bundle", [["graph", *graph]])
    return folder


@pytest.mark.parametrize(
    ("graph", "limit", "value", "words"),
    [
        (["endless"], "LOAD_SECONDS", "0.5", "was not loaded and verified within 0.5 s, the limit"),
        (["vast", 10**9], "spare_memory", "lambda: 300_000_000", "loading may take 0.3 GB of memory"),
    ],
    ids=["time", "memory"],
)
def test_a_model_outside_the_limits_is_refused_at_the_start(run_folder, tmp_path, graph, limit, value, words):
    """An endless loop or a 4 GB intermediate result ends the start with exit code 4; the error has folder and limit."""
    folder = hostile_bundle(run_folder, tmp_path / "copy", *graph)
    done = python("-c", LIMITED.format(limit, value), folder, "--port", "0", "--device", "cpu", cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1), done.stderr
    assert words in done.stderr
    assert str(folder) in done.stderr


def test_sigterm_ends_a_start_that_never_ends(run_folder, tmp_path):
    """SIGTERM while a model is loading ends all processes within the limit."""
    folder = hostile_bundle(run_folder, tmp_path / "copy", "endless")
    command = [sys.executable, "-m", "serve", str(folder), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, cwd=ROOT) as process:
        wait_until(lambda: children(process.pid), 60)
        (pool,) = children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 0
    assert gone(pool)


def swap(folder, bundle):
    """Replace the run's bundle by a copy of another one, with one rename per folder."""
    (folder / "bundle").rename(folder / f"before {bundle.name} {len(list(folder.iterdir()))}")
    shutil.copytree(bundle, folder / "copied")
    (folder / "copied").rename(folder / "bundle")


def test_a_model_that_never_answers_is_given_up(start, run_folder, tmp_path, monkeypatch):
    """While a new model loads, the old one answers and a killed worker is replaced. After the time limit the old model
    stays, and the next valid one is loaded. SIGTERM while a model loads ends the server in time, and the requests of 32
    clients until then are answered."""
    folder = shutil.copytree(run_folder.path, tmp_path / "run")
    endless = hostile_bundle(run_folder, tmp_path / "endless", "endless") / "bundle"
    monkeypatch.setattr(Server, "program", (sys.executable, "-c", LIMITED.format("LOAD_SECONDS", 4.0)))
    server = start(folder=folder)
    good = shutil.copytree(folder / "bundle", folder / "good")
    workers = server.workers()
    swap(folder, endless)
    wait_until(lambda: len(children(server.process.pid)) == 2)
    os.kill(workers[0], signal.SIGKILL)
    wait_until(lambda: gone(workers[0]) and len(server.workers()) == len(workers))
    assert server.ask("POST", "/predict", picture("red"))[1]["label"] == "red"
    wait_until(lambda: any("was not loaded and verified within 4 s" in event for event in server.events()), 20)
    assert [event.partition(":")[0] for event in server.events()] == ["a worker died", "the previous model is kept"]
    swap(folder, good)
    wait_until(lambda: server.events()[-1] == "the model is reloaded", 30)
    clients = Clients(server, 32)
    swap(folder, endless)
    wait_until(lambda: len(children(server.process.pid)) == 2)
    clients.wait_for_answers()
    processes = server.processes()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=GRACE_SECONDS + 2) == 0
    assert all(map(gone, processes))
    clients.join()
    assert (clients.faults, set(clients.labels)) == ([], {"blue"})


def test_the_client_names_the_file_of_a_picture_that_it_gets(start, tmp_path):
    """The answer of a reconstruction has the key `image`; the path is under `file`."""
    server = start(folder=negative_run(tmp_path / "negative").path)
    path = tmp_path / "red.png"
    path.write_bytes(picture("red"))
    code, (line,), _ = predict(f"http://127.0.0.1:{server.port}/predict", path)
    assert (code, line["file"]) == (0, str(path))
    assert base64.b64decode(line["image"]).startswith(b"\x89PNG")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_full_disk_under_the_log_ends_no_server(run_folder):
    """The first line is lost like those of requests; the server answers."""
    port = free_port()
    command = [sys.executable, "-m", "serve", run_folder.path, "--port", str(port), "--device", "cpu"]

    def ready():
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2).status == 200
        except OSError:
            return False

    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(command, cwd=ROOT, stdout=full, env=environment())
    try:
        wait_until(lambda: ready() or process.poll() is not None, 60)
        assert process.poll() is None
    finally:
        process.terminate()
        code = process.wait(timeout=15)
    assert code == 0
