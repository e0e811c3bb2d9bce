"""Try a config out: pass a batch through its steps in one CPU process, and report what does not fit.

It reads no pictures or texts, opens no run or network connection, and writes no checkpoint. An entry point of the group
`deeplightning.dry_run` may repeat it on other devices and in several processes.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from deeplightning import own_code
from deeplightning.config.machine import world_size
from deeplightning.config.plugins import DRY_RUN, load
from deeplightning.config.schema import Config, targets_of
from deeplightning.dry_run.diagnosis import Attempt, faults_of
from deeplightning.dry_run.isolation import drop_weights, offline, on_one_cpu, silenced, wants_network
from deeplightning.dry_run.one_batch import take_steps
from deeplightning.faults import Fault, nearest, not_installed
from deeplightning.private.messages import ErrorText


def dry_run(cfg: Config) -> tuple[list[Fault], list[Fault]]:
    """Build the parts of a config as training does, and pass one batch through its steps.

    The batch is the data module's `example_batch(size)`. Hooks of the user's own callbacks run; loggers are not built.
    Everything runs in one CPU process. For GPUs or several processes the plug-in `plan` repeats it on those devices.

    Args:
        cfg: a config from `load_config`; it is not changed.

    Returns:
        The faults, and notes on what could not be tried.
    """
    several = world_size(cfg.engine) > 1
    on_gpu = cfg.engine.gpus is not None or (cfg.asked or {}).get("engine.gpus") == "auto"
    devices = load(DRY_RUN, "plan") if several or on_gpu else None
    on_devices = devices(cfg, on_gpu) if devices is not None else contextlib.nullcontext()
    absent = [ErrorText.NO_CUDA.value] if on_gpu else []
    absent += [ErrorText.NO_GROUP.value, r"'(LOCAL_RANK|NODE_RANK|WORLD_SIZE)'"] if several else []
    with silenced(), offline(), tempfile.TemporaryDirectory() as folder, on_devices as compare:
        attempt = try_out(cfg, on_one_cpu(cfg), Path(folder))
        if absent and any(re.search("|".join(absent), fault.message) for fault in attempt.faults):
            attempt.faults, attempt.untried = [], []  # own code needs a GPU, a process group or a rank
        if compare is not None:
            compare(attempt)
        elif several or on_gpu:
            key = "engine.gpus" if on_gpu else "engine.processes"
            attempt.untried.append(Fault(f"tried in one process on the CPU only; {not_installed('plan')}", key))

    model = cfg.model
    sections = (model.network, model.loss, model.metrics, model.optimizer, model.scheduler)
    targets = [cfg.data.module, model.module, *cfg.train.callbacks, *(t for s in sections for t in targets_of(s))]
    places = {target.name: target.place for target in targets}

    def distinct(notes: list[Fault]) -> list[Fault]:
        clean = [replace(f, message=cfg.redact(f.message), place=f.place or places.get(f.key)) for f in notes]
        return list(dict.fromkeys(clean))

    return distinct(attempt.faults), distinct(attempt.untried)


def try_out(asked: Config, cfg: Config, folder: Path) -> Attempt:
    """Pass one batch through the steps of a config, up to the first that fails.

    Args:
        asked: the config as the user wrote it.
        cfg: the config as it is tried; weights that are not on this machine are removed from it.
        folder: temporary folder for files that a run would write.
    """
    attempt = Attempt(cfg, asked, folder)
    if cfg.engine.precision != asked.engine.precision:
        message = f"{asked.engine.precision} needs a GPU; {cfg.engine.precision} was tried instead"
        attempt.untried.append(Fault(message, "engine.precision"))
    if asked.engine.compile:
        attempt.untried.append(Fault("a dry run does not compile", "engine.compile"))
    if asked.model.init_from is not None:
        attempt.untried.append(Fault("the weights were not read", "model.init_from"))
    try:
        take_steps(attempt)
    except (Exception, SystemExit) as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning converts it to SystemExit
            raise KeyboardInterrupt from None
        if wants_network(error):
            if keys := drop_weights(cfg):
                again = try_out(asked, cfg, folder)
                message = "these weights are not on this machine yet; random ones were tried"
                again.untried += [Fault(message, key) for key in keys]
                return again
            message = "needs a network connection, which a dry run does not allow; later steps were not tried"
            attempt.untried.append(Fault(message + own_code.user_location(error), "model.module"))
            return attempt
        only_here = "|bf16-true rounds" * (asked.engine.precision == "16-true")  # see `isolation.on_one_cpu`
        if asked.engine.gpus is not None and re.search(f"not implemented for '(BFloat16|Half)'{only_here}", str(error)):
            message = f"the CPU cannot try this network in {asked.engine.precision}; later steps were not tried"
            attempt.untried.append(Fault(message, "engine.precision"))
            return attempt
        attempt.faults += faults_of(attempt, error)
    if attempt.faults:
        attempt.untried.append(Fault("the steps after the first fault were not tried"))
    else:
        attempt.faults += _unlogged(attempt)
    return attempt


def _unlogged(attempt: Attempt) -> list[Fault]:
    """Return faults for monitored metrics that were not logged in a training epoch."""
    known = attempt.logged
    if known is None or attempt.batch is None:
        return []  # no step was taken
    some = ", ".join(sorted(known)) or "none"
    return [
        Fault(f"no metric is called {name!r}; a training and a validation step log {some}.{nearest(name, known)}", key)
        for key, name in _monitors(attempt)
        if name not in known
    ]


def _monitors(attempt: Attempt) -> Iterator[tuple[str, str]]:
    """Yield key and name of each monitored metric."""
    train = attempt.asked.train
    if train.checkpoint.monitor is not None:
        yield "train.checkpoint.monitor", train.checkpoint.monitor
    if train.early_stop is not None:
        yield "train.early_stop.metric", train.early_stop.metric
    for target in targets_of(attempt.asked.model.scheduler):
        if target.call.monitor is not None:
            yield f"{target.name}.call.monitor", target.call.monitor
    for target, callback in attempt.callbacks:
        known = ("epoch", "step") if hasattr(callback, "best_k_models") else ()  # to Lightning's ModelCheckpoint
        if isinstance(monitor := getattr(callback, "monitor", None), str) and monitor not in known:
            yield f"{target.name}.params.monitor", monitor
