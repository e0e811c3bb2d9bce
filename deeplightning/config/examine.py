"""Load, check and resolve a config, for every command. The steps are parse (`compose`), schema (`read_config`),
signatures (`compare`), machine (`resolve_engine`) and rules (`conflicts`). Each adds its faults to one report."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deeplightning.config.combinations import conflicts
from deeplightning.config.machine import resolve_engine
from deeplightning.config.report import Report
from deeplightning.config.schema import Config, backend_of
from deeplightning.config.schema_check import read_config, read_section
from deeplightning.config.signature_check import Meanings
from deeplightning.config.source import Given, Source, Text, compose
from deeplightning.config.target_check import compare
from deeplightning.config.tree import Entry, entry_at
from deeplightning.faults import ConfigError, Notice, upwards
from deeplightning.own_code import added_roots, use_import_roots
from deeplightning.process.identity import decision_of_rank_0

OWN_LOADERS = "deeplightning.data.of_datasets.OfModule"


def examine(
    path: str | Path | Given, overrides: list[str] | None = None, *, importing: bool = False, beside: bool = True
) -> Report:
    """Load, check and resolve a config; the report has every fault, and the config as it would run here.

    Args:
        importing: import what the config names, to check what its source does not show.
        beside: also import from the config's folder.
    """
    report = check(path, overrides, importing=importing, beside=beside)
    cfg = report.config
    if cfg is None or None in (cfg.data, cfg.model):
        return report  # a section is not a mapping: there is nothing to resolve
    asked = replace(cfg.engine, backend=backend_of(cfg.engine))
    changes, lacking = resolve_engine(cfg)
    cfg.notices = [*(cfg.notices or []), *changes, *cleartext_notices(cfg)]
    wrong = {key for fault in report.faults for key in (fault.key or "", f"{fault.key}.type")}
    lacking = [fault for fault in lacking if fault.key not in wrong]
    report.add(*lacking, *conflicts(cfg, asked, report.places, skip=wrong.__contains__))
    if cfg.seed is None:
        decided = decision_of_rank_0("seed")
        cfg.seed = secrets.randbelow(2**31) if decided is None else decided
        cfg.notices.append(Notice(f"seed: null → {cfg.seed} (drawn)", unasked=False, key="seed"))

    def without(name: str, more: list[str]) -> Report:
        """Check the same config without the section of a plug-in, and with more overrides."""
        return examine(path, [*(overrides or []), f"{name}=null", *more], importing=importing, beside=beside)

    for name, section in cfg.plugin_sections().items():
        section.check(report, functools.partial(without, name))
    return report


def load_config(path: str | Path | Given, overrides: list[str] | None = None, *, beside: bool = True) -> Config:
    """Return the config of a file, a dict or an OmegaConf object with its overrides, checked and resolved exactly as it
    will run.

    The environment of the process is not changed; `launch.apply_environment` does that when a run starts.

    Args:
        beside: also import from the config's folder; False for a run folder, which contains no code to import.

    Raises:
        ConfigError: with every fault, each with its place.
        SetupError: the machine lacks what the engine needs.
        CheckpointError: a stage needs weights, and none are given.
    """
    report = examine(path, overrides, importing=True, beside=beside)
    cfg = report.checked()
    cfg.places = report.places
    return cfg


# ---- checks that do not depend on the machine


def section(name: str, source: Source) -> Any:
    """Return one section of a config, whatever the others contain.

    Raises:
        ConfigError: with every fault of this section and of the overrides.
    """
    report = Report(source)
    entry = source.root.value.get(name) or Entry(None, source.root.place)
    made = read_section(report, typing.get_type_hints(Config)[name], entry, name, (name,))
    report.sort()
    if faults := [fault for fault in report.faults if name in upwards(fault.key or name)]:
        raise ConfigError(faults)
    return made


def check(
    path: str | Path | Given, overrides: list[str] | None = None, *, importing: bool = False, beside: bool = True
) -> Report:
    """Check the config of a file and its overrides. The tree of a foreign run's config is admitted before any import.

    Args:
        importing: import what the config names, to check what its source does not show, but only if the text has no
            faults. Otherwise nothing is imported, and no code is executed.
        beside: also import from the config's folder.

    Raises:
        CheckpointError: a foreign run's config names something that may not be built.
    """
    text = path if isinstance(path, Text) else None
    try:
        source = compose(path, [*(text.left_out() if text else ()), *(overrides or ())])
        _set_import_roots(source, beside)
        source.resolve()
        if text is not None:
            text.admit(source)
    except ConfigError as error:  # there is no tree to check
        return Report(Source(Entry({}, ""), [], error.faults))
    _use_own_loaders(source)
    report = Report(source)
    try:
        config = read_config(report)
        if config is not None:
            report.meanings = Meanings(importing and not report.faults)
            env = config.engine.env if report.meanings.importing else {}  # libraries read it when they are imported
            with _environment(env):
                compare(report, config)
        report.drop_consequences()
    except ConfigError as error:  # the check cannot continue
        report.config, report.faults[:] = None, error.faults
    report.sort()
    return report


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in before:
            os.environ.pop(name, None)
        os.environ.update({name: text for name, text in before.items() if text is not None})


def _use_own_loaders(source: Source) -> None:
    """Use the loaders of a LightningModule that defines `train_dataloader` if the config has no `data`."""
    root, target = source.root, entry_at(source.root, ("model", "module", "type"))
    task = Meanings().known(target.value) if target is not None and "data" not in root.value else None
    if task is not None and task.defines("train_dataloader", outside="pytorch_lightning"):
        root.value["data"] = Entry({"module": Entry({"type": Entry(OWN_LOADERS, root.place)}, root.place)}, root.place)


def _set_import_roots(source: Source, beside: bool) -> None:
    """Set the import roots to the working directory and the folders of the files that the user named, never to a run
    folder, even if it is the working directory."""
    here = Path.cwd()
    if beside:
        use_import_roots(here, *source.folders, *added_roots())
    elif here.is_relative_to(source.folders[0].resolve()):
        use_import_roots(*added_roots())
    else:
        use_import_roots(*added_roots(), here)  # the run's saved code comes first, if requested


# ---- warnings


def cleartext_notices(cfg: Config) -> list[Notice]:
    """Return a warning for each secret in clear text, and for each variable that may contain one."""
    literals = cfg.secrets.literals if cfg.secrets else {}
    return [
        Notice(
            f"{'.'.join(map(str, path))}: {'may be ' if name == path[-1] else ''}a secret in clear text. The run "
            f"stores ${{oc.env:{name}}} instead; write that in the config, and set the environment variable {name}",
            key=".".join(map(str, path)),
        )
        for name, (path, _) in literals.items()
    ]
