"""Find runs and checkpoints, and load a finished run: its config, its task with the best weights, and its code."""

from __future__ import annotations

import atexit
import contextlib
import logging
import shlex
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deeplightning.config.examine import load_config
from deeplightning.config.own_runs import is_own_code
from deeplightning.config.schema import Config, Engine, defaults
from deeplightning.config.source import is_file, read
from deeplightning.config.tree import line, plain
from deeplightning.config.trust import refuse_links, run_config
from deeplightning.faults import CheckpointError, ConfigError, Fault
from deeplightning.own_code import add_import_roots
from deeplightning.run.assemble import init_module
from deeplightning.runfolder import RunFolder, from_start, start_folder
from deeplightning.tracking import resolve_run
from deeplightning.tracking.build import experiment_of
from deeplightning.tracking.claims import find_run
from deeplightning.tracking.code import read_code, restored, unpack
from deeplightning.tracking.metrics_file import read_lines
from deeplightning.tracking.store import Store, locate
from deeplightning.words import printable

log = logging.getLogger("deeplightning")

CPU_OVERRIDES = [
    *(f"engine.{name}={line(value)}" for name, value in defaults(Engine)),
    *("stages=[predict]", "test.ckpt=last"),  # training's requirements, such as a fused optimizer, may be missing here
]
"""Overrides to use the weights of a run in one CPU process.

They reset every key of the engine, including keys added later: what the run needed (GPUs, processes) may be missing
here, and a compiler, a hook or environment variables could run code from a copied run.
"""


_REPLACEMENTS = {
    "data.module": "{type: deeplightning.data.digits.Digits}",
    "model.loss": "{type: torch.nn.Module}",
    "model.optimizer": "{type: torch.optim.SGD, params: {lr: 0.1}}",
    "model.scheduler": "null",
    "train.callbacks": "[]",
    "logger.extra": "[]",
    "tune": "null",
}
"""Sections that some uses of the weights do not need, with a replacement if one cannot be imported."""


def trained_task(folder: RunFolder, allow: Sequence[str] = (), verb: str = "use") -> tuple[Any, Config, Path]:
    """Return the task of a run with its best weights on the CPU, the run's config, and the checkpoint's path.

    Args:
        allow: modules that the config of a foreign run may name, as in `deeplightning.config.trust.run_config`.
        verb: the command, for messages.

    Raises:
        CheckpointError: there are no weights, or the run is foreign and its config names something not allowed.
    """
    from pytorch_lightning.utilities.seed import isolate_rng

    from deeplightning.engine.checkpoint_reading import load_weights, read_checkpoint, restore_left_out

    cfg = load_run(folder, CPU_OVERRIDES, verb, allow=allow)
    path = checkpoint_of(folder)
    checkpoint = read_checkpoint(path)
    with isolate_rng(include_cuda=False):  # the seed of the run does not affect the caller's random numbers
        task = init_module(cfg, "model")
        is_ours = hasattr(task, "arrives")  # ours build their network from the checkpoint
        if not is_ours:  # Lightning's order
            task.configure_model()
        task.on_load_checkpoint(restore_left_out(checkpoint, task))
        if is_ours:
            task.configure_model()
    own, saved = task.state_dict(), checkpoint["state_dict"]
    for name in [name for name in saved if name.startswith("losses.") and name not in own]:  # of an omitted loss
        del saved[name]
    load_weights(task, checkpoint, path)
    return task.eval(), cfg, path


def load_run(
    folder: RunFolder, overrides: Sequence[str], verb: str, needed: Collection[str] = (), allow: Sequence[str] = ()
) -> Config:
    """Load the config of a run to use its weights.

    Unknown keys, and optional parts that cannot be imported, are left out with a warning.

    Args:
        verb: the command, for messages.
        needed: keys of `_REPLACEMENTS` that this use requires.
        allow: modules that the config of a foreign run may name, as in `deeplightning.config.trust.run_config`.

    Raises:
        ConfigError: the config has other faults.
        CheckpointError: the run is foreign and its config is not plain, or names something not allowed.
    """
    config = run_config(folder, allow, verb)
    refuse_links(folder)
    if not config.is_trusted:
        ignored = ", ".join(text.removeprefix("~") for text in config.left_out() if text.startswith("~"))
        log.info("%s was not made here by you: its %s are ignored", folder.path, ignored)
    left_out: list[str] = []
    while True:
        try:
            return load_config(config, [*overrides, *left_out], beside=False)
        except ConfigError as error:
            instead = [_override_without(fault, needed) for fault in error.faults]
            if None in instead or not set(instead).isdisjoint(left_out):
                raise ConfigError([_with_hint(fault, folder, verb) for fault in error.faults]) from error
            for fault, override in zip(error.faults, instead, strict=True):
                key, what = printable(str(fault.key)), fault.message.partition(". ")[0]
                log.warning("%s: %s; %s ignores it", key, what, verb)
                left_out.append(str(override))


def _override_without(fault: Fault, needed: Collection[str]) -> str | None:
    """Return the override that removes a fault from a run's config when only its weights are needed, or None."""
    key = fault.key or ""
    if (fault.place or "").startswith("override"):
        return None
    if fault.message.startswith("unknown key."):
        return None if "=" in key or is_file(f"~{key}") else f"~{key}"  # `~/x.yaml` would be a further config
    spare = next((name for name in _REPLACEMENTS if f"{key}.".startswith(f"{name}.")), None)
    if spare is None or spare in needed or not _is_code_missing(fault):
        return None
    return f"{spare if _REPLACEMENTS[spare] in ('null', '[]') else key.removesuffix('.type')}={_REPLACEMENTS[spare]}"


def _is_code_missing(fault: Fault) -> bool:
    """Return whether a fault is a missing or broken module or plug-in, or a different one with the same name."""
    is_other = "` was read from " in fault.message or "` is a plug-in: " in fault.message
    return is_other or fault.message.startswith(("there is no module ", "importing "))


def _with_hint(fault: Fault, folder: RunFolder, verb: str) -> Fault:
    if not folder.code.is_file() or not _is_code_missing(fault):
        return fault
    verb = verb if verb in ("test", "predict") else "export"
    hint = f"The run kept its code: deeplightning {verb} {shlex.quote(str(folder.path))} --code run uses it"
    return replace(fault, message=f"{fault.message} {hint}")


def use_code(folder: RunFolder, allow: Sequence[str] = ()) -> None:
    """Import modules from the code that a run stored, before any others.

    Args:
        allow: modules that a foreign run may execute.

    Raises:
        CheckpointError: the run stored no code, or it is foreign and not all of its modules are allowed.
    """
    if not folder.code.is_file():
        raise CheckpointError(f"{folder.path}: this run kept no code ({folder.code.name})")
    code = read_code(folder.code)
    names = ", ".join(sorted(code.names()))
    tops = {path.partition("/")[0].removesuffix(".py") for _, path in code.files}
    if not is_own_code(folder) and (asked := sorted(tops.difference(allow))):
        options = " ".join(f"--allow {top}" for top in asked)
        raise CheckpointError(
            f"{folder.code}: you did not make this code, as it is now, on this machine, and it would be executed: "
            f"{names}. If you trust it: {options}"
        )
    into = Path(tempfile.mkdtemp(prefix="deeplightning-code-"))
    atexit.register(shutil.rmtree, into, ignore_errors=True)
    secrets = read(run_config(folder, allow, "use")).secrets.values
    add_import_roots(*unpack(code, into, lambda content: restored(content, {n: value for value, n in secrets.items()})))
    log.warning("using the code that the run stored, from %s: %s", folder.code, printable(names) or "none")
    for where in code.concealed:
        log.warning("at %s a secret was left out of the kept code; *** replaces it", where)


def find_checkpoint(name: str, cfg: Config, to_resume: bool = False) -> Path:
    """Return the checkpoint file for a name: a path, a RUN, or `last` or `best` of the experiment's latest run.

    For a RUN it is the best checkpoint, or the last one if training is to resume.

    Raises:
        CheckpointError: no run or checkpoint has this name.
    """
    if name in ("auto", "last", "best"):
        file = "best.ckpt" if name == "best" else "last.ckpt"
        for folder in runs_of(cfg):
            if (folder.path / file).is_file():
                return folder.path / file
        raise CheckpointError(f"{name}: no run of this experiment in {store_of(cfg).shown} has a {file}")
    path = from_start(name)
    if path.is_file() or path.suffix == ".ckpt":
        if not path.exists():
            raise CheckpointError(f"{path}: there is no such checkpoint")
        return path
    folder = RunFolder(resolve_run(name, cfg.logger.params.get("tracking_uri")))
    return folder.last if to_resume and folder.last.exists() else checkpoint_of(folder)


def runs_of(cfg: Config, wanted: Callable[[Path], bool] = lambda folder: True) -> Iterator[RunFolder]:
    """Yield the runs of the config's experiment and store that have a config, the latest first.

    Runs that were deleted in MLflow are left out.

    Args:
        wanted: filters by the run's folder, before the run's experiment is looked up.

    Raises:
        SetupError: the store cannot be read.
    """
    store = store_of(cfg)
    root = store.artifact_root
    # With a tracking server, run folders are below the start folder.
    paths = root.glob("*/*/artifacts/cfg.yaml") if root else (start_folder() / "runs").glob("*/cfg.yaml")
    # By start time: a resumed run starts with the checkpoints of the earlier one.
    started = sorted(((*_started(path), path) for path in paths), reverse=True)
    ours = experiment_of(cfg.logger.type, cfg.logger.params)
    for *_, path in started:
        if wanted(path.parent) and _experiment(store, path) == ours:
            yield RunFolder(path.parent)


def _started(config: Path) -> tuple[int, int]:
    """Return when a run started, in ms, by the first line of its metrics, and the file's time, which a copy loses."""
    changed = config.stat().st_mtime_ns
    started, metrics = None, RunFolder(config.parent).metrics
    with contextlib.suppress(OSError, AttributeError):  # a damaged file must not hide the other runs
        if metrics.is_file():
            started = next((line for _, line in read_lines(metrics)), {}).get("run", {}).get("started")
    return (started if isinstance(started, int) and started else changed // 1_000_000), changed


def store_of(cfg: Config) -> Store:
    return locate(cfg.logger.params.get("tracking_uri"))


def _experiment(store: Store, config: Path) -> str | None:
    """Return the current name of a run's experiment; None if the run was deleted, or the name is unknown."""
    run = find_run(store, config.parts[-3]) if store.database is not None else None
    if run is not None:
        return run.experiment if run.is_active else None
    try:
        logger = plain(read(run_config(RunFolder(config.parent))).root)["logger"]
        return experiment_of(logger["type"], logger["params"])
    except (ConfigError, CheckpointError, KeyError, TypeError):  # from another tool, damaged, or foreign and not plain
        return None


def checkpoint_of(folder: RunFolder) -> Path:
    """Return the best checkpoint of a run, else the last; raise a CheckpointError if there is neither."""
    for path in (folder.best, folder.last):
        if path.exists():
            return path
    others = ", ".join(sorted(path.name for path in folder.path.glob("*.ckpt"))) or "no checkpoint"
    raise CheckpointError(
        f"{folder.path}: there is neither {folder.best.name} nor {folder.last.name} in this folder; it holds {others}"
    )
