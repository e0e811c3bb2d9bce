"""A command handles a stdout that is closed, full or unread, and SIGTERM in its first seconds."""

import gc
import http.server
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from commands import environment, python, real
from tiny import OWN

TERMINATED = "error: interrupted by SIGTERM"


# ---- stdout without a reader


@pytest.mark.parametrize(
    "how", ["stdout", "closed", *(pytest.param(h, marks=pytest.mark.slow) for h in ("both", "full"))]
)
def test_a_run_outlives_the_reader_of_its_stdout(how, command, tiny, place, tmp_path):
    """A run whose stdout is unread, full or closed trains to the end with exit code 0."""
    words = ("train", tiny, f"logger.params.tracking_uri='{tmp_path}'", "logger.progress=bar")
    command(*words, cwd=place, main=f"lost:{how}", code=0)
    (folder,) = tmp_path.glob("*/*/artifacts")
    assert (folder / "last.ckpt").is_file()


def test_a_run_that_fails_and_one_of_two_ranks_keep_their_exit_codes_without_a_reader(command, tiny, place, tmp_path):
    """The exit code is that of the training, here 5 for a loss that is NaN, not of the broken pipe."""
    words = ("train", tiny, f"logger.params.tracking_uri='{tmp_path}'")
    failed = command(*words, "model.optimizer.params.lr=1e30", cwd=place, main="lost:stdout")
    assert (failed.code, failed.err.count("error")) == (5, 1), failed
    two = ("engine.processes=2", "engine.backend=ddp", "logger.ranks=[0, 1]")
    command(*words, *two, cwd=place, ranks=2, main="lost:stdout", code=0)


@pytest.mark.parametrize("words", ["explain CONFIG", "check CONFIG --format json", "--help"])
def test_a_verb_that_prints_its_result_ends_without_a_word(words, command, tiny, place):
    """The exit code is 141 without a reader, as after SIGPIPE, and 0 with a closed stdout; stderr is empty."""
    arguments = [tiny if word == "CONFIG" else word for word in words.split()]
    for how, code in (("lost:stdout", 141), ("lost:closed", 0)):
        outcome = command(*arguments, cwd=place, main=how)
        assert (outcome.code, outcome.err) == (code, ""), outcome


# ---- SIGTERM before a run handles it


def caught(process: int) -> int:
    """Return the bit mask of the signals for which a process has a handler."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only /proc shows which signals a process handles")
@pytest.mark.parametrize("delay", [0, 0.1, 1])
def test_sigterm_in_the_first_seconds_ends_with_words(delay, tiny, place, tmp_path):
    """SIGTERM during any import ends the command within seconds: one line and exit code 143, no traceback."""
    uri = f"logger.params.tracking_uri='{tmp_path}'"
    command = [sys.executable, "-m", "deeplightning", "train", str(tiny), "train.num_epochs=1000", uri]
    child = subprocess.Popen(command, cwd=place, env=environment(), stdout=-3, stderr=-1, text=True)
    end = time.monotonic() + 30
    while not caught(child.pid) & 1 << signal.SIGTERM - 1:
        assert time.monotonic() < end
        assert child.poll() is None
        time.sleep(0.002)
    assert "libtorch" not in Path(f"/proc/{child.pid}/maps").read_text(), "the handlers come after the imports"
    time.sleep(delay)
    child.terminate()
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err.splitlines()[-1:]) == (143, [TERMINATED]), err
    assert "Traceback" not in err


def test_sigterm_inside_a_callback_of_an_import_is_not_lost(place):
    """Python prints and drops an exception of such a callback; the signal is then raised again."""
    program = (
        "import os, signal, time, weakref\n"
        "from importlib import _bootstrap\n"
        "from deeplightning.process import streams\n"
        "streams.prepare()\n"
        "lock = _bootstrap._get_module_lock('a module')\n"
        "real, _bootstrap._imp = _bootstrap._imp, type('Lock', (), {\n"
        "    'acquire_lock': lambda: os.kill(os.getpid(), signal.SIGTERM), 'release_lock': lambda: None})\n"
        "del lock\n"
        "_bootstrap._imp = real\n"
        "try:\n"
        "    time.sleep(20)\n"
        "except streams.Terminated:\n"
        "    print('ended')\n"
    )
    ended = python("-c", program, cwd=place)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")


@pytest.mark.parametrize("calls", [1, 2], ids=["of the module", "of the command"])
def test_sigterm_while_the_command_prepares_ends_with_words(calls, place):
    """The module and the command that it imports both call `prepare`; a signal after either is one line and 143."""
    program = (
        "import itertools, os, signal, deeplightning.process.streams as streams\n"
        "from deeplightning.__main__ import main\n"
        "prepare, count = streams.prepare, itertools.count(1)\n"
        "def prepare_and_end():\n"
        "    prepare()\n"
        f"    if next(count) == {calls}: os.kill(os.getpid(), signal.SIGTERM)\n"
        "streams.prepare = prepare_and_end\n"
        "main()\n"
    )
    ended = python("-c", program, cwd=place)
    assert (ended.returncode, ended.stderr.splitlines()) == (143, [TERMINATED])


def test_handlers_come_before_most_imports(place):
    """`prepare` runs before the slow imports. Importing our modules installs no handler: a library may import them."""
    program = (
        "import signal, sys; before = signal.getsignal(15), sys.stdout\n"
        "import deeplightning.cli, deeplightning.__main__, deeplightning.process.streams as process\n"
        "assert (signal.getsignal(15), sys.stdout) == before\n"
        "process.prepare(); assert signal.getsignal(15) is not before[0]\n"
        "import os; assert os.fork() or os._exit(signal.getsignal(15) != signal.SIG_DFL) or True\n"
        "assert os.wait()[1] == 0; process.release(); assert signal.getsignal(15) == signal.SIG_DFL\n"
        "signal.signal(15, signal.SIG_IGN); process.prepare(); assert signal.getsignal(15) == signal.SIG_IGN\n"
    )
    assert (done := python("-c", program, cwd=place)).returncode == 0, done
    program = (
        "import sys, deeplightning.__main__ as entry, deeplightning.process.streams as process\n"
        "process.prepare = lambda: sys.exit('click' in sys.modules or 'deeplightning.cli' in sys.modules)\n"
        "entry.main()"
    )
    assert (done := python("-c", program, cwd=place)).returncode == 0, done


SWALLOWS = """\
import os, signal
try:
    os.kill(os.getpid(), signal.SIGTERM)
    [None for _ in range(9)]
except BaseException:
    pass
from deeplightning.task.img_classif import ImageClassification as Task
"""


def test_sigterm_that_a_library_swallows_ends_all_the_same(command, tiny, tmp_path):
    """If an imported library swallows SIGTERM, the run does not start and ends as interrupted."""
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    uri = f"logger.params.tracking_uri='{tmp_path}/runs'"
    (tmp_path / "own.py").write_text("")
    outcome = command("train", tiny, uri, "model.module.type=swallows.Task", cwd=tmp_path, code=143)
    assert outcome.err.splitlines()[-1] == TERMINATED
    assert "Traceback" not in outcome.err


LEAVES_OPEN = """\
import gc
import pytorch_lightning as pl

class Notes(pl.Callback):
    def __init__(self):
        self.file = open("notes.txt", "w")
        self.me = self

    def on_train_end(self, trainer, task):
        self.file.write(f"{gc.get_threshold()} {gc.get_freeze_count() > 100_000}")
"""


@pytest.mark.slow
def test_a_file_that_a_callback_leaves_open_is_written_at_the_end(tiny, tmp_path):
    """Imported objects are frozen for the garbage collector; a file that is still open is flushed at exit."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "leaves.py").write_text(LEAVES_OPEN)
    uri = f"logger.params.tracking_uri='{tmp_path}/runs'"
    real("train", tiny, uri, "train.callbacks=[{type: leaves.Notes}]", cwd=tmp_path, code=0)
    assert (tmp_path / "notes.txt").read_text() == f"{gc.get_threshold()} True"


class Answers(http.server.BaseHTTPRequestHandler):
    """Prediction server that answers 7 to every request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"predicted_class": "7"}')

    def log_message(self, *_: object) -> None:
        pass


def test_predict_ends_without_a_word_where_nobody_reads():
    """`predict.sh … | true` ends with 141, `predict.sh … >&-` with 0; stderr is empty."""
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            ask = f"'{sys.executable}' -m serve.predict --text a b c"
            script = f"( sleep 0.1; {ask} ) | true; echo ${{PIPESTATUS[0]}}; {ask} >&-; echo $?"
            env = environment(PREDICT_URL=f"http://127.0.0.1:{server.server_port}/predict")
            done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)
        finally:
            server.shutdown()
    assert (done.stdout.split(), done.stderr) == (["141", "0"], "")


def test_a_character_that_the_encoding_lacks_is_escaped():
    """A character outside the encoding of stdout is printed as an escape, and ends no run."""
    program = "from deeplightning.process import streams; streams.prepare(); print('null \\u2192 3')"
    done = python("-c", program, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "null \\u2192 3\n")
