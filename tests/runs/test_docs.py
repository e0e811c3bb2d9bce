"""The manual says what is so: its blocks run and answer as printed, and its links lead somewhere.

How a page is run: every `yaml` and `python` block that opens with a comment that is a file's name becomes that file.
The `bash` and other `python` blocks run in order, in one shell, in a folder that looks like a clone. A line with the
comment "keeps running" is a server: it gets a free port, and the page goes on when it has said where it is. A `text`
block is the output of the block before it; numbers with a point, run ids, ports and the best step may differ, and `…`
stands for anything. A `console` block holds commands that need a cluster, a GPU or the network: it is shown and not
run, but its verbs and options of `deeplightning` must exist.

`bash train.sh` without a config is what a person would start; to save the imports of ten processes, `deeplightning` and
`bash train.sh CONFIG`, which is the same as `deeplightning train CONFIG`, hand their arguments to `commands.Commands`.
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
PAGES = [README, *(page for page in sorted(ROOT.glob("*.md")) if page != README), *MANUAL]
PAGES += [
    page
    for folder in ("examples/*", "benchmarks", "deploy", "plugins/*")
    for page in sorted(ROOT.glob(f"{folder}/*.md"))
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


# Stands for `deeplightning` in the shell: asks the test to run it, and says what it said.
STAND_IN = """import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect(sys.argv[1])
    file = asked.makefile("rw")
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
                asked, _ = listener.accept()
            except OSError:  # closed below
                return
            with asked, asked.makefile("rw") as file:
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
    """The page as one shell script, in which a line with MARK comes before the output of each block."""
    lines = [
        "set -e",
        "trap 'for server in $servers; do kill $server; done; wait' EXIT",
        f"cp -r '{ROOT}/configs' '{ROOT}/examples' .",
    ]
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
                for verb, name_of in (
                    ("serve", "deploy"),
                    ("ask", "predict"),
                ):  # in the shell, whose variables they need
                    command = re.sub(rf"^deeplightning {verb}\b", f"bash '{ROOT}/{name_of}.sh'", command)
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
    """A line without what differs from run to run."""
    line = re.sub(r"\b[0-9a-f]{32}\b", "ID", line)
    line = re.sub(r"epoch \d+ \(step \d+\)", "epoch N (step N)", line)
    return re.sub(r"\d+(\.\d+)+(e-?\d+)?|(?<=:)\d{4,5}\b", "N", line)


def fits(printed: str, said: str) -> bool:
    """Whether a line of the manual is what a line of output says."""
    pattern = ".*".join(re.escape(part) for part in masked(printed.rstrip()).split("…"))
    return re.fullmatch(pattern, masked(said)) is not None


def runs(page: Path) -> bool:
    """Whether a page has a block that is run."""
    return any(block.language in ("bash", "python") and not block.file for block in blocks(page))


RUN = [README, *filter(runs, MANUAL), ROOT / "examples" / "own_code" / "README.md"]
QUICK = {*ROOT.glob("docs/reference/*.md")}  # the others train: minutes together
QUICK |= {page for name in ("ray", "slurm") for page in ROOT.glob(f"plugins/*/*/docs/{name}.md")}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page not in QUICK)) for page in RUN], ids=name
)
def test_a_page_runs_and_answers_as_it_says(page, place):
    """Every block of the page runs in order without an error, and prints the lines that the page shows, in order."""
    for verb in sorted({*re.findall(r"\bdeeplightning (\w+)", page.read_text())}):
        if plugin := plugin_of(verb):
            pytest.importorskip(f"deeplightning_{plugin}")
    if page.is_relative_to(ROOT / "plugins"):
        pytest.importorskip(page.parents[1].name)
    (place / "script").write_text(script(page, place))
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("MLFLOW_", "DEEPLIGHTNING_", "PYTEST_"))}
    path = f"{place / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    with (
        (place / "output").open("w+") as output,
        subprocess.Popen(
            ["bash", "script"],
            cwd=place,
            env=kept | {"PATH": path, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # whatever the page has started can be ended
        ) as shell,
    ):
        try:
            code = shell.wait(900)
        finally:
            if shell.poll() != 0:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
        output.seek(0)
        printed = output.read()
    assert code == 0, printed
    said = {int(n): text for n, text in re.findall(rf"^{MARK} (\d+)\n(.*?)(?=^{MARK}|\Z)", printed, re.S | re.M)}
    for number, block in enumerate(blocks(page)):
        if block.language == "text":
            left = iter(said[number - 1].splitlines())
            for line in block.text.splitlines():
                assert line == "…" or any(fits(line, other) for other in left), f"not said: {line}\n{said[number - 1]}"
    if page == README:
        every_file_of_a_run_is_named(place)


def every_file_of_a_run_is_named(place: Path) -> None:
    """What lies in a run's folder stands in the table of its files; a picture stands there without its ending."""
    left = {file.relative_to(run) for run in place.glob("mlruns/0/*/artifacts") for file in run.rglob("*")}
    text = FILES.read_text()
    assert {path.name for path in left if path.name not in text and f"`{path.stem}`" not in text} <= {"logs"}


def test_blocks_are_of_kinds_that_are_looked_at():
    """No block escapes by its name."""
    found = {block.language for page in PAGES for block in blocks(page)}
    assert found <= {"bash", "console", "python", "toml", "yaml", "text"}


def test_toml_can_be_read():
    """Tables of a pyproject.toml."""
    shown = [block.text for page in PAGES for block in blocks(page) if block.language == "toml"]
    assert all(tomllib.loads(text)["project"] for text in shown)
    assert shown


@pytest.mark.parametrize("page", MANUAL, ids=name)
def test_commands_that_are_only_shown_exist(page):
    """Each `deeplightning VERB` of a console block is a verb, and each of its options one of that verb's."""
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
    """Relative links, with their headings, and files named in code exist."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, heading = link.partition("#")
        target = page.parent / file if file else page
        if "://" in link:
            continue
        if not target.exists() or (heading and heading not in headings(target)):
            missing.append(link)
    for named in re.findall(r"`([\w./-]+/[\w.-]+\.(?:sh|yaml|py|md|toml|lock)|\w+\.sh)`", text):
        if not (ROOT / named).exists():
            missing.append(named)
    assert missing == []


def headings(page: Path) -> set[str]:
    """The names by which GitHub links to a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
