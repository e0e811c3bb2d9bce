"""Convert the tree of a config to an instance of the schema, and check keys, types and ranges.

A wrong value becomes a fault and is replaced by its default or None, and reading continues.
"""

import functools
import typing
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any

from deeplightning.config import plugins, schema
from deeplightning.config.report import Report
from deeplightning.config.schema import Target
from deeplightning.config.signature_check import is_kind_of
from deeplightning.config.target_check import add_nested, add_target
from deeplightning.config.tree import Entry, KeyPath, kind, plain, scalar
from deeplightning.faults import not_installed, plugin_of
from deeplightning.own_code import original_roots
from deeplightning.signatures.signature import Parameter

MAX_UNKNOWN = 50  # unknown keys of a section that are reported individually
STRATEGY_PARAM = Parameter("params", allowed=())  # strategies build nothing from mappings


def read_config(report: Report) -> schema.Config | None:
    """Read the whole config, also checking keys against each other, or return None if there is no tree."""
    source = report.source
    config: schema.Config | None = read_section(report, schema.Config, source.root, "", ())
    if config is not None:
        config.secrets, config.notices, config.roots = source.secrets, source.notices or None, original_roots()
        config.written = source.names
        _report_contradictions(report, config)
    report.config = config
    return config


_hints = functools.cache(typing.get_type_hints)


def read_section(report: Report, cls: type, entry: Entry, key: str, path: KeyPath) -> Any:
    """Convert an entry to an instance of a schema class, or return None after a fault."""
    if entry.value is None:
        entry = Entry({}, entry.place)
    if not isinstance(entry.value, dict):
        report.wrong(f"a mapping of {', '.join(f.name for f in schema.keys(cls))}", kind(entry), key, entry.place)
        return None
    if cls is schema.Config:
        cls = plugins.config_class(entry.value)
    known = {f.name: f for f in schema.keys(cls)}
    hints = _hints(cls)
    prefix = f"{key}." if key else ""
    values: dict[str, object] = {}
    unknown = [name for name in entry.value if name not in known]
    if len(unknown) > MAX_UNKNOWN:
        message = f"{len(unknown)} unknown keys, such as {unknown[0]}; is this a config? Known here: {', '.join(known)}"
        report.fault(message, key, entry.value[unknown[0]].place)
        return None
    for name, item in entry.value.items():
        here = prefix + name
        if name in known:
            value = _value(report, hints[name], item, here, (*path, name), known[name].metadata)
            if value is not _BAD:
                values[name] = value
        elif not key and (plugin := plugin_of(f"{name}:")):
            if item.value is not None:
                report.fault(not_installed(plugin), here, item.place, exit_code=3)
        else:
            from deeplightning.config.allowed import report_unknown

            report_unknown(report, cls, entry, key, name)
    for name, f in known.items():
        if name not in values and schema.default_of(f) is MISSING:
            example = f"; for example `{name}: {f.metadata['example']}`" if f.metadata["example"] else ""
            report.fault(f"missing: {f.metadata['doc']}{example}", prefix + name, entry.place)
            values[name] = None
    section = cls(**values)
    if isinstance(section, Target):
        if isinstance(section.type, str):
            add_target(report, section.type, entry, key, path)
        section.place = entry.value["type"].place if "type" in entry.value else entry.place
        section.name = key
    if isinstance(section, schema.Data) and section.loader:
        for name, item in entry.value["loader"].value.items():
            add_nested(report, item, f"{prefix}loader.{name}", (*path, "loader", name), lambda: Parameter("loader"))
    if isinstance(section, schema.Engine) and section.params:
        for name, item in entry.value["params"].value.items():
            add_nested(report, item, f"{prefix}params.{name}", (*path, "params", name), lambda: STRATEGY_PARAM)
    return section


def _value(
    report: Report, hint: object, entry: Entry, key: str, path: KeyPath, metadata: Mapping[str, object] = {}
) -> object:
    """Convert a value to the type of the schema, or report a fault and return _BAD."""
    options = schema.options_of(hint)
    is_text = Any in options or (str in options and int not in options)
    if isinstance(entry.value, str) and not is_text and report.source.secrets.is_env_var(path):
        entry = Entry(scalar(entry.value), entry.place)  # a numeric key of ours accepts the text of a variable
    for option in options:
        fits, made = _fit(report, option, entry, key, path, len(options) > 1)
        if fits:
            return made if made is _BAD or _in_range(report, made, entry, key, path, metadata) else _BAD
    from deeplightning.config.allowed import report_misfit

    report_misfit(report, hint, entry, key, path)
    return _BAD


def _in_range(report: Report, value: object, entry: Entry, key: str, path: KeyPath, bounds: Mapping[str, Any]) -> bool:
    low, high = bounds.get("low"), bounds.get("high")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return True
    written = report.source.secrets.text_of(path)
    found = f"the value of {written}" if written else value
    if low is not None and not value >= low:
        from deeplightning.config.allowed import suggestion

        report.wrong(f"at least {low}", found, key, entry.place, suggestion(key, value, []))
    elif high is not None and not value <= high:
        report.wrong(f"at most {high}", found, key, entry.place)
    else:
        return True
    return False


def _fit(
    report: Report, option: object, entry: Entry, key: str, path: KeyPath, one_of_several: bool
) -> tuple[bool, object]:
    """Return whether a value matches an option of its type, and the converted value."""
    value, origin = entry.value, typing.get_origin(option)
    if option is Any:
        return True, plain(entry)
    if origin is typing.Literal:
        return any(value == word and type(value) is type(word) for word in typing.get_args(option)), value
    if origin is list:
        if not isinstance(value, list):
            return False, _BAD
        (inner,) = typing.get_args(option)
        items = [_value(report, inner, item, f"{key}.{n}", (*path, n)) for n, item in enumerate(value)]
        return True, _BAD if any(item is _BAD for item in items) else items
    if origin is dict:
        _, inner = typing.get_args(option)
        if not isinstance(value, dict):
            return (True, {}) if value is None and inner is Any else (False, _BAD)
        made = {name: _value(report, inner, item, f"{key}.{name}", (*path, name)) for name, item in value.items()}
        return True, _BAD if any(item is _BAD for item in made.values()) else made
    assert isinstance(option, type)
    if not is_dataclass(option):
        if option is str and isinstance(value, str) and value.startswith("~/"):
            value = str(Path(value).expanduser())
        return is_kind_of(value, option), value
    if not isinstance(value, dict) and (one_of_several or value is not None):
        return False, _BAD
    if one_of_several and issubclass(option, Target) and entry.value:
        is_target = any(f.name in entry.value for f in schema.keys(option))
        if not is_target and all(isinstance(item.value, dict) for item in entry.value.values()):
            return False, _BAD  # several targets by name
    section = read_section(report, option, entry, key, path)
    return True, _BAD if section is None else section


_BAD: object = object()


# ---- keys that contradict each other


def _report_contradictions(report: Report, config: schema.Config) -> None:
    """Report keys that are valid alone but contradict each other."""
    train, gpus = config.train, config.engine.gpus
    if isinstance(gpus, list) and len(set(gpus)) < len(gpus):
        report.wrong("different indexes", gpus, "engine.gpus")
    if not config.stages:
        report.fault("nothing to do: give at least one of train, validate, test, predict", "stages")
    if "train" in config.stages and train.num_epochs is None and train.max_steps is None:
        report.fault("missing: how long to train, for example `num_epochs: 10`", "train.num_epochs")
    for key, number in (
        ("train.val_every_n_epoch", train.val_every_n_epoch),
        ("train.checkpoint.every_n_epochs", train.checkpoint.every_n_epochs),
    ):
        if number is not None and not (0 < number <= 1 or (number > 1 and number % 1 == 0)):
            report.wrong("a whole number of epochs, or a fraction between 0 and 1", number, key)
    if train.limit_batches is not None and train.limit_batches.train == 0:
        allowed = "at least 1 batch, or a fraction above 0; to validate alone set `train.num_epochs=0`"
        report.wrong(allowed, train.limit_batches.train, "train.limit_batches.train")
    for name, part in vars(train.limit_batches).items() if train.limit_batches else ():
        if isinstance(part, float) and not 0 <= part <= 1:
            allowed = "a whole number of batches, or a fraction between 0 and 1"
            report.wrong(allowed, part, f"train.limit_batches.{name}")
