"""The shell scripts set up an environment when needed and start `deeplightning`; other tools' files agree with them.

A clone in a folder with a space has the real scripts; its Python and its uv are short shell scripts that print or
record their arguments. CI begins with a fresh clone and runs the real uv.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import read_terminal

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["env.sh", "train.sh", "monitor.sh", "deploy.sh", "predict.sh", "test.sh", "tools/gpu_wheels.sh", ".ci/run"]
TOOLS = ["awk", "bash", "cat", "cksum", "date", "df", "dirname", "env", "grep", "ln", "mkdir", "mv", "readlink", "rm"]
TOOLS += ["sed", "sleep", "tail", "touch"]

# Prints its arguments, one a line; fails if STUB_FAILS is one of them.
PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then echo "$STUB_TORCHVISION" >&2; [ -z "$STUB_TORCHVISION" ]; exit; fi
printf '%s\\n' "$@"
case " $* " in *" ${STUB_FAILS:-nothing} "*) exit 1 ;; esac
exit "${STUB_EXIT:-0}"
"""

# Records each call, makes an environment with this Python, and fails or hangs at the call with the given argument.
UV = """#!/usr/bin/env bash
[ "$1" != --version ] || { echo "uv 0.13.8"; exit; }
echo "$*" >>"$STUB_CALLS"
case "$*" in venv*) mkdir -p "${!#}/bin" && ln -s "$STUB_PYTHON" "${!#}/bin/python" ;; esac
case " $* " in *" ${UV_HANGS:-nothing} "*) touch "$STUB_CALLS.hangs"; exec sleep 60 ;; esac
case " $* " in *" ${UV_FAILS:-nothing} "*) echo "error: ${UV_SAYS:-dns error}" >&2; exit 2 ;; esac
"""


class Clone:
    """A clone without an environment; its PATH is `bin`, with the usual tools, a suitable Python, and this uv."""

    def __init__(self, tmp_path: Path):
        self.root = tmp_path / "a clone"
        self.bin = tmp_path / "bin"
        self.calls = tmp_path / "calls"
        self.environment = {"PATH": str(self.bin), "HOME": str(tmp_path / "home")}
        self.environment |= {"STUB_PYTHON": str(tmp_path / "stub"), "STUB_CALLS": str(self.calls)}
        self.root.mkdir()
        self.bin.mkdir()
        for name in [*SCRIPTS, "pyproject.toml", "requirements.lock", "tests/journeys.txt"]:
            (self.root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        (self.bin / "python3").symlink_to(Path(sys.executable).resolve())
        for path, text in [(tmp_path / "stub", PYTHON), (self.bin / "uv", UV)]:
            path.write_text(text)
            path.chmod(0o755)

    def start(self, script: str, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen:
        command = ["bash", str(self.root / script), *arguments]
        variables = self.environment | environment
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=cwd or self.bin, env=variables, start_new_session=True, **output)

    def run(self, script: str, *arguments: str, cwd: Path | None = None, **environment: str) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr."""
        process = self.start(script, *arguments, cwd=cwd, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def start_hanging(self, script: str) -> subprocess.Popen:
        """Start a script whose set-up hangs in its last step."""
        process = self.start(script, UV_HANGS="-e")
        while not Path(f"{self.calls}.hangs").exists():
            assert process.poll() is None
            time.sleep(0.01)
        return process

    def uv_calls(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def bare(tmp_path):
    return Clone(tmp_path)


@pytest.fixture
def clone(bare):
    """A clone with an environment, and no recorded calls."""
    code, _, err = bare.run("env.sh")
    assert code == 0, err
    bare.calls.unlink()
    return bare


def test_every_script_is_correct_shell():
    """`bash -n` finds no syntax error."""
    wrong = [script for script in SCRIPTS if subprocess.run(["bash", "-n", ROOT / script], check=False).returncode]
    assert wrong == []


BASE = "{root}/configs/base.yaml"
TRAINED = [
    ([], [BASE]),
    (["train.num_epochs=2"], [BASE, "train.num_epochs=2"]),
    (["~model.scheduler"], [BASE, "~model.scheduler"]),
    (["+train.callbacks=[a, b]"], [BASE, "+train.callbacks=[a, b]"]),
    (["--help"], [BASE, "--help"]),
    (["my config.yaml", "seed=1"], ["my config.yaml", "seed=1"]),
    (["fold=1.yaml", "seed=1"], ["fold=1.yaml", "seed=1"]),
]
VERBS = {"monitor.sh": "monitor", "deploy.sh": "serve", "predict.sh": "ask"}


def test_scripts_pass_arguments_and_exit_code_on(clone, tmp_path):
    """Arguments are passed unchanged, with spaces, and the exit code is Python's; `train.sh` without a config inserts
    the clone's configs/base.yaml."""
    (tmp_path / "fold=1.yaml").touch()
    words = ["a b", "--port", "1"]
    calls = [("train.sh", "train", *row) for row in TRAINED]
    calls += [(script, verb, words, words) for script, verb in VERBS.items()]
    for script, verb, arguments, expected in calls:
        code, out, _ = clone.run(script, *arguments, cwd=tmp_path, STUB_EXIT="5")
        command = ["-m", "deeplightning", verb, *(word.format(root=clone.root) for word in expected)]
        assert (code, out.splitlines()) == (5, command)


def test_test_runs_every_check(clone):
    """A failed check makes the exit code 1, and the others still run; mypy runs beside the tests, and its output comes
    after theirs."""
    code, out, err = clone.run("test.sh", "--full", "-k", "a b", STUB_FAILS="mypy")
    assert code == 1
    assert [line.split()[1] for line in out.splitlines() if line.startswith("$ ")] == ["ruff", "ruff", "pytest", "mypy"]
    pytest = out[out.index("$ pytest") : out.index("$ mypy")].splitlines()
    assert pytest[-5:] == ["-m", "not slow", "-k", "a b", ""]
    assert out.splitlines()[-2:] == ["-m", "mypy"]
    assert err.strip() == "Not passed: mypy"


def test_the_sizes_of_test(clone):
    """`--quick` runs the unit tests, the default also the journeys, `--full` all files, and `--all` slow tests too.
    Named files run alone."""
    for name in ("raise_bounds", "without_plugins"):
        (clone.root / "tools" / f"{name}.sh").write_text("true\n")
    (clone.root / "tests" / "journeys.txt").write_text("# A list.\n\ntests/runs/test_a.py  # why\n")

    def pytest(*arguments):
        code, out, _ = clone.run("test.sh", *arguments)
        assert code == 0
        return out[out.index("--dist\n") : out.index("\n\n$ mypy")].splitlines()[1:]

    quick = ["loadfile", "-m", "not slow"]
    assert pytest("--quick") == ["worksteal", "-m", "not slow and not run", "tests/unit", "plugins"]
    assert pytest() == [*quick, "tests/unit", "plugins", "tests/runs/test_a.py"]
    assert pytest("--full", "-x") == [*quick, "-x"]
    assert pytest("--all", "-x") == ["loadfile", "-x"]
    assert pytest("tests/test_a.py::test_b") == [*quick, "tests/test_a.py::test_b"]


def test_test_docs_installs_sphinx_once(clone):
    """`--docs` runs only the tests of the manual; it installs Sphinx by hash, and again when the lock changes."""
    lock = clone.root / "docs" / "requirements.lock"
    lock.parent.mkdir()
    lock.write_text("sphinx==9.0.4\n")
    code, out, err = clone.run("test.sh", "--docs", "-x")
    assert (code, err) == (0, "")
    assert out.splitlines().count("--require-hashes") == 1
    assert {"tests/runs/test_site.py", "-x"} <= set(out.splitlines())
    assert "--require-hashes" not in clone.run("test.sh", "--docs")[1]
    lock.write_text("sphinx==9.1.1\n")
    assert "--require-hashes" in clone.run("test.sh", "--docs")[1]
    assert clone.run("test.sh", "--docs", STUB_FAILS="pytest")[0] == 1


def test_a_python_that_is_named_is_used_as_it_is(bare, tmp_path):
    """With DEEPLIGHTNING_PYTHON, a command or an absolute or relative path, nothing is set up."""
    (bare.bin / "own python").symlink_to(tmp_path / "stub")
    for named in ("own python", "./own python", str(bare.bin / "own python")):
        code, out, err = bare.run("train.sh", "x.yaml", DEEPLIGHTNING_PYTHON=named)
        assert (code, out.splitlines(), err) == (0, ["-m", "deeplightning", "train", "x.yaml"], "")
    assert bare.run("env.sh", DEEPLIGHTNING_PYTHON=str(bare.bin / "own python")) == (0, "", "")
    assert bare.run("env.sh", DEEPLIGHTNING_PYTHON="no such python")[0] == 3
    assert not (bare.root / ".venv").exists()
    code, _, err = bare.run("train.sh", DEEPLIGHTNING_PYTHON="no such python")
    assert code == 3
    assert "DEEPLIGHTNING_PYTHON=no such python is no command" in err


def test_ci_runs_test(clone):
    """`.ci/run` is `test.sh --full`, and passes its exit code on."""
    code, out, _ = clone.run(".ci/run", STUB_FAILS="pytest")
    assert (code, "$ pytest" in out, "tests/" in out) == (1, True, False)


def test_a_current_environment_costs_nothing(clone):
    """With a current environment a script prints nothing and starts only the environment's Python."""
    (clone.bin / "python3").unlink()
    code, _, err = clone.run("train.sh")
    assert (code, err) == (0, "")
    assert clone.uv_calls() == []


def test_set_up_installs_the_lock_with_its_hashes(bare):
    """The first start makes the environment from requirements.lock, then adds the project without the network."""
    before = set(bare.root.iterdir())
    code, out, err = bare.run("train.sh", "x.yaml")
    assert (code, out.splitlines()) == (0, ["-m", "deeplightning", "train", "x.yaml"])
    first, second = err.splitlines()[:2]
    assert first.startswith("Setting up the environment, once:")
    assert second.endswith(f"{bare.root}/.venv")
    venv, packages, project = bare.uv_calls()
    assert venv.startswith("venv ")
    assert packages.endswith("bin/python --require-hashes -r requirements.lock")
    assert project.endswith("--offline --no-deps --no-build-isolation -e .")
    assert set(bare.root.iterdir()) - before == {bare.root / ".uv", bare.root / ".venv"}


def test_plugins_are_installed_with_the_clone(clone):
    """They are installed in editable mode, offline; a new plug-in or changed requirements cause another set-up."""
    plugin = clone.root / "plugins" / "deeplightning-a"
    plugin.mkdir(parents=True)
    for text in ("[project]\n", "[project]\ndependencies = []\n"):
        (plugin / "pyproject.toml").write_text(text)
        assert clone.run("env.sh")[0] == 0
        assert clone.uv_calls()[-1].endswith(f"--offline --no-deps --no-build-isolation -e . -e {plugin}")
        assert clone.run("env.sh") == (0, "", "")


def test_bytecode_is_compiled_where_python_may_not_write_it_later(bare):
    """With PYTHONDONTWRITEBYTECODE the set-up compiles every package."""
    assert bare.run("env.sh", PYTHONDONTWRITEBYTECODE="1")[0] == 0
    assert all("--compile-bytecode" in call for call in bare.uv_calls()[1:])


OLD_READ = 'read() { builtin read "$@"; local code=$?; return $((code > 128 ? 1 : code)); }\n'


@pytest.mark.parametrize("bash", ["3.2", "5"])
def test_a_set_up_reports_while_it_goes_on(bare, bash):
    """It prints the step, its seconds and uv's current download; no process remains when it ends."""
    if bash == "3.2":  # a time-out has the exit code of an end of file
        (bare.root.parent / "old.sh").write_text(OLD_READ)
        bare.environment["BASH_ENV"] = str(bare.root.parent / "old.sh")
    bare.environment["SETUP_REPORT_SECONDS"] = "1"
    process = bare.start_hanging("env.sh")
    (bare.root / ".uv/log").write_text(
        "Resolved 9 packages in 1s\nDownloading torch (527.9MiB)\nDownloading numpy (15.0MiB)\n Downloaded numpy\n"
    )
    while "downloading torch" not in (line := process.stderr.readline()):
        assert line
    assert re.fullmatch(r"  2/3 packages: \d+ s  downloading torch \(527.9MiB\)\n", line)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)  # ends when no process has its stderr open
    assert process.returncode == 143


def test_a_set_up_shows_its_steps_on_a_terminal(bare):
    """A line within the terminal's width is updated in place, and each step leaves one line."""
    leader, follower = os.openpty()
    process = subprocess.Popen(
        ["bash", str(bare.root / "env.sh")],
        env=bare.environment | {"TERM": "xterm"}, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower,
        start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    shown = read_terminal(leader)
    assert process.wait(20) == 0
    text = shown.decode()
    steps = ["1/3 uv, environment", "2/3 packages", "3/3 check of torch"]
    assert re.findall(r"\r\x1b\[K  (\d/3 .*?) +\d+ s\r\n", text) == steps
    assert "The environment is ready after" in text
    assert max(len(part.partition("\r\n")[0]) for part in text.split("\r\x1b[K")[1:]) < 80


def test_a_smaller_download_is_named_where_there_is_no_gpu(bare):
    """There is no note on a machine with NVIDIA's tools, or if TORCH_BACKEND names a build."""
    note = "TORCH_BACKEND=cpu bash env.sh takes the CPU build"
    if not (Path("/proc/driver/nvidia").exists() or Path("/dev/dxg").exists()):
        assert note in bare.run("env.sh")[2]
    shutil.rmtree(bare.root / ".venv", ignore_errors=True)
    (bare.bin / "nvidia-smi").symlink_to("/bin/true")
    assert note not in bare.run("env.sh")[2]
    (bare.bin / "nvidia-smi").unlink()
    assert note not in bare.run("env.sh", TORCH_BACKEND="cpu")[2]


def test_another_torch_build_is_kept(clone):
    """TORCH_BACKEND is passed to uv, without the hashes of the other build; later starts without it keep the build."""
    assert clone.run("env.sh", TORCH_BACKEND="cpu")[0] == 0
    options = "--torch-backend cpu --no-verify-hashes -c requirements.lock -r pyproject.toml --extra dev"
    assert clone.uv_calls()[1].endswith(options)
    assert clone.run("env.sh") == (0, "", "")
    assert clone.run("env.sh", TORCH_BACKEND="cpu") == (0, "", "")


def test_an_unknown_torch_build_is_a_note(clone):
    """A wrong TORCH_BACKEND ends with exit code 3 and the allowed values; the existing environment stays."""
    for word in ("cuda", "cu", "-h", "index url"):
        code, out, err = clone.run("train.sh", TORCH_BACKEND=word)
        assert (code, out) == (3, "")
        assert f"TORCH_BACKEND={word} is not known. It can be cpu, auto, or a CUDA release such as cu128" in err
    assert clone.run("env.sh") == (0, "", "")


def _new_lock(clone):
    with (clone.root / "requirements.lock").open("a") as file:
        file.write("# renewed\n")


def _new_dependency(clone):
    path = clone.root / "pyproject.toml"
    path.write_text(path.read_text().replace('"click>=', '"click>=0'))


def _move(clone):
    clone.root = clone.root.rename(clone.root.with_name("elsewhere"))


def _lose_python(clone):
    (clone.root / ".venv/bin/python").unlink()


def test_an_outdated_environment_is_made_again(clone):
    """Changed requirements, a moved clone and a missing Python cause one set-up at the next start."""
    for change in (_new_lock, _new_dependency, _move, _lose_python):
        change(clone)
        code, _, err = clone.run("train.sh")
        assert (code, "Setting up" in err) == (0, True), change
        assert clone.run("env.sh") == (0, "", "")


def test_settings_of_the_checks_change_no_environment(clone):
    """An edit of the settings of ruff, mypy or pytest causes no set-up."""
    with (clone.root / "pyproject.toml").open("a") as file:
        file.write("# another setting\n")
    assert clone.run("env.sh") == (0, "", "")


def test_two_starts_set_up_once(bare):
    """Of two scripts started together one sets up, and the other reports that it waits."""
    first = bare.start_hanging("env.sh")
    second = bare.start("train.sh")
    assert second.stderr.readline() == "Another start is setting up the environment; waiting for it.\n"
    calls = len(bare.uv_calls())
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert calls == 3
    assert second.communicate(timeout=60)[0].splitlines()[2] == "train"

    _new_lock(bare)
    bare.calls.unlink()
    both = [bare.start("train.sh"), bare.start("train.sh")]
    assert [(process.communicate(timeout=60), process.returncode)[1] for process in both] == [0, 0]
    assert len(bare.uv_calls()) == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_interrupted_set_up_leaves_no_environment(bare, number, code):
    """SIGINT and SIGTERM end the set-up and its uv at once; after them and SIGKILL the next start sets up again."""
    process = bare.start_hanging("train.sh")
    process.send_signal(number) if number == signal.SIGTERM else os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, "")
    assert not (bare.root / ".venv").exists()
    assert number == signal.SIGKILL or not (bare.root / ".uv/new").exists()
    assert "Setting up" in bare.run("env.sh")[2]


def test_a_failed_set_up_keeps_the_environment_there_is(clone):
    """The old environment stays, and the next start tries to set up again."""
    _new_lock(clone)
    code, out, err = clone.run("train.sh", UV_FAILS="-r")
    assert (code, out) == (3, "")
    assert "a package could not be installed. Most often there is no network" in err
    assert "    error: dns error" in err
    assert err.splitlines()[-1] == f"Everything that was said: {clone.root}/.uv/log"
    assert (clone.root / ".venv/bin/python").exists()
    assert "Setting up" in clone.run("env.sh")[2]


@pytest.mark.parametrize(
    ("failure", "notes"),
    [
        ({"UV_SAYS": "No space left on device (os error 28)"}, ["the disk is full"]),
        ({"UV_SAYS": "Hash mismatch for `click`"}, ["a package is not the one that requirements.lock names"]),
        (
            {"UV_FAILS": "", "STUB_TORCHVISION": "RuntimeError: operator torchvision::nms does not exist"},
            ["torch and torchvision come from different builds", "set TORCH_BACKEND=cpu"],
        ),
    ],
    ids=["full disk", "other hash", "other build"],
)
def test_the_note_names_the_reason(bare, failure, notes):
    """Each failure of a set-up has its own note and exit code 3, and leaves no environment."""
    code, _, err = bare.run("train.sh", **{"UV_FAILS": "-r"} | failure)
    assert (code, [note for note in notes if note not in err]) == (3, [])
    assert not (bare.root / ".venv").exists()


@pytest.mark.parametrize("version", ["", pytest.param("0.5.1", marks=pytest.mark.slow)], ids=["no uv", "old uv"])
def test_no_network_and_no_environment_is_a_note(bare, version):
    """Without a package index and a uv that has `--torch-backend`, a start ends with a note and exit code 3."""
    (bare.bin / "uv").write_text(UV.replace("0.13.8", version)) if version else (bare.bin / "uv").unlink()
    code, out, err = bare.run("train.sh", PIP_NO_INDEX="1")
    assert (code, out, bare.uv_calls()) == (3, "", [])
    assert "a package could not be installed. Most often there is no network" in err
    assert "No matching distribution found for uv==" in err
    assert not (bare.root / ".venv").exists()


def test_no_python_is_a_note(bare):
    """If every Python is older than 3.11 the note names the required version."""
    (bare.bin / "python3").unlink()
    (bare.bin / "python3").write_text("#!/usr/bin/env bash\necho /usr/bin/python3; exit 1\n")
    (bare.bin / "python3").chmod(0o755)
    code, _, err = bare.run("train.sh")
    assert (code, "Python 3.11 or newer is needed" in err) == (3, True)


def test_a_newer_python_beside_an_old_one_is_found(bare):
    """A python3.12 is found without a suitable python3."""
    (bare.bin / "python3").rename(bare.bin / "python3.12")
    assert bare.run("env.sh")[0] == 0


def test_a_clone_that_cannot_be_written_is_a_note(bare):
    """A read-only clone without an environment ends with a note and exit code 3."""
    (bare.root / ".uv").touch()  # a file in the way, since root may write anywhere
    code, _, err = bare.run("train.sh")
    note = f"Cannot set up the environment of {bare.root}: nothing can be written there. Make the folder writable, "
    assert (code, err) == (3, f"{note}or clone to one that is.\n")


def _locked() -> list[str]:
    """Return `name==version [; marker]` of every package in requirements.lock."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return [line.removesuffix("\\").strip() for line in lines if re.match(r"\S+==", line)]


def test_the_lock_has_a_hash_for_every_package():
    """Every package of requirements.lock is verified by its hash."""
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements.lock").read_text().strip())
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_conda_env_has_the_versions_of_the_lock():
    """conda_env.yaml installs the packages of requirements.lock, the project and its plug-ins."""
    environment = yaml.safe_load((ROOT / "conda_env.yaml").read_text())
    python, _, pip = environment["dependencies"]
    assert python == "python=3.11"
    plugins = sorted(f"-e plugins/{path.name}" for path in ROOT.glob("plugins/*"))
    assert pip["pip"] == [*_locked(), "-e .", *plugins]


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        pytest.param([], "configs/base.yaml", marks=pytest.mark.slow),
        (["-P", "config=my config.yaml"], "my config.yaml"),
    ],
)
def test_mlflow_run_starts_the_training(bare, arguments, config):
    """`mlflow run . -P config=CFG` runs the command of `train.sh CFG`; without `-P` the config is configs/base.yaml."""
    for name in ["MLproject", "conda_env.yaml"]:
        shutil.copy(ROOT / name, bare.root / name)
    (bare.bin / "python").write_text(PYTHON)
    (bare.bin / "python").chmod(0o755)
    environment = bare.environment | {"MLFLOW_TRACKING_URI": f"sqlite:///{bare.bin}/runs.db"}
    command = [sys.executable, "-m", "mlflow", "run", ".", "--env-manager", "local", *arguments]
    done = subprocess.run(command, cwd=bare.root, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["-m", "deeplightning", "train", config]
