"""The manual is right: its blocks run with the output that is shown, and its links lead somewhere.

How a page runs: each `yaml` and `python` block that opens with a file name as a comment becomes that file. The `bash`
and other `python` blocks run in order, in one shell, in a folder like a clone. A line with the comment "keeps running"
is a server: it gets a free port, and the page continues when it has printed its address. A `text` block is the output
of the block before it; numbers with a point, run ids, ports and the best step may differ, and `…` stands for any text.
A `console` block has commands that need a cluster, a GPU or the network: it is not run, but its verbs and options of
`deeplightning` must exist.

To save imports, `deeplightning` and `bash train.sh CONFIG`, the same as `deeplightning train CONFIG`, pass their
arguments to `commands.Commands`. `bash train.sh` without a config runs as it is.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from commands import free_port

from deeplightning.cli import cli
from deeplightning.faults import plugin_of

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
FILES = ROOT / "docs" / "reference" / "files.md"
MANUAL = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/*/docs/*.md")])
FOLDERS = ("examples/*", "benchmarks", "deploy", "plugins/*")
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *MANUAL,
    *(page for folder in FOLDERS for page in sorted(ROOT.glob(f"{folder}/*.md"))),
]
MARK = "@@ block"


@dataclass
class Block:
    """One fenced block of a page."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name in its first line."""
        found = re.match(r"# (\S+\.(?:yaml|py))\n", self.text)
        return found and found[1]


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Replaces `deeplightning` in the shell: asks the test to run the command, and prints its output.
STAND_IN = """import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    file = connection.makefile("rw")
    print(json.dumps([os.getcwd(), sys.argv[2:]]), file=file, flush=True)
    code, out, err = json.loads(file.readline())
sys.stdout.write(out)
sys.stdout.flush()
sys.stderr.write(err)
sys.exit(code)
"""


@pytest.fixture
def place(tmp_path, command):
    """A folder like a clone, whose `.venv/bin/deeplightning` is the stand-in."""
    place, address = tmp_path / "clone", str(tmp_path / "socket")
    tools = place / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "activate").write_text(f"PATH={tools}:$PATH\n")
    (tools / "stand_in.py").write_text(STAND_IN)
    started = f"""exec '{sys.executable}' -S '{tools}/stand_in.py' '{address}' "$@"\n"""
    (tools / "deeplightning").write_text(f"#!/bin/sh\n{started}")
    (tools / "deeplightning").chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed below
                return
            with connection, connection.makefile("rw") as file:
                cwd, arguments = json.loads(file.readline())
                outcome = command(*arguments, cwd=Path(cwd))
                print(json.dumps([outcome.code, outcome.out, outcome.err]), file=file, flush=True)

    thread = threading.Thread(target=answer)
    thread.start()
    yield place
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def script(page: Path, place: Path) -> str:
    """Return the page as one shell script, which prints a line with MARK before the output of each block."""
    lines = ["set -e", "trap 'for server in $servers; do kill $server; done; wait' EXIT"]
    lines.append(f"cp -r '{ROOT}/configs' '{ROOT}/examples' .")
    ports: dict[str, int] = {}
    for number, block in enumerate(blocks(page)):
        if block.file:
            (place / block.file).parent.mkdir(parents=True, exist_ok=True)
            (place / block.file).write_text(block.text)
        elif block.language == "python":
            (place / f"block_{number}.py").write_text(block.text)
            lines += [f"echo '{MARK} {number}'", f"'{sys.executable}' block_{number}.py"]
        elif block.language == "bash":
            lines.append(f"echo '{MARK} {number}'")
            for line in block.text.splitlines():
                command = re.sub(r"\bbash train\.sh (?=\S+\.yaml)", "deeplightning train ", line)
                command = re.sub(r"\bbash (\w+\.sh)", rf"bash '{ROOT}/\1'", command)
                command = re.sub(r"^python\b", f"'{sys.executable}'", command)
                command = re.sub(r"^gunicorn\b", f"'{sys.executable}' -m gunicorn", command)
                for verb, file in (("serve", "deploy.sh"), ("ask", "predict.sh")):  # they need the shell's variables
                    command = re.sub(rf"^deeplightning {verb}\b", f"bash '{ROOT}/{file}'", command)
                if "# keeps running" in line:
                    default = "5000" if "deploy.sh" in command else "8000" if "gunicorn" in line else "5001"
                    ports[default] = int(free_port())
                    started = command.partition("#")[0]
                    started += "" if "--bind" in line else f"--port {ports[default]}"
                    command = (
                        "rm -f served\n"
                        f'{started} >served 2>&1 & servers+=" $!"\n'
                        "until grep -q http://127 served; do kill -0 $! || { cat served; exit 1; }; sleep 0.1; done\n"
                        f"export PREDICT_URL=http://127.0.0.1:{ports[default]}/predict; cat served"
                    )
                for default, port in ports.items():
                    command = command.replace(f"127.0.0.1:{default}", f"127.0.0.1:{port}")
                lines.append(command)
    return "\n".join(lines)


def masked(line: str) -> str:
    """Replace in a line what differs from run to run."""
    line = re.sub(r"\b[0-9a-f]{32}\b", "ID", line)
    line = re.sub(r"epoch \d+ \(step \d+\)", "epoch N (step N)", line)
    return re.sub(r"\d+(\.\d+)+(e-?\d+)?|(?<=:)\d{4,5}\b", "N", line)


def fits(shown: str, printed: str) -> bool:
    """Return whether a line of the manual matches a line of output."""
    pattern = ".*".join(re.escape(part) for part in masked(shown.rstrip()).split("…"))
    return re.fullmatch(pattern, masked(printed)) is not None


def runs(page: Path) -> bool:
    """Return whether a page has a block that is run."""
    return any(block.language in ("bash", "python") and not block.file for block in blocks(page))


RUN = [README, *filter(runs, MANUAL), ROOT / "examples" / "own_code" / "README.md"]
QUICK = {*ROOT.glob("docs/reference/*.md")}  # the others train: minutes together
QUICK |= {page for name in ("ray", "slurm") for page in ROOT.glob(f"plugins/*/*/docs/{name}.md")}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page not in QUICK)) for page in RUN], ids=name
)
def test_a_page_runs_and_prints_what_it_shows(page, place):
    """The blocks of a page run in order without an error, and print the lines that the page shows, in order."""
    for verb in sorted({*re.findall(r"\bdeeplightning (\w+)", page.read_text())}):
        if plugin := plugin_of(verb):
            pytest.importorskip(f"deeplightning_{plugin}")
    if page.is_relative_to(ROOT / "plugins"):
        pytest.importorskip(page.parents[1].name)
    (place / "script").write_text(script(page, place))
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("MLFLOW_", "DEEPLIGHTNING_", "PYTEST_"))}
    env = kept | {"PATH": f"{place / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with (place / "output").open("w") as output:  # a new session, so that all processes of the page can be killed
        shell = subprocess.Popen(
            ["bash", "script"], cwd=place, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        code = shell.wait(900)
    finally:
        if shell.poll() != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    output = (place / "output").read_text()
    assert code == 0, output
    printed = {int(n): text for n, text in re.findall(rf"^{MARK} (\d+)\n(.*?)(?=^{MARK}|\Z)", output, re.S | re.M)}
    for number, block in enumerate(blocks(page)):
        if block.language == "text":
            lines = iter(printed[number - 1].splitlines())
            for shown in block.text.splitlines():
                found = shown == "…" or any(fits(shown, line) for line in lines)
                assert found, f"not printed: {shown}\n{printed[number - 1]}"
    if page == README:
        assert_every_file_is_documented(place)


def assert_every_file_is_documented(place: Path) -> None:
    """Assert that the manual's table of a run's files has each file of the runs; pictures are listed without suffix."""
    paths = [path for run in place.glob("mlruns/0/*/artifacts") for path in run.rglob("*")]
    text = FILES.read_text()
    assert {path.name for path in paths if path.name not in text and f"`{path.stem}`" not in text} <= {"logs"}


def test_blocks_have_known_languages():
    """Each block has one of the languages that these tests handle."""
    found = {block.language for page in PAGES for block in blocks(page)}
    assert found <= {"bash", "console", "python", "toml", "yaml", "text"}


def test_toml_can_be_read():
    """The `toml` blocks are tables of a valid pyproject.toml."""
    shown = [block.text for page in PAGES for block in blocks(page) if block.language == "toml"]
    assert all(tomllib.loads(text)["project"] for text in shown)
    assert shown


@pytest.mark.parametrize("page", MANUAL, ids=name)
def test_commands_that_are_only_shown_exist(page):
    """Each `deeplightning VERB` of a console block is a verb with the options that are shown."""
    shown = [block.text for block in blocks(page) if block.language == "console"]
    for verb, words in re.findall(r"\bdeeplightning ([a-z]+)\b((?:[^\n#\\]|\\\n)*)", "\n".join(shown)):
        if plugin := plugin_of(verb):
            pytest.importorskip(f"deeplightning_{plugin}")
        found = cli.get_command(click.Context(cli), verb)
        assert found is not None, verb
        known = {option for p in found.params for option in (*p.opts, *p.secondary_opts)}
        assert set(re.findall(r"(?<=\s)--[a-z-]+", words)) <= known | {"--help"}, f"{verb}{words}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_named_files_lead_somewhere(page):
    """The targets of relative links, with their headings, and files named in code exist."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, heading = link.partition("#")
        target = page.parent / file if file else page
        if "://" not in link and (not target.exists() or (heading and heading not in headings(target))):
            missing.append(link)
    named = re.findall(r"`([\w./-]+/[\w.-]+\.(?:sh|yaml|py|md|toml|lock)|\w+\.sh)`", text)
    assert [*missing, *(file for file in named if not (ROOT / file).exists())] == []


def headings(page: Path) -> set[str]:
    """Return GitHub's anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
