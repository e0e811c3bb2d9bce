"""How training resumes: from which checkpoint, in which run, and whether the result will be bit-identical."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deeplightning.callbacks.resumption import Resumption
from deeplightning.config.schema import Config
from deeplightning.config.source import read
from deeplightning.config.tree import dump, plain
from deeplightning.config.trust import run_config
from deeplightning.faults import CheckpointError, ConfigError
from deeplightning.process.identity import decide_on_rank_0, identity, own_rank, restarts
from deeplightning.runfolder import RunFolder, read_object
from deeplightning.tracking.build import refusal

log = logging.getLogger("deeplightning")


def resumption(cfg: Config) -> Resumption:
    """Return the checkpoint to resume from, by `train.resume_ckpt`, and whether the same run continues.

    Rank 0 decides and passes the checkpoint to processes that it starts; others find it themselves. Only rank 0 needs
    to know which run continues.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged; `auto` takes another instead.
        SetupError: the tracking store cannot be read.
    """
    found: dict[str, Resumption] = {}

    def decide() -> list[object]:
        ours = found["ours"] = _resolve(cfg)
        return [str(ours.checkpoint) if ours.checkpoint else None, ours.kept, ours.epochs]

    path, kept, epochs = decide_on_rank_0("train.resume_ckpt", decide)
    _apply_kept(cfg, kept)
    return found.get("ours") or Resumption(checkpoint=Path(path) if path else None, epochs=epochs)


def _resolve(cfg: Config) -> Resumption:
    from deeplightning.engine.checkpoint_reading import read_checkpoint

    name = cfg.train.resume_ckpt
    if (found := _resume_launch(cfg)) is not None:
        return found
    if name is None:
        return Resumption()
    if name == "auto":
        return _resolve_auto(cfg)
    from deeplightning.run.load import find_checkpoint

    path = find_checkpoint(name, cfg, to_resume=True)
    try:
        checkpoint = read_checkpoint(path, whole=False)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. The latest complete checkpoint: train.resume_ckpt=auto") from None
    return _resume_from(path, checkpoint, cfg)


def _resolve_auto(cfg: Config) -> Resumption:
    """Resolve `auto`: the newest readable checkpoint of the latest run that has any, else a run to start again; raise
    CheckpointError if none of that run's checkpoints can be read."""
    from deeplightning.run.load import runs_of, store_of

    empty = None
    for folder in runs_of(cfg):
        if (found := _newest_checkpoint(folder)) is not None:
            return _resume_from(*found, cfg)
        if empty is None and _is_same(cfg, folder):
            empty = folder
    if empty is not None and (again := _from_the_start(cfg, empty)) is not None:
        return again
    note = f"resumes    nothing, a new run starts: no run of this experiment in {store_of(cfg).shown} has a checkpoint"
    return Resumption(notes=[note])


def _newest_checkpoint(folder: RunFolder) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest readable checkpoint of a run, None if it saved none; raise CheckpointError if it has
    checkpoints, and none can be read."""
    from deeplightning.engine.checkpoint_reading import read_checkpoint

    errors: list[str] = []
    for path in folder.checkpoints():
        try:
            checkpoint = read_checkpoint(path, whole=False)
        except CheckpointError as error:
            errors.append(str(error))
            continue
        for text in errors:
            log.warning("resumes    skipped: %s", text)
        return path, checkpoint
    if not errors:
        return None
    raise CheckpointError(
        f"{folder.path}: no checkpoint of this run can be read: {'; '.join(errors)}. To begin a new run set "
        "train.resume_ckpt=null; to resume another one set it to that run's id or folder"
    )


def _from_the_start(cfg: Config, folder: RunFolder) -> Resumption | None:
    """Restart a run that ended before its first checkpoint; None if it cannot be restarted, or is in use."""
    run_id = folder.path.parent.name
    is_refused = own_rank() != 0 or refusal(cfg.logger.type, cfg.logger.params, run_id, folder.path)
    if is_refused or (lock := folder.lock()) is None:
        return None
    note = f"resumes    nothing: the run {run_id} ended before its first checkpoint, and starts again"
    return Resumption(run_id=run_id, folder=folder.path, lock=lock, notes=[note])


def _resume_launch(cfg: Config) -> Resumption | None:
    """Return where a restarted launch resumes: in its run, from the latest complete checkpoint.

    None if the launch is new, has not opened a run, or cannot be identified.
    """
    here = identity()
    if here is None or here.launch is None or not here.may_resume:
        return None
    if here.launch.startswith("local-") and restarts() == 0:  # the same command may be given again in one job
        return None
    from deeplightning.run.load import runs_of, store_of
    from deeplightning.tracking.reader import open_reader

    ours = runs_of(cfg, lambda path: bool(read_object(RunFolder(path).environment).get("launch") == here.launch))
    folder = next(ours, None)
    if folder is None and restarts() > 0:  # it may have ended before recording the launch
        nameless = runs_of(cfg, lambda path: not RunFolder(path).environment.exists())
        return next(filter(None, (_from_the_start(cfg, each) for each in nameless if _is_same(cfg, each))), None)
    run = open_reader(store_of(cfg)).run(folder.path.parent.name) if folder is not None and restarts() == 0 else None
    if folder is None or (run is not None and run.status == "FINISHED"):
        return None  # a new job reuses the id of a finished one
    if (found := _newest_checkpoint(folder)) is not None:
        return replace(_resume_from(*found, cfg), complete="")  # the stages after training remain
    return _from_the_start(cfg, folder)


def _resume_from(path: Path, checkpoint: Mapping[str, Any], cfg: Config) -> Resumption:
    """Resume from a checkpoint: in its run if that is possible.

    Raises:
        CheckpointError: the checkpoint is from another optimizer or scheduler, or its metadata is damaged.
    """
    from deeplightning.engine.checkpoint_reading import read_checkpoint

    _raise_if_damaged(path, checkpoint)
    for part in ("optimizer", "scheduler"):
        theirs = ((checkpoint.get("config") or {}).get("model") or {}).get(part)
        ours = cfg.public()["model"][part]
        if theirs is not None and _types(theirs) != _types(ours):
            raise CheckpointError(
                f"{path}: from another {part}: model.{part}.type was {_types(theirs)} and is {_types(ours)}; "
                f"set it back, or start again from the weights: model.init_from='{path}'"
            )
    kept = list(_kept_settings(checkpoint, cfg))
    _apply_kept(cfg, kept)
    moved = (checkpoint.get("run") or {}).get("folder") != str(path.parent)
    seen = _value_at(checkpoint, ("loops", "fit_loop", "epoch_progress", "current", "processed"))
    epochs = seen if isinstance(seen, int) else 0
    done = _reason_complete(epochs, checkpoint, cfg) if moved else ""
    if own_rank() != 0:
        return Resumption(path, complete=done, epochs=epochs, kept=kept)
    folder, run_id = RunFolder(path.parent), (checkpoint.get("run") or {}).get("id")
    position = f"step {checkpoint['global_step']}, epoch {checkpoint['epoch'] + 1}"
    why, lock = None, None
    if run_id is None:
        why = "the checkpoint names no run"
    elif path.name not in [each.name for each in folder.checkpoints()]:
        why = f"{path.name} is not a checkpoint's name in a run folder"
    elif path != folder.last and folder.last.is_file():
        try:
            if read_checkpoint(folder.last, whole=False)["global_step"] > checkpoint["global_step"]:
                why = f"{folder.last.name} is further along"
        except CheckpointError:
            pass  # then this one is the latest
    why = why or refusal(cfg.logger.type, cfg.logger.params, str(run_id), path.parent)
    if why is None and (lock := folder.lock()) is None:
        why = f"a process is using the run {run_id}"
    notes = [f"resumes    {path} ({position})", f"run        {f'a new one: {why}' if why else f'{run_id} continues'}"]
    inexact = _reason_inexact(checkpoint, cfg)
    threads = checkpoint.get("threads") if cfg.engine.gpus is None else None
    if why:
        if done:
            stages = " and ".join(stage for stage in cfg.stages if stage != "train")
            notes.append(f"training   has finished: {done}; only {stages} will run")
            inexact, threads = "", None  # no training is left to differ
        return Resumption(path, notes=notes, inexact=inexact, threads=threads, complete=done, epochs=epochs, kept=kept)
    pending = checkpoint.get("points") or []
    return Resumption(path, run_id, path.parent, pending, lock, notes, inexact, threads, done, epochs, kept)


def _kept_settings(checkpoint: Mapping[str, Any], cfg: Config) -> Iterator[list[Any]]:
    """Yield settings that the restored optimizers and schedules keep although the config has another value.

    Each is the keys below `model`, the value of the checkpoint and that of the config; None for a value that is not
    set. Only plain values: a checkpoint may be untrusted, and a mapping inside params names what is imported and
    called.
    """
    model: Mapping[str, Any] = (checkpoint.get("config") or {}).get("model") or {}
    ours = cfg.public()["model"]
    for keys in (("optimizer", "params"), ("optimizer", "groups"), ("scheduler", "params")):
        part = model.get(keys[0])
        for name in [None] if part is None or "type" in part else part:
            path = [keys[0], *([] if name is None else [name]), keys[1]]
            was, wanted = _value_at(model, path), _value_at(ours, path)
            if isinstance(was, Mapping) and isinstance(wanted, Mapping):
                for key in {**wanted, **was}:
                    if was.get(key) != wanted.get(key) and key != "fused" and _is_plain(was.get(key)):
                        yield [*path, key, was.get(key), wanted.get(key)]
            elif isinstance(was, list) and isinstance(wanted, list) and was != wanted and all(map(_is_group, was)):
                yield [*path, was, wanted]


def _is_group(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_plain, value.values()))


def _is_plain(value: object) -> bool:
    """Return whether a value is a number, boolean, null, string without a reference, or a list of these."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | None) or (isinstance(value, str) and "${" not in value)


def _apply_kept(cfg: Config, kept: Iterable[Sequence[Any]]) -> None:
    """Set the config's values to those that the run keeps, see `_kept_settings`."""
    for part, *path, key, was, _ in kept:
        holder = getattr(cfg.model, part)
        for name in path:
            holder = holder[name] if isinstance(holder, Mapping) else getattr(holder, name)
        if not isinstance(holder, dict):
            holder.groups = was
        elif was is None:
            holder.pop(key, None)
        else:
            holder[key] = was
        if cfg.secrets is not None:
            cfg.secrets.texts.pop(("model", part, *path, key), None)


def _value_at(tree: Any, path: Sequence[str]) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _reason_complete(epochs: int, checkpoint: Mapping[str, Any], cfg: Config) -> str:
    """Return why the training of a config is already complete at a checkpoint; "" if it is not."""
    train, steps = cfg.train, checkpoint["global_step"]
    if train.num_epochs is not None and epochs >= train.num_epochs:
        return f"it has seen {epochs} epochs, and train.num_epochs is {train.num_epochs}"
    if train.max_steps is not None and steps >= train.max_steps:
        return f"it has taken {steps} steps, and train.max_steps is {train.max_steps}"
    if (stop := train.early_stop) is None:
        return ""
    for key, state in (checkpoint.get("callbacks") or {}).items():
        if key.startswith(f"EarlyStopping{{'monitor': {stop.metric!r},") and state["wait_count"] >= stop.patience:
            return f"{stop.metric} did not improve {state['wait_count']} times, which ended its training"
    return ""


def _types(optimizers: object) -> str:
    """Return the class of an optimizer or scheduler in a config, or of each of several."""
    named = optimizers if isinstance(optimizers, Mapping) else {}
    if "type" in named:
        return str(named["type"])
    return ", ".join(str(o.get("type")) if isinstance(o, Mapping) else str(o) for o in named.values()) or "none"


def _raise_if_damaged(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Check the parts of a checkpoint that training needs in order to resume; raise CheckpointError, which names the
    first key that is missing or invalid."""
    config = checkpoint.get("config") or {}
    is_right = {key: isinstance(checkpoint.get(key), int) for key in ("global_step", "epoch")}
    is_right |= {f"config.{key}": isinstance(config.get(key, {}), dict) for key in ("data", "model", "train")}
    is_right["run.id"] = isinstance((checkpoint.get("run") or {}).get("id"), str | None)
    is_right["points"] = all(map(_is_point, checkpoint.get("points") or ()))
    if (wrong_key := next((key for key, is_so in is_right.items() if not is_so), None)) is not None:
        raise CheckpointError(
            f"{path}: damaged, or not written by Deep Lightning: `{wrong_key}` is missing or invalid; "
            f"take another checkpoint, or start again from the weights: model.init_from='{path}'"
        )


def _is_point(point: object) -> bool:
    """Return whether the value is (name, value, time, step)."""
    match point:
        case [str(), int() | float(), int(), int()]:
            return True
    return False


def _is_same(cfg: Config, folder: RunFolder) -> bool:
    """Return whether a run was started with the same config, apart from its stages and what it resumes from."""
    ours = cfg.public()
    try:
        theirs = plain(read(run_config(folder)).root, written=True)
        if theirs["train"]["resume_ckpt"] is not None:
            return False
    except (ConfigError, CheckpointError, KeyError, TypeError):  # damaged, or of somebody else and not plain
        return False
    ours["train"]["resume_ckpt"] = None
    return dump(theirs | {"stages": None}) == dump(ours | {"stages": None})


def _reason_inexact(checkpoint: Mapping[str, Any], cfg: Config) -> str:
    """Return why a resumed run will not end bit-identical to an uninterrupted one; "" if it will."""
    from deeplightning.callbacks.provenance import engine_of, versions

    reasons = []
    for section, ours, why in (
        ("engine", engine_of(cfg), "numbers are added in another order or rounded differently"),
        ("versions", versions(), "other code computes"),
    ):
        theirs = checkpoint.get(section, ours)
        names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
        changed = [f"{name} {theirs.get(name)} → {ours.get(name)}" for name in names]
        reasons += [f"{section} {', '.join(changed)} ({why})"] if changed else []
    engine = engine_of(cfg)
    is_ddp = engine["backend"] == "ddp" and not cfg.engine.params.get("find_unused_parameters")
    if is_ddp and isinstance(engine["processes"], int) and engine["processes"] > 2:
        reasons.append(
            f"engine.processes {engine['processes']} (from three on torch adds gradients in another order in its first "
            "step after each start; engine.params.find_unused_parameters=true keeps the order)"
        )
    theirs, ours = dict(_step_settings(checkpoint.get("config") or cfg.public())), dict(_step_settings(cfg.public()))
    names = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    if changed := [f"{key} {theirs.get(key)} → {ours.get(key)}" for key in names]:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        reasons.append(f"{', '.join(changed[:3])}{more} (something else is learned)")
    if checkpoint.get("accumulating"):
        reasons.append("the checkpoint was saved inside an accumulation (its gradients are lost)")
    if any(target.type.endswith(".ModelPruning") for target in cfg.train.callbacks):
        reasons.append("ModelPruning saves no masks (weights that were pruned learn again)")
    if lost := [name for name in checkpoint.get("lost") or () if isinstance(name, str)]:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        reasons.append(f"{', '.join(lost[:3])}{more} of the module (not in its state_dict; see `on_save_checkpoint`)")
    if cfg.engine.gpus is not None and not cfg.engine.deterministic:
        reasons.append("engine.deterministic is false (GPU kernels add in any order)")
    return "; ".join(reasons)


def _step_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the settings of a config that determine each step, by key."""
    keys = ["accumulator_epoch", "accumulator_factor", "gradient_clip", "limit_batches", "overfit"]
    schedule = repr(settings.get("model", {}).get("scheduler"))
    if re.search(r"'auto'|'warmup': (?!0(\.0)?[,}])", schedule):  # they count the steps of the whole training
        keys += ["num_epochs", "max_steps"]
    train = {key: settings.get("train", {}).get(key) for key in keys}
    limits = (train["limit_batches"] or {}).items()  # 1.0: all; 1: one batch
    train["limit_batches"] = {name: limit for name, limit in limits if name != "test" and repr(limit) != "1.0"} or None
    engine = {k: settings.get("engine", {}).get(k) for k in ("channels_last", "matmul_precision", "sync_batchnorm")}
    sections = {"data": settings.get("data", {}), "model": settings.get("model", {}), "train": train, "engine": engine}
    for section, values in sections.items():
        for key, value in values.items():
            if (section, key) not in (("data", "num_workers"), ("data", "root")):
                yield f"{section}.{key}", value
    yield "seed", settings.get("seed")


def agreement(cfg: Config, resumed: Resumption | None) -> dict[str, str]:
    """Return, by key, the values that must be equal on all machines of a run: settings that determine each step, the
    engine, and the checkpoint that training resumes from."""
    from deeplightning.callbacks.provenance import engine_of

    settings = dict(_step_settings(cfg.public())) | {f"engine.{name}": value for name, value in engine_of(cfg).items()}
    settings |= {"stages": cfg.stages, "the checkpoint to resume from": resumed and resumed.fingerprint}
    del settings["engine.processes"]  # compared per machine
    return {key: str(value) for key, value in settings.items()}
