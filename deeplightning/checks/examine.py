"""The one door to a config: it is read, judged and settled in this order, once, and comes out as it would run."""

from __future__ import annotations

import functools
import math
import secrets
from dataclasses import replace
from pathlib import Path

from deeplightning.address import is_address, shown
from deeplightning.checks import check
from deeplightning.checks.combinations import conflicts
from deeplightning.checks.hints import hints
from deeplightning.checks.report import Report
from deeplightning.config.addresses import missing_library
from deeplightning.config.schema import Config, backend_of
from deeplightning.config.source import Given
from deeplightning.engine.plan import occupied, settle
from deeplightning.faults import Fault, Notice, place_of
from deeplightning.process.identity import decision
from deeplightning.words import stage_of


def examine(
    path: str | Path | Given, overrides: list[str] | None = None, *, importing: bool = False, beside: bool = True
) -> Report:
    """Load, check and settle a config: all that is wrong with it here, and the config as it would run.

    Args:
        importing: import what the config names, which decides what its source cannot.
        beside: let names come from the config's folder too.
    """
    report = check.check(path, overrides, importing=importing, beside=beside)
    cfg = report.config
    if cfg is not None and report.source is not None:
        cfg.written = (report.source.names, report.source.changes())
    if cfg is None or None in (cfg.engine, cfg.data, cfg.model, cfg.train, cfg.logger):
        return report  # a section is no mapping: there is nothing to settle
    asked = replace(cfg.engine, backend=backend_of(cfg.engine))
    settled, lacking = settle(cfg)
    cfg.notices = [*(cfg.notices or []), *settled, *clear_secrets(cfg), *unjudged(cfg)]
    report.hints += hints(cfg, asked)
    wrong = {key for fault in report.faults for key in (fault.key or "", f"{fault.key}.type")}
    broken = list(conflicts(cfg, asked, report.places, skip=wrong.__contains__))
    lacking = [fault for fault in lacking if fault.key not in wrong]
    report.add(*lacking, *(fault for rule, fault in broken if not rule.at_start))
    report.at_start += [fault for rule, fault in broken if rule.at_start]
    if not lacking:
        places = report.places
        report.at_start += [replace(f, place=place_of(str(f.key), places)) for f in occupied(cfg.engine)]
    if isinstance(root := cfg.data.root, str) and is_address(root) and (why := missing_library(root)) is not None:
        place = place_of("data.root", report.places)
        report.at_start.append(Fault(why, "data.root", place, found=shown(root), exit_code=3))
    if cfg.seed is None:
        drawn = decision("seed")
        cfg.seed = secrets.randbelow(2**31) if drawn is None else drawn
        cfg.notices.append(Notice(f"seed: null → {cfg.seed} (drawn)", unasked=False, key="seed"))
    for name, section in cfg.of_plugins().items():
        given = [*(overrides or []), f"{name}=null"]
        section.check(report, functools.partial(_with_more, path, given, importing, beside))
    return report


def _with_more(
    path: str | Path | Given, overrides: list[str], importing: bool, beside: bool, more: list[str]
) -> Report:
    return examine(path, overrides + more, importing=importing, beside=beside)


def load_config(path: str | Path | Given, overrides: list[str] | None = None, *, beside: bool = True) -> Config:
    """Return the config of a file, a dict or an OmegaConf object with its overrides, checked and settled: what runs is
    what it says.

    The environment of the process stays as it is: `deeplightning.launch.set_environment` changes it when a run begins.

    Args:
        beside: let names come from the config's folder too; not from a run folder, which holds no code to be imported.

    Raises:
        ConfigError: with every fault, each with its place.
        SetupError: the machine lacks what the engine needs.
        CheckpointError: a stage needs weights, and none are named.
    """
    report = examine(path, overrides, importing=True, beside=beside)
    report.add(*report.at_start)
    cfg = report.checked()
    cfg.places = report.places
    return cfg


def clear_secrets(cfg: Config) -> list[Notice]:
    """Return a warning for each secret that is written in clear, and each variable that may hold one."""
    literals = cfg.secrets.literals if cfg.secrets else {}
    return [
        Notice(
            f"{'.'.join(map(str, path))}: {'may be ' if name == path[-1] else ''}a secret in clear. The run keeps "
            f"${{oc.env:{name}}} in its place; write that into the config, and set the environment variable {name}",
            key=".".join(map(str, path)),
        )
        for name, (path, _) in literals.items()
    ]


def unjudged(cfg: Config) -> list[Notice]:
    """Return a warning where checkpoints inside an epoch are saved at other moments than validations."""
    kept, often = cfg.train.checkpoint, cfg.train.val_every_n_epoch
    share, monitor = kept.every_n_epochs, kept.monitor
    if "train" not in cfg.stages or monitor is None or share is None or not 0 < share < 1:
        return []
    of_training, of_epoch = stage_of(monitor)[0] == "train", monitor.endswith("_epoch")
    if of_training and not of_epoch:
        return []
    validations = share / often if 0 < often < 1 else 0  # from one checkpoint to the next
    if validations > 0.5 and math.isclose(validations, round(validations)):
        return []
    remedy = f"train.val_every_n_epoch={share:g}{' and a metric of the validation' if of_training else ''}"
    key = "train.checkpoint.every_n_epochs"
    text = (
        f"{key} is {share:g} and train.val_every_n_epoch is {often!s:.20}: nothing is validated when a checkpoint "
        "inside an epoch is saved, so it becomes last.ckpt, and is not ranked by "
        f"{monitor}. To judge it too: {remedy}"
    )
    return [Notice(text, key=key)]
