"""Reproduce a finished run from its recorded config, code and data, and compare the results.

`reproduce` puts config and code into a clean folder and trains there in a separate process. It executes nothing of a
run before it has listed the code to be run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deeplightning.config.own_runs import is_own_code
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.faults import CheckpointError, RunError, SetupError
from deeplightning.own_code import ROOTS
from deeplightning.process.identity import require_single_process
from deeplightning.process.terminal import say_path
from deeplightning.reproduce.differences import PATH_KEYS, compare
from deeplightning.reproduce.past import PastRun, flat, past_run
from deeplightning.runfolder import RunFolder, from_start
from deeplightning.tracking.code import Code, restored, unpack
from deeplightning.tracking.datafiles import changes, describe_again
from deeplightning.tracking.environment import REPRODUCES, VARIABLES
from deeplightning.tracking.store import locate
from deeplightning.words import is_address

MAX_LISTED = 10
"""Maximum number of files that a message lists."""

_KEPT_VARIABLES = {"DEEPLIGHTNING_CACHE", "DEEPLIGHTNING_CACHE_LIMIT", "DEEPLIGHTNING_MEET_SECONDS"}
_KEPT_VARIABLES |= {"DEEPLIGHTNING_TRACKING_WAIT", "DEEPLIGHTNING_TRACKING_DRAIN", "DEEPLIGHTNING_DEBUG"}
_MACHINE_VARIABLES = ("CUDA_VISIBLE_DEVICES",)  # a scheduler sets it

Say = Callable[[str], None]


@dataclass
class Plan:
    """The training to be started."""

    config: Path
    overrides: list[str]  # for data and tracker on this machine
    directory: Path  # the working directory
    variables: dict[str, str]  # the complete environment


def reproduce(
    run: str,
    overrides: Sequence[str] = (),
    *,
    any_data: bool = False,
    trust: bool = False,
    say: Say,
    start: Callable[[Plan], tuple[int, Path | None]] | None = None,
) -> RunFolder:
    """Reproduce a run as a new run of its experiment, and compare metrics, results and weights. The last line on stdout
    is the new run's folder.

    Args:
        run: RUN, as in `resolve_run`.
        overrides: `key=value`, such as the current location of the data.
        any_data: accept data files that have changed.
        trust: accept a run that this user did not make on this machine.
        say: receives messages for the user.
        start: runs a plan; returns its exit code and the run's folder. None: start a separate process.

    Returns:
        The new run's folder.

    Raises:
        CheckpointError: there is no such run, it kept no config or code, or it is untrusted.
        SetupError: the data have changed, or this process is one of several.
        RunError: the results differ; the message names the first difference.
        SystemExit: the new run failed; with its exit code.
    """
    require_single_process("reproduce")
    original = to_execute(run, trust)
    with tempfile.TemporaryDirectory(prefix="deeplightning-reproduce-", ignore_cleanup_errors=True) as top:
        plan = prepare(original, Path(top), overrides, any_data, say)
        code, folder = (start or _train_in_subprocess)(plan)
        if folder is None or (code != 0 and original.status not in ("FAILED", "KILLED")):
            say(f"the run could not be reproduced: the new one ended with exit code {code}")
            if folder is not None:
                say_path(folder, "Artifact storage path: ")
            raise SystemExit(code or 1)
        again = past_run(str(folder))
        found = compare(original, again, say)
        if Path(top).resolve() in folder.resolve().parents:  # a logger that writes into the working directory
            kept = Path.cwd() / "runs" / folder.name
            kept = kept.with_name(f"{kept.name}-{top[-8:]}") if kept.exists() else kept
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(folder, kept)  # which may be on another file system
            again = PastRun(RunFolder(kept), again.store, again.run_id)
    say_path(again.folder.path, "Artifact storage path: ")
    if found:
        raise RunError(
            f"{again.folder.path} does not agree with {original.folder.path}: first difference: {found[0]}"
            + (f" ({len(found) - 1} more: {'; '.join(found[1:6])})" if len(found) > 1 else "")
            + f". `deeplightning diff {shlex.quote(str(original))} {shlex.quote(str(again))}` shows what else differs"
        )
    return again.folder


def to_execute(run: str, trust: bool) -> PastRun:
    """Return RUN, after checking that its code may be executed.

    Raises:
        CheckpointError: there is no such run, it kept no config or code, or it is untrusted.
    """
    original = past_run(run, trust=trust)
    original.source  # noqa: B018  (raises if the config is missing)
    folder, code = original.folder, original.code
    if code is None:
        raise CheckpointError(
            f"{folder.path}: this run kept no code ({folder.code.name}). `deeplightning train "
            f"{shlex.quote(str(folder.config))}` trains its config with the current code"
        )
    if not trust and not is_own_code(folder):
        names = ", ".join(sorted(code.names())) or "none"
        raise CheckpointError(
            f"{folder.path}: you did not make this run, as it is now, on this machine. What its {folder.config.name} "
            f"names would be imported, and these files of {folder.code.name} would be executed: {names}. If you trust "
            "all of it: --trust"
        )
    return original


def prepare(original: PastRun, top: Path, overrides: Sequence[str], any_data: bool, say: Say) -> Plan:
    """Put config and code of a run that kept both into a folder, and report what differs on this machine.

    Raises:
        SetupError: the data have changed.
    """
    source, code = read(original.source, list(overrides)), original.code
    assert code is not None
    config = dict(flat(plain(source.root)))
    own = top / "config" / "cfg.yaml"
    own.parent.mkdir(parents=True)
    own.write_text(original.source.text, encoding="utf-8", newline="")
    secrets = {expression: value for value, expression in source.secrets.values.items()}
    directory, roots = _unpack_code(code, original.folder.code, top, secrets, say)
    settings = [*_local_overrides(original, config, overrides, top), *overrides]
    root = dict(flat(plain(read(original.source, settings).root))).get("data.root")
    is_given = any(text.partition("=")[0].strip() == "model.init_from" for text in overrides)
    weights, folders = config.get("model.init_from"), [None if is_given else original.directory, Path.cwd()]
    if isinstance(weights, str) and not is_address(weights):
        found = [path for folder in folders if folder and (path := folder / Path(weights).expanduser()).exists()]
        settings += [f"model.init_from={quoted(path.absolute())}" for path in found[:1]]
    if isinstance(root, str) and not is_address(root):  # the run starts in another folder
        settings.append(f"data.root={quoted(str(from_start(root)))}")
    check_data(original, root if isinstance(root, str) else None, any_data, say)
    _link_relative_files(original, config, directory)
    return Plan(own, settings, directory, _variables(original, roots))


def _unpack_code(code: Code, file: Path, top: Path, secrets: Mapping[str, str], say: Say) -> tuple[Path, list[Path]]:
    """Unpack the code of a file; return the working directory and the other import roots."""
    roots = unpack(code, top / "code", lambda content: restored(content, secrets))
    directory = top / "work"
    if code.working_directory in code.roots:
        directory = roots.pop(code.roots.index(code.working_directory))
    directory.mkdir(exist_ok=True)
    if code.files:
        names = sorted(code.names())
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        say(f"code: what will be run from {file}: {', '.join(names[:MAX_LISTED])}{more}")
    for where in code.concealed:
        say(f"warning: at {where} a secret was left out of the kept code; *** replaces it")
    for path, why in list(code.left_out.items())[:MAX_LISTED]:
        say(f"warning: not kept with the code: {path} ({why})")
    return directory, roots


def _local_overrides(original: PastRun, config: Mapping[str, object], overrides: Sequence[str], top: Path) -> list[str]:
    """Return overrides that give the config its original meaning on this machine."""
    found = []
    given = {re.split(r"[=~]", text.lstrip("~+"), maxsplit=1)[0] for text in overrides}
    root = config.get("data.root")
    if isinstance(root, str) and not is_address(root) and not Path(root).expanduser().is_absolute():
        found += [] if "data.root" in given else [f"data.root={quoted(resolve_data_root(original, root))}"]
    if str(config.get("logger.type", "deeplightning.tracking.MLflowLogger")).lower().endswith("mlflowlogger"):
        if "logger.params.tracking_uri" not in given:
            found.append(f"logger.params.tracking_uri={quoted(address_of(original))}")
        if config.get("logger.params.run_id") is not None:
            found.append("~logger.params.run_id")
    start = config.get("train.resume_ckpt")
    if isinstance(start, str) and "train.resume_ckpt" not in given:
        # Link it under a name that no checkpoint of a run has, so that it starts a new run instead of resuming one.
        path = Path(start)
        (top / "start.ckpt").symlink_to(path)
        if (pieces := path.with_suffix(".pieces")).exists():
            (top / "start.pieces").symlink_to(pieces)
        if not path.exists():
            raise CheckpointError(
                f"{original}: the run began from {path}, which no longer exists. Set another: train.resume_ckpt=PATH"
            )
        found.append(f"train.resume_ckpt={quoted(top / 'start.ckpt')}")
    return found


def resolve_data_root(original: PastRun, path: str) -> Path:
    """Resolve `data.root`: the recorded path if it exists, else relative to the run's directory or the current one."""
    data = original.data
    if data is not None and data["root"] and Path(data["root"]).exists():
        return Path(data["root"])
    candidates = [folder / path for folder in (original.directory, Path.cwd()) if folder is not None]
    return next((each for each in candidates if each.exists()), candidates[0])


def address_of(original: PastRun) -> str:
    """Return the address of the new run's store: that of the original or, if unknown, of its config."""
    recorded = dict(flat(plain(read(original.source).root))).get("logger.params.tracking_uri")
    store = original.store or locate(None if recorded is None or "${" in str(recorded) else str(recorded))
    if store.address is not None:
        return store.address
    if store.database is not None and store.database.name != "mlflow.db":
        return f"sqlite:///{store.database}"
    return str(store.folder)


def check_data(original: PastRun, root: str | None, any_data: bool, say: Say) -> None:
    """Compare the current data with those of a run.

    Args:
        root: current `data.root`.
        any_data: report changes instead of raising.

    Raises:
        SetupError: the data have changed.
    """
    before = original.data
    if before is None:
        return
    changed = [f"{name}: {what}" for name, what in changes(before, describe_again(before, root)).items()]
    if before["incomplete"]:
        say(f"warning: data: {before['incomplete']}")
    if not changed:
        return
    more = [f"and {len(changed) - MAX_LISTED} more"] if len(changed) > MAX_LISTED else []
    note = f"the data are not those of {original}: {'; '.join([*changed[:MAX_LISTED], *more])}"
    if not any_data:
        raise SetupError(
            f"{note}. They were looked for in {root or before['root']}; data.root=FOLDER sets another location, and "
            "--any-data trains with the changed data"
        )
    say(f"warning: {note}")


def _link_relative_files(original: PastRun, config: Mapping[str, object], directory: Path) -> None:
    """Link files with relative paths in params into the new working directory."""
    for key, value in config.items():
        is_wanted = (".params." in key and key not in PATH_KEYS) or key == "test.ckpt"
        if not is_wanted or not isinstance(value, str) or not 0 < len(value) < 256:
            continue
        parts = Path(value).parts
        if not parts or Path(value).is_absolute() or ".." in parts or "~" in value or "://" in value:
            continue
        for folder in (original.directory, Path.cwd()):
            if folder is not None and (folder / value).exists() and not (directory / parts[0]).exists():
                (directory / parts[0]).symlink_to(folder / parts[0])
                break


def _variables(original: PastRun, roots: Iterable[Path]) -> dict[str, str]:
    """Return this process's environment without launch variables, and with recorded variables that affect results."""
    kept = [name for name in os.environ if not name.startswith("DEEPLIGHTNING_") or name in _KEPT_VARIABLES]
    found = {name: os.environ[name] for name in kept}
    for name in ("MLFLOW_RUN_ID", "PYTHONSAFEPATH"):
        found.pop(name, None)
    ours = str(Path(__file__).resolve().parents[2])
    paths = [os.path.abspath(entry or ".") for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)]  # noqa: PTH100
    # Folders of installed packages, for example from `pip install --target`.
    installed = [p for p in paths if re.search("(site|dist)-packages", p) or any(Path(p).glob("*.dist-info"))]
    own = [ours] if ours in (*paths, os.getcwd()) else []  # noqa: PTH109
    found["PYTHONPATH"] = os.pathsep.join([*installed, *own])
    found[ROOTS] = json.dumps([*map(str, roots)])
    recorded = original.environment.get("variables")
    if isinstance(recorded, dict):
        for name in VARIABLES:
            value = recorded.get(name)
            if name not in _MACHINE_VARIABLES:
                found.pop(name, None)
                if isinstance(value, str) and re.fullmatch(r"[\w:,.=+-]{0,64}", value):
                    found[name] = value
        threads = original.environment.get("threads")
        if isinstance(threads, int) and threads > 0:
            found.setdefault("OMP_NUM_THREADS", str(threads))
    return found | {REPRODUCES: str(original)}


def _train_in_subprocess(plan: Plan) -> tuple[int, Path | None]:
    """Train in a separate process, and forward its output and SIGTERM."""
    command = [sys.executable, "-m", "deeplightning", "train", str(plan.config), *plan.overrides]
    process = subprocess.Popen(command, cwd=plan.directory, env=plan.variables, stdout=subprocess.PIPE)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # both processes get it
    terminate = signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    last, folder = b"Artifact storage path: ", None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(last):
                folder = Path(os.fsdecode(line.removeprefix(last).rstrip(b"\n")))
                continue  # the folder may still be moved; it is printed at the end
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)
        if process.poll() is None:
            process.kill()
            process.wait()
    return (code if code >= 0 else 128 - code), folder


def quoted(value: object) -> str:
    return "'" + str(value).replace("'", "''") + "'"
