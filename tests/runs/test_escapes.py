"""Control characters in data files, runs, stores or answers of servers reach no terminal, log or note."""

import http.server
import io
import json
import os
import pty
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import unicodedata
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from commands import environment, python, read_terminal

import deeplightning
from deeplightning.run import predict
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.code import read_code
from deeplightning.tracking.metrics_file import points_line
from deeplightning.words import printable

TITLE = "\x1b]0;TITLE\x07\x1b[31mred\u202eder\u2066\u200b\x9b2J\x7f\u2028\r!!!"
"""It sets a title and a colour, reverses the text direction, clears the screen, and returns to the line's start."""
COLUMN = TITLE.replace("0;", "2A")  # a semicolon would separate columns
FORGED = f"{TITLE}\nerror: FORGED"
"""The same, with a forged error line."""


def steers(text: str) -> list[str]:
    """Return the control characters of a text by Unicode's categories, except for line ends and tabs."""
    kinds = {"Cc": "control", "Cf": "format", "Cs": "half of a pair", "Zl": "line end", "Zp": "paragraph end"}
    found = [(c, text[max(0, n - 60) : n + 30]) for n, c in enumerate(text) if c not in "\n\t"]
    return [f"{kinds[unicodedata.category(c)]} {place!r}" for c, place in found if unicodedata.category(c) in kinds]


def is_clean(text: str) -> bool:
    assert steers(text) == []
    assert not re.search(r"^(!!!|error: FORGED)", text, re.MULTILINE), text  # `\r` is read as a line end
    return True


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table whose column and class names contain control characters."""
    path = tmp_path_factory.mktemp("table") / "table.csv"
    rows = [f'{n % 7},{n % 5},"class {n % 2} {COLUMN}"' for n in range(80)]
    path.write_text("\n".join([f'"width {COLUMN}","height {COLUMN}",kind', *rows, ""]), newline="")
    return path


@pytest.fixture(scope="module")
def project(command, table, tmp_path_factory):
    """The outcome of `init --data`, and the project's folder."""
    folder = tmp_path_factory.mktemp("project") / "mine"
    return command("init", folder, "--kind", "table", "--data", table, cwd=folder.parent), folder


@pytest.fixture(scope="module")
def trained(command, project):
    """The outcome of the project's training."""
    name = "logger.params.run_name=" + json.dumps(f"mine {FORGED}")
    return command("train", "config.yaml", "train.num_epochs=2", "train.export=true", name, cwd=project[1])


@pytest.fixture
def foreign(trained, tmp_path):
    """A copy of the run and its store from a stranger: control characters wherever a run has names."""
    store = Path(shutil.copytree(trained.folder.parents[2], tmp_path / "foreign" / "mlruns"))
    folder = RunFolder(store / trained.folder.relative_to(trained.folder.parents[2]))
    settings = yaml.safe_load(folder.config.read_text())
    settings["seed"] = 8
    settings["logger"]["params"]["experiment_name"], settings["serve"]["allowed_hosts"] = FORGED, [FORGED]
    folder.config.write_text(yaml.safe_dump(settings, sort_keys=False))
    for path, more in {
        folder.environment: {"host": FORGED, "os": FORGED, "packages": {"a": FORGED}, "variables": {FORGED: FORGED}},
        folder.results("test"): {f"test_{FORGED}": 1.0},
        folder.data: {"files": {f"{FORGED}.csv": [3, "00"]}},
        folder.places: {"seed": FORGED},
    }.items():
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    with folder.metrics.open("a") as file:
        file.write(json.dumps(points_line(1, 0, {f"val_{FORGED}": 1.0})) + "\n")
    code = read_code(folder.code)
    code.roots, code.files[0, f"{FORGED}.py"], code.packages = ["/own"], f"# {FORGED}\n".encode(), {FORGED: FORGED}
    folder.code.write_bytes(code.pack())
    with closing(sqlite3.connect(store / "mlflow.db")) as database, database:
        database.execute("UPDATE runs SET name = ?, artifact_uri = ?", (FORGED, str(folder.path)))
        database.execute("UPDATE experiments SET name = ? WHERE experiment_id != 0", (f"of {FORGED}",))
        database.execute("UPDATE tags SET value = ?", (FORGED,))
        database.execute("UPDATE params SET value = ?", (FORGED,))
        for changed in ("metrics", "latest_metrics"):
            database.execute(f"UPDATE {changed} SET key = key || ?", (FORGED,))
        columns = [name for _, name, *_ in database.execute("PRAGMA table_info(runs)")]
        row = dict(zip(columns, database.execute("SELECT * FROM runs").fetchone(), strict=True))
        row |= {"run_uuid": "f" * 32, "status": "RUNNING", "start_time": 1}
        database.execute(f"INSERT INTO runs VALUES ({', '.join('?' * len(row))})", [*row.values()])
        watched = ("train/checkpoint/monitor", FORGED, "f" * 32)
        database.execute("INSERT INTO params VALUES (?, ?, ?)", watched)
        database.execute("INSERT INTO latest_metrics VALUES (?, 0.5, 1, 1, 0, ?)", watched[1:])
    return folder


@pytest.fixture
def refused(foreign, tmp_path):
    """A copy of it whose config, score and bundle are invalid because of such names."""
    folder = RunFolder(shutil.copytree(foreign.path, tmp_path / "refused"))
    settings = yaml.safe_load(folder.config.read_text())
    settings["train"]["checkpoint"]["monitor"], settings["model"][FORGED] = FORGED, FORGED
    folder.config.write_text(yaml.safe_dump(settings, sort_keys=False))
    folder.best_score.write_text(json.dumps({"metric": FORGED, "value": 0.5, "step": 1}))
    card = json.loads(folder.bundle_card.read_text())
    card["task"], card["labels"] = FORGED, [FORGED, "b"]
    card["run"] |= {"id": FORGED, "versions": {FORGED: FORGED}}
    card["files"] |= {FORGED: "00"}
    folder.bundle_card.write_text(json.dumps(card))
    return folder


VERBS = {
    "test": ["test RUN"],
    "predict": ["predict RUN", "predict RUN TABLE", "predict FOREIGN NAMED"],
    "export": ["export RUN"],
    "serve": ["serve RUN serve.nothing=1", "serve REFUSED --port 0", "serve FOREIGN --host nowhere.invalid"],
    "reproduce": ["reproduce RUN", "reproduce FOREIGN --trust", "reproduce FOREIGN --trust --any-data"],
    "bisect": ["bisect OWN RUN", "bisect RUN OWN", "bisect OWN FOREIGN --trust"],
    "diff": ["diff OWN RUN", "diff OWN RUN --patch", "diff OWN RUN --format json", "diff RUN OWN --exit-code"],
    "compare": ["compare OWN RUN", "compare OWN RUN --format json", "compare OWN,OWN RUN", "compare name=* RUN"],
    "report": ["report RUN", "report RUN OWN"],
    "train": ["train CONFIG --show-config train.resume_ckpt=FOREIGN/last.ckpt", "train CONFIG model.init_from=RUN"],
    "check": ["check FOREIGN/cfg.yaml", "check REFUSED/cfg.yaml", "check REFUSED/cfg.yaml --format json"],
    "explain": ["explain FOREIGN/cfg.yaml", "explain FOREIGN/cfg.yaml logger.params.experiment_name", "explain CONFIG"],
    "stats": ["stats FOREIGN/cfg.yaml", "stats CONFIG"],
    "runs": [
        *("runs", "runs --last", "runs --clean", "runs --sync", "runs --clean --delete"),
        *("runs --status finished", "runs --metric a>b", "runs --name *red*", "runs --name none"),
        "runs --clean --status finished",
    ],
    "monitor": ["monitor --host nowhere.invalid"],
}
"""Command lines by verb; a word in capitals stands for a file, RUN for each run that a user may have received."""


@pytest.mark.parametrize(
    "verb", [pytest.param(v, marks=[pytest.mark.slow] * (v in ("reproduce", "export", "compare"))) for v in VERBS]
)
def test_no_verb_prints_control_characters_of_a_foreign_run(
    command, project, trained, table, foreign, refused, tmp_path, verb
):
    """Every verb escapes the names of a run, whether it succeeds or refuses the run."""
    named = tmp_path / f"{COLUMN}.csv"
    shutil.copyfile(table, named)
    files = {"OWN": trained.folder, "CONFIG": project[1] / "config.yaml", "TABLE": table, "NAMED": named}
    files |= {"FOREIGN": foreign.path, "REFUSED": refused.path}
    runs = ["last", foreign.path, refused.path, FORGED]
    shown = 0
    for line in VERBS[verb]:
        for run in runs if "RUN" in line.split() else runs[:1]:
            words = [str((files | {"RUN": run}).get(word, word)) for word in line.split()]
            words = [re.sub("(FOREIGN|REFUSED|OWN)(?=[/,])", lambda part: str(files[part[0]]), word) for word in words]
            outcome = command(*words, cwd=tmp_path, MLFLOW_TRACKING_URI=str(foreign.path.parents[2]))
            assert outcome.code in (0, 2, 3, 4, 5) or "--exit-code" in line, outcome
            # Rows of answers are written to a pipe unescaped, with the name of the user's own file.
            is_rows = outcome.code == 0 and words[-1] in (str(table), str(named))
            text = outcome.err + ("" if is_rows else outcome.out)
            assert is_clean(text), line
            shown += "TITLE" in text
    assert shown or verb == "monitor"
    for page in tmp_path.glob("*.html"):
        assert steers(page.read_text()) == []


def test_rows_of_answers_are_escaped_on_a_terminal():
    """Column names and labels are escaped."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    predict._table(terminal)({f"share_{FORGED}": 1, "label": TITLE})
    assert is_clean(terminal.getvalue().replace("\r\n", "\n"))
    assert "TITLE" in terminal.getvalue()


def test_a_project_and_its_training_show_the_names_of_a_table_escaped(project, trained):
    """The output of `init --data` and of the run, its log, config and note contain no control characters."""
    for outcome in (project[0], trained):
        assert outcome.code == 0, outcome
        assert is_clean(outcome.out + outcome.err)
    assert printable(COLUMN) in project[0].out
    folder = RunFolder(trained.folder)
    for path in (folder.log(0), folder.config, folder.report, project[1] / "config.yaml", project[1] / "README.md"):
        assert steers(path.read_text()) == []
    with closing(sqlite3.connect(trained.folder.parents[2] / "mlflow.db")) as database:
        notes = database.execute("SELECT value FROM tags WHERE key = 'mlflow.note.content'").fetchall()
    assert [steers(note) for (note,) in notes] == [[]]


def test_a_run_in_a_program_shows_the_names_of_its_store_escaped(foreign, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(foreign.path.parents[2]))
    assert is_clean(repr(deeplightning.load_run(foreign.path)))


@pytest.mark.parametrize(
    ("status", "answer"),
    [(200, {"label": FORGED}), (400, {"ERROR": FORGED}), (500, {FORGED: FORGED}), (200, [FORGED]), (200, None)],
)
def test_ask_prints_a_servers_answer_escaped(tmp_path, status, answer):
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(FORGED.encode() if answer is None else json.dumps(answer, ensure_ascii=False).encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/predict"
        done = python("-P", "-m", "serve.predict", "--text", f"a text {FORGED}", cwd=tmp_path, PREDICT_URL=url)
    assert is_clean(done.stdout + done.stderr)
    assert "TITLE" in done.stdout + done.stderr or status == 200
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == [f"a text {FORGED}"] * bool(done.stdout)


def test_the_log_of_a_server_is_ascii(capfd):
    from serve.log import log_event

    log_event(FORGED, ValueError(FORGED), labels=[FORGED])
    line = capfd.readouterr().err
    assert is_clean(line)
    assert json.loads(line)["labels"] == [FORGED]


@pytest.mark.parametrize("words", ["runs", "diff OWN FOREIGN", "explain FOREIGN/cfg.yaml"])
def test_a_terminal_gets_only_our_own_sequences(trained, foreign, tmp_path, words):
    """A terminal gets our colours and cursor moves, but no title, colour or other control character of a name."""
    leader, follower = pty.openpty()
    store = str(foreign.path.parents[2])
    given = [word.replace("OWN", str(trained.folder)).replace("FOREIGN", str(foreign.path)) for word in words.split()]
    process = subprocess.Popen(
        [sys.executable, "-m", "deeplightning", *given], cwd=tmp_path, stdin=subprocess.DEVNULL,
        env=environment(MLFLOW_TRACKING_URI=store, TERM="xterm", COLUMNS="300"), stdout=follower, stderr=follower,
        start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    shown = read_terminal(leader).decode()
    process.wait(60)
    assert "\x1b[31mred" not in shown
    assert is_clean(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r\n", "\n"))


@pytest.mark.parametrize("plain", ["", "Zürich 日本 😀", "a b", "\\x1b", "\ufe0f"])
def test_text_without_control_characters_is_unchanged(plain):
    assert printable(plain) == plain


def test_an_escaped_text_of_json_or_yaml_means_the_same():
    text = "".join(map(chr, [*range(0x20), *range(0x7F, 0x100), *range(0x2000, 0x2070), 0x61C, 0xFEFF, 0xFFFE, 0xFFF9]))
    shown = printable(json.dumps(text))
    assert is_clean(shown)
    assert json.loads(shown) == text

    from deeplightning.config.tree import dump, line

    values = {text: [text, {"a": FORGED}], "b": "\U000e0041"}
    assert is_clean(dump(values) + line(values))
    assert yaml.safe_load(dump(values)) == yaml.safe_load(line(values)) == values
