"""The server as a process: it starts and ends cleanly, loses nothing it accepted, and outlives its worker, its bundle
and its clients."""

import base64
import concurrent.futures
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
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from commands import free_port, python
from served import COLOURS, ROOT, Server, children, colour_run, gone, picture, wait_until
from test_hostile_files import tamper_with_bundle

from serve.predict import main as ask
from serve.worker import GRACE_SECONDS


@pytest.fixture
def start(run_folder, serving):
    return lambda *arguments, folder=run_folder.path, **options: serving(folder, *map(str, arguments), **options)


@pytest.fixture(scope="module")
def server(run_folder, tmp_path_factory):
    """One for all tests that leave it as it was."""
    server = Server(run_folder.path, tmp_path_factory.mktemp("server") / "errors", "--max-upload-mb", "1")
    yield server
    server.stop(signal.SIGKILL)


def test_the_process_imports_no_torch_and_leaves_cleanly(start):
    """One line says what, where and how it is spread; no library of training is in it; SIGTERM ends it all."""
    server = start(flags=("-X", "importtime"))
    assert server.line.startswith(f"Serving image_classification (3 classes) on {server.url}: ")
    status, answer = server.ask("POST", "/predict", picture("blue"))
    assert (status, answer["label"]) == (200, "blue")
    assert server.ask("GET", "/health") == (200, {"status": "ok"})
    assert server.ask("GET", "/ready") == (200, {"status": "ready"})
    spread = server.ask("GET", "/info")[1]
    assert f"{spread['processes']} process" in server.line
    processes = server.processes()
    assert len(processes) == 2 + spread["processes"]
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
    """Its telemetry, on by default from 1.29, is off before it can start a thread or write to the user's home."""
    code = f"import os, {module}; print('threads', len(os.listdir('/proc/self/task')))"
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    done = python("-c", code, cwd=ROOT, HOME=str(tmp_path))
    assert (done.stdout, done.stderr) == ("threads 1\n", "")
    assert list(tmp_path.iterdir()) == []


def half_sent(server, data):
    """A connection on which the head and some of the body are sent."""
    connection = server.connect()
    connection.putrequest("POST", "/predict")
    connection.putheader("Content-Length", str(len(data)))
    connection.endheaders()
    connection.send(data[:20])
    return connection


def answer(connection):
    """The JSON of a response that is due."""
    return json.loads(connection.getresponse().read())


class Clients:
    """So many clients that ask until the port is closed, or `stop`; each keeps its connection until the server ends it,
    or `fresh`, opens one for each request.

    Attributes:
        counts: answers of each.
        faults: times and exceptions of requests without an answer; the client continues.
        labels: what was answered.
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

    def go_on(self):
        """Waits until each has further answers."""
        before = list(self.counts)
        wait_until(lambda: all(now > then + 1 for now, then in zip(self.counts, before, strict=True)), 60)

    def join(self):
        self.stop.set()
        for thread in self.threads:
            thread.join(60)


def refused(server):
    """Whether the port is closed; just before, an attempt to connect gets no answer."""
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=0.1).close()
    except ConnectionRefusedError:
        return True
    except TimeoutError:
        pass
    return False


def test_at_sigterm_what_was_accepted_is_answered(start):
    """A body that is under way, and a request on a connection that idled, are answered, and the connection closes; one
    that never asks, as browsers open them, does not hold the server up."""
    server = start()
    sending, idle, silent = half_sent(server, picture("green")), server.connect(), server.connect()
    silent.connect()
    idle.request("GET", "/health")
    assert answer(idle) == {"status": "ok"}
    port = f":{server.port:04X}"

    def fetched():
        """Whether the server has fetched all connections: the system keeps nothing of what was sent on them."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        held = [row for row in rows if row[1].endswith(port) and row[3] == "01"]
        return len(held) == 3 and not any(int(row[4].partition(":")[2], 16) for row in held)

    wait_until(fetched)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: refused(server))
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
    """SIGTERM while sixteen clients ask, each on fresh connections: every one that was opened is answered."""
    server = start()
    clients = Clients(server, 16, fresh=True)
    wait_until(lambda: sum(clients.counts) > 300, 30)
    server.process.send_signal(signal.SIGTERM)
    for thread in clients.threads:
        thread.join(20)
    assert (clients.faults, set(clients.labels)) == ([], {"blue"})
    assert server.process.wait(timeout=10) == 0


def test_what_waits_on_the_socket_of_a_lost_worker_is_answered_before_the_end(start):
    """Every worker is killed, clients connect and ask, and SIGTERM comes before there are others. The storm, server."""
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
def test_nobody_is_left_when_it_ends_otherwise(start, sign):
    """Ctrl-C is a wish to stop, and no fault; the workers of a parent that is killed end by themselves."""
    server = start()
    processes = server.processes()
    assert server.stop(sign) == (0 if sign == signal.SIGINT else -sign)
    wait_until(lambda: all(map(gone, processes)))


def test_a_crashed_worker_is_replaced(start):
    """The next requests reach another one, the event is logged, and the first line is not repeated. If the pool dies,
    its workers finish what they have, and new ones answer from a model that is loaded again."""
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


@pytest.mark.parametrize("told", [False, True], ids=["unasked", "SIGHUP"])
def test_a_changed_bundle_is_taken_up_without_a_failed_request(start, run_folder, tmp_path, told):
    """Requests go on meanwhile: none fails, each is answered by the old model or the new, and then by the new only."""
    folder = tmp_path / "copy"
    shutil.copytree(run_folder.path, folder)
    new = colour_run(tmp_path / "new", ("rot", "grün", "blau"))
    server = start(folder=folder)
    clients = Clients(server, 8)
    wait_until(lambda: sum(clients.counts) > 50)
    (folder / "bundle").rename(folder / "old")
    new.bundle.rename(folder / "bundle")
    if told:
        server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: clients.labels[-100:] == ["blau"] * 100, 20)
    clients.join()
    assert (clients.faults, set(clients.labels)) == ([], {"blue", "blau"})
    wait_until(lambda: len(server.workers()) == server.ask("GET", "/info")[1]["processes"])
    assert server.ask("GET", "/info")[1]["labels"] == ["rot", "grün", "blau"]


def test_a_damaged_bundle_is_not_taken_up(start, run_folder, tmp_path):
    """What answered goes on answering, and the log says why."""
    folder = tmp_path / "copy"
    shutil.copytree(run_folder.path, folder)
    server = start(folder=folder)
    card = folder / "bundle" / "bundle.json"
    card.write_text(card.read_text().replace("green", "amber"))
    wait_until(lambda: server.errors.read_text().count("\n") == 1)
    assert "the previous model is kept: The bundle" in server.events()[0]
    assert server.ask("POST", "/predict", picture("green"))[1]["label"] == "green"


def test_too_large_a_body_gets_an_answer(server):
    """413 reaches clients that send all before they read, whether they announce the size or send chunks."""
    body = b"\0" * 20_000_000
    assert server.ask("POST", "/predict", body)[0] == 413
    assert server.ask("POST", "/predict", iter([body]))[0] == 413  # http.client makes chunks of it


def test_requests_do_not_wait_for_a_client_that_pauses(server):
    """Others are answered meanwhile, and many at a time rightly, also on one connection after another."""
    pausing = [half_sent(server, b"\0" * 1000) for _ in range(50)]
    asked = [list(COLOURS)[number % 3] for number in range(60)]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        found = threads.map(lambda colour: server.ask("POST", "/predict", picture(colour))[1]["label"], asked)
        assert list(found) == asked
    for connection in pausing:
        connection.close()


def test_a_client_that_leaves_is_no_fault(server):
    """In mid-body, or before it has its answer."""
    half_sent(server, b"\0" * 1000).close()
    leaves = server.connect()
    leaves.request("POST", "/predict", picture())
    leaves.close()
    wait_until(lambda: any(line["status"] == 499 for line in server.requests()))
    assert server.ask("POST", "/predict", picture())[0] == 200
    assert server.events() == []


def test_a_key_is_asked_for_and_kept_secret(start):
    """The server accepts the variable's value alone and does not log it. A public server says at its start that it is
    public, and answers only for the hosts in its list."""
    public = ("--host", "0.0.0.0", "--allowed-hosts", "model.example,10.0.0.5")
    server = start("--api-key-env", "OWN_KEY", *public, OWN_KEY="s3cret-value")
    assert "public" in server.line
    names = ["model.example", "10.0.0.5:80", "localhost", "other.example"]
    assert [server.ask("GET", "/health", headers={"Host": name})[0] for name in names] == [200, 200, 200, 421]
    assert server.ask("POST", "/predict", picture())[0] == 401
    assert server.ask("POST", "/predict", picture(), {"X-API-Key": "s3cret-value"})[0] == 200
    assert "s3cret" not in server.log.read_text() + server.errors.read_text() + str(server.ask("GET", "/health"))
    command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    assert b"s3cret" not in command


def test_above_the_limit_there_are_refusals_and_no_faults(start):
    """Only 200, 429 and 504, and a 429 says when to come back."""
    server = start("--max-queue", 2, "--max-wait", 0.2)
    image = picture("red", "JPEG", (1500, 1500))

    def ask(_):
        connection = server.connect()
        connection.request("POST", "/predict", image)
        response = connection.getresponse()
        connection.close()
        return response.status, int(response.headers.get("Retry-After", 1))

    with concurrent.futures.ThreadPoolExecutor(24) as threads:
        found = set(threads.map(ask, range(192)))
    assert {200, 429} <= {status for status, _ in found} <= {200, 429, 504}
    assert all(seconds >= 1 for _, seconds in found)


def serve(*arguments):
    """rc, stdout and stderr of a start that is expected to fail."""
    done = python("-m", "serve", *arguments, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


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
    """One note and the exit code of a port, an address, a bundle or a key that cannot be used; wrong arguments get 2
    and how it is used."""
    monkeypatch.setenv("EMPTY", "")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"RUN": str(run_folder.path), "TAKEN": str(taken.getsockname()[1])}
        found, out, err = serve(*(known.get(word, word) for word in arguments))
    assert (found, out) == (code, "")
    assert words.replace("TAKEN", known["TAKEN"]) in err
    assert (err.count("\n"), err[:7]) == (1, "error: ") or words.startswith("usage")


# The client.


def predict(url, *arguments, cwd=ROOT):
    done = python("-m", "deeplightning", "ask", *arguments, cwd=cwd, PREDICT_URL=url)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_the_client_prints_one_line_per_image(start, tmp_path):
    """In order, each with its file's name, whatever the name; without arguments the ten sample digits. `--url` counts
    before PREDICT_URL."""
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
    """Exit 3 and one note."""
    code = ask(["--url", url, str(ROOT / "examples" / "digits" / image)])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert words in err


TAKEN = "import os, runpy; os.open(os.devnull, os.O_RDONLY); runpy.run_module('serve', run_name='__main__')"
"""Libraries open files before the server looks at its streams, libffi since 3.4.5."""


@pytest.mark.parametrize(
    ("start", "closed"),
    [("-m serve", ">&-"), ("-m serve", "<&- >&- 2>&-"), (f'-c "{TAKEN}"', ">&-")],
    ids=["output", "all", "number taken"],
)
def test_closed_streams_are_as_dev_null(run_folder, start, closed):
    """The server answers, and no log line goes to a client."""
    port = int(free_port())
    command = f'exec "{sys.executable}" {start} "$0" --port {port} --device cpu {closed}'
    with subprocess.Popen(["bash", "-c", command, str(run_folder.path)], cwd=ROOT) as process:
        try:
            client = SimpleNamespace(port=port)
            wait_until(lambda: process.poll() is None and not refused(client), 60)
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


# Models that compute without end, or in more memory than there is.


LIMITED = "import sys; from serve import __main__, pool; pool.{} = {}; sys.exit(__main__.main())"


def hostile_bundle(run_folder, folder, *graph):
    """A copy of the run whose bundle has another model, with right digests."""
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
    """A loop without end, and an intermediate result of 4 GB: exit code 4, one note with folder and limit."""
    folder = hostile_bundle(run_folder, tmp_path / "copy", *graph)
    done = python("-c", LIMITED.format(limit, value), folder, "--port", "0", "--device", "cpu", cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1), done.stderr
    assert words in done.stderr
    assert str(folder) in done.stderr


def test_sigterm_ends_a_start_that_never_ends(run_folder, tmp_path):
    """Within moments, with nobody left."""
    folder = hostile_bundle(run_folder, tmp_path / "copy", "endless")
    command = [sys.executable, "-m", "serve", str(folder), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, cwd=ROOT) as process:
        wait_until(lambda: children(process.pid), 60)
        (pool,) = children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 0
    assert gone(pool)


def swap(folder, bundle):
    """Another bundle takes the place of the run's, in one step for each folder."""
    (folder / "bundle").rename(folder / f"before {bundle.name} {len(list(folder.iterdir()))}")
    shutil.copytree(bundle, folder / "copied")
    (folder / "copied").rename(folder / "bundle")


@pytest.fixture
def limited(run_folder, tmp_path, monkeypatch):
    """Starts a server whose limit of time is so many seconds; gives it, its folder, and an endless bundle."""
    started = []

    def start(seconds):
        folder = shutil.copytree(run_folder.path, tmp_path / "run")
        program = (sys.executable, "-c", LIMITED.format("LOAD_SECONDS", float(seconds)))
        monkeypatch.setattr(Server, "program", program)
        started.append(Server(folder, tmp_path / "errors"))
        return started[0], folder, hostile_bundle(run_folder, tmp_path / "endless", "endless") / "bundle"

    yield start
    for server in started:
        server.process.kill()
        server.process.wait()


def test_a_model_that_never_answers_is_given_up(limited):
    """While it is tried, a worker that is killed is replaced and others answer; then the old model stays; the next good
    one is taken up. SIGTERM during a try is obeyed in time, and what 32 clients asked by then is answered."""
    server, folder, endless = limited(4)
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
    clients.go_on()
    processes = server.processes()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=GRACE_SECONDS + 2) == 0
    assert all(map(gone, processes))
    clients.join()
    assert (clients.faults, set(clients.labels)) == ([], {"blue"})


def test_a_bundle_that_cannot_be_looked_at_changes_nothing(start, run_folder, tmp_path):
    """The server answers with the loaded model."""
    folder = tmp_path / "copy"
    shutil.copytree(run_folder.path, folder)
    server = start(folder=folder)
    (folder / "bundle").rename(folder / "old")
    (folder / "bundle").symlink_to("x" * 300)  # stat: File name too long
    time.sleep(2.5)
    assert server.ask("POST", "/predict", picture("green"))[1]["label"] == "green"
