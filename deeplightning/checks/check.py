"""A tree of values becomes a checked `Config`, or all that is wrong with it at once, each fault with its place."""

import contextlib
import os
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deeplightning.checks.contradictions import contradictions
from deeplightning.checks.errors import Findings
from deeplightning.checks.metric_check import check_monitors, settle_modes
from deeplightning.checks.report import Report, in_order
from deeplightning.checks.schema_check import read_section
from deeplightning.checks.signature_check import Meanings
from deeplightning.checks.targets import compare
from deeplightning.checks.trust import RunConfig
from deeplightning.checks.unread import check_sections
from deeplightning.config.schema import Config
from deeplightning.config.source import Given, Source, compose
from deeplightning.config.target import find_function
from deeplightning.config.tree import Entry
from deeplightning.faults import ConfigError, Fault, upwards
from deeplightning.own_code import added_roots, original_roots, use_import_roots
from deeplightning.static.definition import look_up
from deeplightning.static.signature import Undecided


def check(
    path: str | Path | Given, overrides: list[str] | None = None, *, importing: bool = False, beside: bool = True
) -> Report:
    """Check the config of a file and its overrides. The tree of a foreign run's config is admitted before any import.

    Args:
        importing: import what the config names, which decides what its source cannot; only once the text is in order.
            Else nothing is imported, and no code executed.
        beside: let names come from the config's folder too.

    Raises:
        CheckpointError: a foreign run's config names what may not be built.
    """
    report, run = Report(), path if isinstance(path, RunConfig) else None
    try:
        source = compose(path, [*(run.left_out() if run else ()), *(overrides or ())])
        _find_own_code(source, beside)
        functions = {}
        if importing and source.resolvers():
            before = check(path, overrides, beside=beside)
            if before.faults or before.config is None:
                return before
            functions = _resolvers(source, before)
        source.resolve(functions)
        if run is not None:
            run.admit(source)
        report.source = source
        _examine(report, source, importing)
    except ConfigError as error:  # there is no going on
        report.config = None
        report.faults = error.faults if report.source is None else in_order(error.faults, report.source)
    return report


def section(name: str, source: Source) -> Any:
    """Return one section of a config, whatever the others hold.

    Raises:
        ConfigError: with every fault of this section and of the overrides.
    """
    findings = Findings(source.faults, source.secrets, source.root)
    entry = source.root.value.get(name) or Entry(None, source.root.place)
    made = read_section(findings, typing.get_type_hints(Config)[name], entry, name, (name,))
    faults = [fault for fault in source.faults if name in upwards(fault.key or name)]
    if faults:
        raise ConfigError(in_order(faults, source))
    return made


def _resolvers(source: Source, before: Report) -> dict[str, Callable[..., Any]]:
    """Return the user's resolvers, imported.

    Args:
        before: what a check without importing came to.

    Raises:
        ConfigError: one is no function that may be called.
    """
    unknown = {fault.key for fault in before.unchecked}
    env = before.config.engine.env if before.config is not None else {}
    known = {name: text for name, text in env.items() if unknown.isdisjoint(upwards(f"engine.env.{name}"))}
    functions, faults = {}, []
    with _variables(known):
        for name, entry in source.resolvers().items():
            try:
                functions[name] = find_function(entry.value)
            except ValueError as error:
                code = getattr(error, "exit_code", 2)
                faults.append(Fault(str(error), f"resolvers.{name}", entry.place, found=entry.value, exit_code=code))
    if faults:
        raise ConfigError(faults)
    return functions


@contextlib.contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


OWN_LOADERS = "deeplightning.data.of_datasets.OfModule"


def _use_own_loaders(source: Source) -> None:
    """Use the loaders of a LightningModule that defines `train_dataloader` where the config has no `data`."""
    root = source.root
    if "data" in root.value:
        return
    try:
        target = root.value["model"].value["module"].value["type"].value
        has_loaders = look_up(target).defines("train_dataloader", outside="pytorch_lightning")
    except (AttributeError, KeyError, TypeError, ValueError, Undecided):  # reported where the config is read
        return
    if has_loaders:
        module = Entry({"type": Entry(OWN_LOADERS, root.place)}, root.place)
        root.value["data"] = Entry({"module": module}, root.place)


def _examine(report: Report, source: Source, importing: bool) -> None:
    _use_own_loaders(source)
    findings = Findings(source.faults, source.secrets, source.root)
    for fault in source.unchecked:
        findings.answered.add(fault.key)
        findings.leave(str(fault.key), fault.message)
    report.places = findings.places
    report.config = config = read_section(findings, Config, source.root, "", ())
    if config is not None:
        config.secrets, config.notices, config.roots = source.secrets, source.notices or None, original_roots()
        config.origins = source.origins or None
        contradictions(findings, config)
        findings.meanings = Meanings(importing and not source.faults)
        with _variables(config.engine.env if findings.meanings.importing else {}):  # libraries read them when imported
            compare(findings, config)
            check_sections(findings, config, source)
            if config.model is not None and config.train is not None and "train" in config.stages:
                check_monitors(findings, config)
                settle_modes(findings, config)
    meant = findings.meant
    source.faults[:] = [f for f in source.faults if f.key not in meant or not f.message.startswith("missing: ")]
    if any("mean _base_?" in fault.message for fault in source.faults):  # the missing keys are in the base
        source.faults[:] = [fault for fault in source.faults if not fault.message.startswith("missing: ")]
    report.unchecked = in_order(findings.unchecked, source)
    report.faults = in_order(source.faults, source)


def _find_own_code(source: Source, beside: bool) -> None:
    """Let names come from the working directory and the folders of the files that the user named; never from a run
    folder, not even where it is the working directory."""
    here = Path.cwd()
    if beside:
        use_import_roots(here, *source.folders, *added_roots())
    elif here.is_relative_to(source.folders[0].resolve()):
        use_import_roots(*added_roots())
    else:
        use_import_roots(*added_roots(), here)  # the code that the run kept comes first, where it is asked for


def load(path: str | Path | Given, overrides: list[str] | None = None) -> Config:
    """Return the config of a file and its overrides, checked, with everything imported that it names.

    Raises:
        ConfigError: with every fault that was found.
    """
    return check(path, overrides, importing=True).checked()
