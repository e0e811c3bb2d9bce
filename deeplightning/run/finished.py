"""What a run has left is found again: where training goes on, its weights, its task, and the bundle made of them."""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.checks.examine import load_config
from deeplightning.checks.trust import admit, is_own_code
from deeplightning.config.schema import Config, Engine, defaults
from deeplightning.config.source import read
from deeplightning.config.tree import as_written, dump, line, plain
from deeplightning.faults import CheckpointError, ConfigError, Fault
from deeplightning.own_code import add_import_roots
from deeplightning.process.decisions import decided
from deeplightning.process.identity import own_rank, place
from deeplightning.process.supervisor import restarts
from deeplightning.run.assemble import init_module
from deeplightning.runfolder import RunFolder, permissions_of
from deeplightning.tracking import resolve_run
from deeplightning.tracking.build import experiment_of
from deeplightning.tracking.code import read_code, restored, unpack
from deeplightning.tracking.store import Store, locate
from deeplightning.version import __version__

if TYPE_CHECKING:
    from deeplightning.callbacks.record import Resumption

log = logging.getLogger("deeplightning")

SAMPLES = 16  # validation images kept in the run folder, to prove an export with
TO_ANSWER = [
    *(f"engine.{name}={line(value)}" for name, value in defaults(Engine)),
    *("stages=[predict]", "test.ckpt=last"),  # what training needs, such as a fused optimizer, may be missing here
]
"""Overrides with which one CPU process uses the weights of a run.

They reset every key of the engine, so that a key added later is reset too: what the run needed (GPUs, processes) may
be missing here, and a compiler, a hook or environment variables could run code that a copied run brings.
"""

_SPARE = {
    "data.module": "{type: deeplightning.data.digits.Digits}",
    "model.loss": "{type: torch.nn.Module}",
    "model.optimizer": "{type: torch.optim.SGD, params: {lr: 0.1}}",
    "model.scheduler": "null",
    "train.callbacks": "[]",
    "logger.extra": "[]",
    "tune": "null",
}
"""Sections that some uses of the weights do not need, and what replaces one in the config if it is gone."""


def resumption(cfg: Config) -> Resumption:
    """Where `train.resume_ckpt` says that training goes on, and whether in the same run.

    Rank 0 decides, and processes that it starts are told the checkpoint; others find it themselves. Which run goes on
    concerns rank 0 alone.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged; `auto` takes another instead.
        SetupError: the tracking store cannot be asked.
    """
    from deeplightning.callbacks.record import Resumption

    found: dict[str, Resumption] = {}

    def decide() -> str | None:
        found["ours"] = _decide(cfg)
        return str(found["ours"].checkpoint) if found["ours"].checkpoint else None

    path = decided("train.resume_ckpt", decide)
    return found.get("ours") or Resumption(checkpoint=Path(path) if path else None)


def _decide(cfg: Config) -> Resumption:
    from deeplightning.callbacks.record import Resumption
    from deeplightning.engine.checkpoint_io import read_checkpoint

    name = cfg.train.resume_ckpt
    if (found := _of_launch(cfg)) is not None:
        return found
    if name is None:
        return Resumption()
    if name == "auto":
        return _newest_whole(cfg)
    path = find_checkpoint(name, cfg, to_go_on=True)
    assert path is not None
    try:
        checkpoint = read_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. The newest whole checkpoint: train.resume_ckpt=auto") from None
    return _from(path, checkpoint, cfg)


def _newest_whole(cfg: Config) -> Resumption:
    """What `auto` means: the newest checkpoint that can be read; a run that ended before its first begins again."""
    from deeplightning.callbacks.record import Resumption
    from deeplightning.engine.checkpoint_io import read_checkpoint

    empty = None
    for folder in _runs_of(cfg):
        for path in folder.checkpoints():
            try:
                checkpoint = read_checkpoint(path)
            except CheckpointError as error:
                log.warning("resumes    not this one: %s", error)
            else:
                return _from(path, checkpoint, cfg)
        if empty is None and not folder.checkpoints() and _is_same(cfg, folder):
            empty = folder
    if own_rank() == 0 and empty is not None and (hold := empty.hold()) is not None:
        run_id = empty.path.parent.name
        if not _refusal(cfg, run_id, empty.path):
            note = f"resumes    nothing: the run {run_id} ended before its first checkpoint, and begins again"
            return Resumption(run_id=run_id, folder=empty.path, hold=hold, notes=[note])
        hold.release()
    return Resumption(notes=[f"resumes    nothing: there is no run of this experiment in {_store(cfg).shown} yet"])


def _of_launch(cfg: Config) -> Resumption | None:
    """Where a launch that has been started again goes on: in its run, from the newest whole checkpoint.

    None: it has opened no run yet, or is new, or it cannot be known.
    """
    from deeplightning.callbacks.record import Resumption
    from deeplightning.engine.checkpoint_io import read_checkpoint

    here = place()
    if here is None or here.launch is None or not here.goes_on:
        return None
    words = f'"launch": {json.dumps(here.launch)}'
    folder = next((f for f in _runs_of(cfg, lambda path: words in _text(RunFolder(path).environment))), None)
    if folder is None or (restarts() == 0 and _has_finished(cfg, folder)):
        return None  # a finished job's id is used for another
    for path in folder.checkpoints():
        try:
            return replace(_from(path, read_checkpoint(path), cfg), over="")  # the stages after training remain
        except CheckpointError as error:
            log.warning("resumes    not this one: %s", error)
    hold = folder.hold() if own_rank() == 0 else None
    return Resumption(
        run_id=folder.path.parent.name,
        folder=folder.path,
        hold=hold,
        notes=[f"resumes    {folder.path}, from the start"],
    )


def _has_finished(cfg: Config, folder: RunFolder) -> bool:
    from deeplightning.tracking.open import open_tracker

    run_id = folder.path.parent.name
    tracker = open_tracker(_store(cfg), run_id)
    try:
        run = tracker.run(run_id)
    finally:
        tracker.close()
    return run is not None and run.status == "FINISHED"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _from(path: Path, checkpoint: Mapping[str, Any], cfg: Config) -> Resumption:
    """Training goes on from a checkpoint: in its run where that is possible.

    Raises:
        CheckpointError: the checkpoint is of another optimizer, whose state says nothing to the config's; or what it
            says of its run is damaged.
    """
    from deeplightning.callbacks.record import Resumption
    from deeplightning.engine.checkpoint_io import read_checkpoint

    _raise_for_oddities(path, checkpoint)
    theirs = ((checkpoint.get("config") or {}).get("model") or {}).get("optimizer")
    ours = cfg.public()["model"]["optimizer"]
    if theirs is not None and _types(theirs) != _types(ours):
        raise CheckpointError(
            f"{path}: of another optimizer: model.optimizer.type was {_types(theirs)} and is {_types(ours)}; "
            f"go on with that, or start again from the weights: model.init_from='{path}'"
        )
    moved = (checkpoint.get("run") or {}).get("folder") != str(path.parent)
    over = _over(checkpoint, cfg) if moved else ""
    if own_rank() != 0:
        return Resumption(path, over=over)
    folder, run_id = RunFolder(path.parent), (checkpoint.get("run") or {}).get("id")
    position = f"step {checkpoint['global_step']}, epoch {checkpoint['epoch'] + 1}"
    why, hold = None, None
    if run_id is None:
        why = "the checkpoint names no run"
    elif path.name not in [known.name for known in folder.checkpoints()]:
        why = f"{path.name} is no name of a checkpoint of ours"
    elif path != folder.last and folder.last.is_file():
        try:
            if read_checkpoint(folder.last)["global_step"] > checkpoint["global_step"]:
                why = f"{folder.last.name} goes further"
        except CheckpointError:
            pass  # then this is how far the run has come
    why = why or _refusal(cfg, str(run_id), path.parent)
    if why is None and (hold := folder.hold()) is None:
        why = f"a process is at work on the run {run_id}"
    notes = [f"resumes    {path} ({position})", f"run        {f'its own: {why}' if why else f'{run_id} goes on'}"]
    inexact = _inexact(checkpoint, cfg)
    if why:
        if over:
            stages = " and ".join(stage for stage in cfg.stages if stage != "train")
            notes.append(f"training   has finished: {over}; only {stages} will run")
            inexact = ""  # no training is left to differ
        return Resumption(path, notes=notes, inexact=inexact, over=over)
    owed = checkpoint.get("points") or []
    return Resumption(path, run_id, path.parent, owed, hold, notes, inexact)


def _over(checkpoint: Mapping[str, Any], cfg: Config) -> str:
    """Why the training that a config asks for has nothing to add to a checkpoint; "": it has."""
    train, loops = cfg.train, checkpoint.get("loops") or {}
    epochs = ((loops.get("fit_loop") or {}).get("epoch_progress") or {}).get("current", {}).get("processed", 0)
    steps = checkpoint["global_step"]
    if train.num_epochs is not None and epochs >= train.num_epochs:
        return f"it has seen {epochs} epochs, and train.num_epochs is {train.num_epochs}"
    if train.max_steps is not None and steps >= train.max_steps:
        return f"it has taken {steps} steps, and train.max_steps is {train.max_steps}"
    if (stop := train.early_stop) is None:
        return ""
    for key, state in (checkpoint.get("callbacks") or {}).items():
        if key.startswith(f"EarlyStopping{{'monitor': {stop.metric!r},") and state["wait_count"] >= stop.patience:
            return f"{stop.metric} has got no better {state['wait_count']} times, which ended its training"
    return ""


def _types(optimizers: Any) -> str:
    """The class of the optimizer that a config names, or of each."""
    named = optimizers if isinstance(optimizers, Mapping) else {}
    if "type" in named:
        return str(named["type"])
    return ", ".join(str(o.get("type")) if isinstance(o, Mapping) else str(o) for o in named.values()) or "none"


def _raise_for_oddities(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Checks what training needs of a checkpoint in order to resume.

    Raises:
        CheckpointError: names the first key that is missing or wrong.
    """
    odd = next((key for key in ("global_step", "epoch") if not isinstance(checkpoint.get(key), int)), None)
    config = checkpoint.get("config") or {}
    odd = odd or next((f"config.{k}" for k in ("data", "model", "train") if not _is_dict(config.get(k, {}))), None)
    run_id = (checkpoint.get("run") or {}).get("id")
    if not isinstance(run_id, str | None):
        odd = odd or "run.id"
    if not all(_is_point(point) for point in checkpoint.get("points") or ()):
        odd = odd or "points"
    if odd is not None:
        raise CheckpointError(
            f"{path}: damaged, or not written by Deep Lightning: `{odd}` is missing or no value that it may have; "
            f"take another checkpoint, or start again from the weights: model.init_from='{path}'"
        )


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_point(point: Any) -> bool:
    """Whether it is (name, value, time, step)."""
    if not isinstance(point, list | tuple) or len(point) != 4:
        return False
    name, value, moment, step = point
    return (
        isinstance(name, str) and isinstance(value, int | float) and isinstance(moment, int) and isinstance(step, int)
    )


def _refusal(cfg: Config, run_id: str, folder: Path) -> str | None:
    from deeplightning.tracking.build import refusal

    return refusal(cfg.logger.type, cfg.logger.params, run_id, folder)


def _is_same(cfg: Config, folder: RunFolder) -> bool:
    """Whether a run was started with the same config, but for what it goes on from and its stages."""
    theirs, ours = as_written(read(folder.config).root), cfg.public()
    if theirs["train"]["resume_ckpt"] is not None:
        return False
    ours["train"]["resume_ckpt"] = None
    return dump(theirs | {"stages": None}) == dump(ours | {"stages": None})


def _inexact(checkpoint: Mapping[str, Any], cfg: Config) -> str:
    """Why a run that goes on from a checkpoint will not end bit for bit like an uninterrupted one; "": it will."""
    from deeplightning.callbacks.record import engine_of, versions

    reasons = []
    for section, ours, why in (
        ("engine", engine_of(cfg), "numbers are added in another order or rounded otherwise"),
        ("versions", versions(), "other code computes"),
    ):
        theirs = checkpoint.get(section, ours)
        changed = [f"{name} {theirs.get(name)} → {value}" for name, value in ours.items() if theirs.get(name) != value]
        reasons += [f"{section} {', '.join(changed)} ({why})"] if changed else []
    theirs, ours = dict(_learning(checkpoint.get("config") or cfg.public())), dict(_learning(cfg.public()))
    changed = [
        f"{key} {theirs.get(key)} → {ours.get(key)}" for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        reasons.append(f"{', '.join(changed[:3])}{more} (something else is learned)")
    if checkpoint.get("accumulating"):
        reasons.append("the checkpoint is of the middle of an accumulation (its gradients are lost)")
    if cfg.engine.gpus is not None and not cfg.engine.deterministic:
        reasons.append("engine.deterministic is false (kernels of a GPU add in any order)")
    return "; ".join(reasons)


def _learning(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What of a config decides over each step, by its key."""
    train = {
        key: settings.get("train", {}).get(key) for key in ("accumulator_epoch", "accumulator_factor", "gradient_clip")
    }
    for section, values in {
        "data": settings.get("data", {}),
        "model": settings.get("model", {}),
        "train": train,
    }.items():
        for key, value in values.items():
            if (section, key) not in (("data", "num_workers"), ("data", "root")):
                yield f"{section}.{key}", value
    yield "seed", settings.get("seed")


def agreement(cfg: Config, goes_on: Resumption | None) -> dict[str, str]:
    """What of a run must be the same on all of its machines, by key: what decides over each step, the engine, and the
    checkpoint that training goes on from."""
    from deeplightning.callbacks.record import engine_of

    settings = dict(_learning(cfg.public())) | {f"engine.{name}": value for name, value in engine_of(cfg).items()}
    settings |= {"stages": cfg.stages, "the checkpoint to go on from": goes_on and goes_on.named}
    del settings["engine.processes"]  # those of one machine are compared
    return {key: str(value) for key, value in settings.items()}


def find_checkpoint(name: str | None, cfg: Config, to_go_on: bool = False) -> Path | None:
    """The checkpoint file that a config names: a path, RUN, or `last`, `best` of the experiment's newest run.

    Of a RUN it is the best, or the last where training is `to_go_on`.

    Raises:
        CheckpointError: there is none.
    """
    if name is None:
        return None
    if name in ("auto", "last", "best"):
        file = "best.ckpt" if name == "best" else "last.ckpt"
        for folder in _runs_of(cfg):
            if (folder.path / file).is_file():
                return folder.path / file
        raise CheckpointError(f"{name}: no run of this experiment in {_store(cfg).shown} has a {file}")
    path = Path(name).expanduser()
    if path.is_file() or path.suffix == ".ckpt":
        if not path.exists():
            raise CheckpointError(f"{path}: there is no such checkpoint")
        return path.absolute()
    folder = RunFolder(resolve_run(name, cfg.logger.params.get("tracking_uri")))
    return folder.last if to_go_on and folder.last.exists() else checkpoint_of(folder)


def _runs_of(cfg: Config, wanted: Callable[[Path], bool] = lambda folder: True) -> list[RunFolder]:
    """The runs of the config's experiment and store that have a config, the one that began last first.

    Args:
        wanted: looks at a run's folder, before its config is read.
    """
    root = _store(cfg).artifact_root
    # Runs that a server keeps have their folders where the launch was.
    paths = root.glob("*/*/artifacts/cfg.yaml") if root else Path("runs").glob("*/cfg.yaml")
    # By the start of the run: a resumed one begins with the checkpoints of its forerunner.
    begun = sorted(((path.stat().st_mtime_ns, path) for path in paths), reverse=True)
    ours = experiment_of(cfg.logger.type, cfg.logger.params)
    return [RunFolder(path.parent) for _, path in begun if wanted(path.parent) and _experiment(path) == ours]


def _store(cfg: Config) -> Store:
    return locate(cfg.logger.params.get("tracking_uri"))


def _experiment(config: Path) -> str | None:
    try:
        logger = plain(read(config).root)["logger"]
        return experiment_of(logger["type"], logger["params"])
    except (ConfigError, KeyError, TypeError):  # not ours, or damaged
        return None


MANY = 10  # files that a note lists


def checkpoint_of(folder: RunFolder) -> Path:
    """The best checkpoint of a run, else the last."""
    for path in (folder.best, folder.last):
        if path.exists():
            return path
    others = sorted(path.name for path in folder.path.glob("*.ckpt"))
    more = f" and {len(others) - MANY} more" if len(others) > MANY else ""
    there = f"; it holds {', '.join(others[:MANY])}{more}: name one of these files" if others else ""
    raise CheckpointError(
        f"{folder.path}: there is neither {folder.best.name} nor {folder.last.name} in this folder{there}"
    )


def trained_task(folder: RunFolder, allow: Sequence[str] = (), verb: str = "use") -> tuple[Any, Config, Path]:
    """The task of a run with its best weights, on the CPU, its config, and the checkpoint's path.

    Args:
        allow: modules that the config of a foreign run may name, as `deeplightning.checks.trust.admit` takes them.
        verb: what the run is asked for.

    Raises:
        CheckpointError: there are no weights, or the run is foreign and its config names what may not be built.
    """
    from deeplightning.engine.checkpoint_io import load_weights, read_checkpoint

    admitted = admit(folder, allow, verb)
    path = checkpoint_of(folder)
    checkpoint = read_checkpoint(path)
    cfg = load_run(folder, [*admitted, *TO_ANSWER], verb)
    task = init_module(cfg, "model")
    task.on_load_checkpoint(checkpoint)
    task.configure_model()
    own = task.state_dict()  # without the weights of a loss that is gone
    checkpoint["state_dict"] = {
        name: value for name, value in checkpoint["state_dict"].items() if name in own or not name.startswith("losses.")
    }
    load_weights(task, checkpoint, path)
    return task.eval(), cfg, path


def load_run(folder: RunFolder, overrides: Sequence[str], verb: str, needed: Collection[str] = ()) -> Config:
    """The config of a run, for a use of its weights.

    A key that this version does not know, and a part that is not needed and cannot be imported, are left out with a
    warning.

    Args:
        verb: what the run is asked for.
        needed: which of `_SPARE` this use builds.

    Raises:
        ConfigError: with every other fault.
    """
    left_out: list[str] = []
    while True:
        try:
            return load_config(folder.config, [*overrides, *left_out], beside=False)
        except ConfigError as error:
            instead = [_instead(fault, needed) for fault in error.faults]
            if None in instead or not set(instead).isdisjoint(left_out):
                raise ConfigError([_with_hint(fault, folder, verb) for fault in error.faults]) from error
            for fault, override in zip(error.faults, instead, strict=True):
                log.warning("%s: %s; %s does without", fault.key, fault.message.partition(". ")[0], verb)
                left_out.append(str(override))


def _instead(fault: Fault, needed: Collection[str]) -> str | None:
    """The override with which a use of the weights does without what is at fault in a run's config; None: it cannot."""
    key = fault.key or ""
    if (fault.place or "").startswith("override"):
        return None
    if fault.message.startswith("unknown key."):
        return f"~{key}"
    spare = next((name for name in _SPARE if f"{key}.".startswith(f"{name}.")), None)
    if spare is None or spare in needed or not _is_gone(fault):
        return None
    return f"{spare if _SPARE[spare] in ('null', '[]') else key.removesuffix('.type')}={_SPARE[spare]}"


def _is_gone(fault: Fault) -> bool:
    """Whether a module is not there, cannot be imported, or is another one of the same name."""
    return fault.message.startswith(("there is no module ", "importing ")) or "` was read from " in fault.message


def _with_hint(fault: Fault, folder: RunFolder, verb: str) -> Fault:
    if not folder.code.is_file() or not _is_gone(fault):
        return fault
    verb = verb if verb in ("test", "predict") else "export"
    return replace(
        fault, message=f"{fault.message} The run kept its code: deeplightning {verb} {folder.path} --code run uses it"
    )


def use_code(folder: RunFolder, allow: Sequence[str] = ()) -> None:
    """Lets names come first from the code that a run kept.

    Args:
        allow: modules that a foreign run may execute.

    Raises:
        CheckpointError: it kept none, or the run is foreign and not all of its modules are allowed.
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
    secrets = read(folder.config).secrets.values
    add_import_roots(*unpack(code, into, lambda content: restored(content, {n: value for value, n in secrets.items()})))
    log.warning("the run's own code is used, from %s: %s", folder.code, names or "none")
    for where in code.concealed:
        log.warning("at %s a secret was left out of the kept code; *** stands there", where)


def halve_run(folder: RunFolder) -> str:
    """Adds to the bundle of a run a model that computes in fp16, for `serve.precision: fp16`; a line with the figure.

    Raises:
        CheckpointError: there is no complete bundle, or fp16 would not be as right.
        SetupError: the bundle cannot be written.
    """
    from deeplightning.export.fp16 import halve

    difference = halve(folder)
    return (
        f"fp16: answers to the golden samples differ by up to {difference:.3g} from those in float32; kept as "
        f"{folder.bundle_fp16}"
    )


def keep_samples(data: Any, folder: RunFolder) -> None:
    """Keeps some validation samples in the run's folder, or training samples where there are none: images as they reach
    the network, uint8 (N, C, H, W), or of a data module that has `example_texts` texts, (N,).

    Raises:
        CheckpointError: there are no samples at all.
    """
    import numpy as np

    if hasattr(data, "example_texts"):
        with permissions_of(folder.path):
            np.savez_compressed(folder.samples, texts=np.array(data.example_texts(SAMPLES), np.str_))
        return
    batches = itertools.chain(_batches(data.val_dataloader), _batches(data.train_dataloader))
    batch = next(batches, None)
    if batch is None:
        raise CheckpointError(f"{folder.path}: a bundle is proved on samples, and the data module gives none")
    with permissions_of(folder.path):
        np.savez_compressed(folder.samples, images=batch["image"][:SAMPLES].cpu().numpy())


def _batches(dataloader: Callable[[], Any]) -> Iterator[Any]:
    """The batches of a hook of the data module, of all its loaders; none where it has none."""
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    try:
        loaders = dataloader()
    except MisconfigurationException:  # Lightning's word for: the module has none
        return
    for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
        yield from () if loader is None else loader


def origin_of(folder: RunFolder, checkpoint: Path) -> dict[str, Any]:
    """Where a model comes from, in words: run, folder, checkpoint, time, version."""
    from deeplightning.engine.checkpoint_io import read_checkpoint

    return {
        "id": (read_checkpoint(checkpoint).get("run") or {}).get("id"),
        "folder_name": folder.path.name,
        "checkpoint": checkpoint.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"deeplightning": __version__},
    }


def takes_pictures_or_texts(task: Any) -> bool:
    """Whether a task says how pictures or texts are prepared for it; what serves a run needs that."""
    return (getattr(task, "image_spec", None) or getattr(task, "text_spec", None)) is not None


def export_run(folder: RunFolder, allow: Sequence[str] = (), verb: str = "export") -> Path:
    """Writes the bundle of a run: its best weights as ONNX, compared with the checkpoint on real samples; and an MLflow
    model of it, where the config wants one.

    Args:
        allow, verb: as of `trained_task`.

    Raises:
        CheckpointError: there are no weights or no samples, the exported model answers differently, the task is of
            neither pictures nor texts, or the run is foreign and its config names what may not be built.
    """
    import numpy as np

    from deeplightning.export.bundle import export

    task, cfg, path = trained_task(folder, allow, verb)
    if not takes_pictures_or_texts(task):
        raise CheckpointError(
            f"{folder.path}: a server takes pictures or texts, and {cfg.model.module.type} has neither an image_spec "
            "nor a text_spec; `deeplightning predict RUN` answers for its test set"
        )
    if not folder.samples.is_file():  # the run ended before it could keep some
        data = init_module(cfg, "data")
        data.prepare_data()
        data.setup("validate")
        keep_samples(data, folder)
    with np.load(folder.samples, allow_pickle=False) as file:
        samples = file["texts" if "texts" in file else "images"]
    bundle = export(task, folder, samples, origin_of(folder, path))
    log.info("bundle     %s", bundle)
    if cfg.logger.log_model and task.kind == "text_classification":
        log.warning("model      none: an MLflow model is made of a run with pictures only, so far")
    elif cfg.logger.log_model:
        from deeplightning.tracking.flavour import write_model

        with permissions_of(folder.path):
            model = write_model(folder)
        log.info("model      %s", model)
    return bundle


def quantize_run(folder: RunFolder, allow: Sequence[str] = ()) -> str:
    """Adds to the bundle of a run a model that computes in int8, for `serve.precision: int8`; a line with the figures.

    Args:
        allow: as of `trained_task`.

    Raises:
        CheckpointError: there is no whole bundle, the data have no validation images with classes, or int8 would not be
            as right.
        SetupError: the bundle cannot be written.
    """
    from deeplightning.export.int8 import quantize

    cfg = load_run(folder, [*admit(folder, allow, "serve"), *TO_ANSWER], "serve", needed=("data.module",))
    data = init_module(cfg, "data")
    data.prepare_data()
    data.setup("validate")
    if next(_batches(data.val_dataloader), None) is None:
        raise CheckpointError(
            f"{folder.path}: whether int8 is as right is judged on validation images, and the data module gives none; "
            "serve it with serve.precision=fp32"
        )

    def validation() -> Iterator[tuple[Any, Any]]:
        for batch in _batches(data.val_dataloader):
            if not {"image", "label"} <= batch.keys():
                raise CheckpointError(
                    f"{folder.path}: its accuracy in int8 needs validation batches with 'image' and 'label'; these "
                    f"have {', '.join(batch)}; serve it with serve.precision=fp32"
                )
            counts = batch["index"] >= 0 if "index" in batch else slice(None)  # the others fill up a batch
            yield batch["image"][counts].numpy(), batch["label"][counts].numpy()

    figures = quantize(folder, validation)
    return (
        f"int8: accuracy {figures['accuracy']:.2f} %, in float32 {figures['accuracy_fp32']:.2f} %, on "
        f"{figures['images']} validation images; kept as {folder.bundle_int8}"
    )
