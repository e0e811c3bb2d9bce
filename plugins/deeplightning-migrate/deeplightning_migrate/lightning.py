"""`deeplightning migrate --from lightning-cli|hydra`: convert a Lightning project to a config that trains the same.

The files are merged into one tree with the line of each value. `class_path` and `_target_` become `type` and `params`,
and arguments of the Trainer become keys. What cannot be converted is reported with its line; nothing is imported.
"""

import contextlib
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deeplightning.config import other_tools, schema, short_names
from deeplightning.config.examine import OWN_LOADERS, check
from deeplightning.config.section_kinds import is_bound
from deeplightning.config.signature_check import Meanings
from deeplightning.config.source import Text, short
from deeplightning.config.target import is_reference, is_target
from deeplightning.config.tree import Entry, dump, entry_at, line, plain
from deeplightning.faults import ConfigError, Fault, upwards
from deeplightning.own_code import use_import_roots
from deeplightning.signatures import definition
from deeplightning.signatures.signature import Undecided, factory_of
from deeplightning_migrate import foreign_words
from deeplightning_migrate.cli_script import CliScript
from deeplightning_migrate.composed import MAX_FILES, SUBCOMMANDS, merge, read

BUILT_IN_CALLBACKS = {
    *("RichProgressBar", "TQDMProgressBar", "RichModelSummary", "ModelSummary", "LearningRateMonitor"),
    "DeviceStatsMonitor",
}
"""Callbacks that a run does not need, since it does the same."""
SAME_ARGUMENTS = {
    *("max_epochs", "max_steps", "num_nodes", "precision", "deterministic", "sync_batchnorm", "profiler"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "log_every_n_steps", "check_val_every_n_epoch"),
}
"""Arguments of the Trainer whose key here, as in `words.tsv`, takes the same value."""
NO_EFFECT = {
    **dict.fromkeys(("enable_model_summary", "benchmark", "detect_anomaly"), "trains the same"),
    "num_sanity_val_steps": "there is no sanity check; it changes a run only if validation changes the module",
    **dict.fromkeys(("enable_checkpointing", "default_root_dir"), "a run saves its checkpoints in its own folder"),
}
"""Arguments of the Trainer that do not change what is trained."""
CHECKPOINT = {
    "monitor": "monitor",
    "mode": "mode",
    "save_top_k": "save_top_k",
    "every_n_epochs": "every_n_epochs",
    "every_n_train_steps": "every_n_steps",
}
EARLY_STOP = {"monitor": "metric", "mode": "mode", "patience": "patience", "min_delta": "delta"}
UNUSED_ARGUMENTS = ("dirpath", "filename", "auto_insert_metric_name", "save_last", "verbose", "enable_version_counter")
"""Arguments of callbacks for file locations and output."""
TEMPLATE_SECTIONS = ("paths", "extras", "hydra", "debug", "optimized_metric", "hparams_search", "experiment", "local")
"""Sections of the Lightning-Hydra template that only its own script reads."""


# ---- conversion


class Conversion:
    """Conversion of a tree to a config.

    Attributes:
        config: nested mappings with our keys.
        places: for each of our keys, its source in the original files.
        faults: what cannot be converted.
        skipped: a sentence for each original setting that needs no key here.
        referenced: the original sections that references point to.
        partials: the key, the class, the parameter and the value of each argument with `_partial_: true`.
    """

    def __init__(self, root: Entry, system: str, script: CliScript):
        self.root, self.system, self.script = root, system, script
        self.config: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.faults = script.faults
        self.skipped: list[str] = []
        self.referenced: set[str] = set()
        self.partials: list[tuple[str, str, str, Entry]] = []

    def put(self, key: str, value: Any, entry: Entry) -> None:
        """Set one of our keys."""
        section = self.config
        *above, last = key.split(".")
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
        self.places[key] = entry.place

    def refuse(self, key: str, entry: Entry, message: str) -> None:
        self.faults.append(Fault(message, key, entry.place))

    def skip(self, key: str, entry: Entry, why: str) -> None:
        self.skipped.append(f"{key}: {line(plain(entry))[:100]} is left out: {why}")

    # ---- values

    def value(self, key: str, entry: Entry) -> Any:
        """Convert a value: a class with its arguments becomes a target, a reference the value that it points to."""
        if isinstance(entry.value, list):
            return [self.value(f"{key}.{number}", item) for number, item in enumerate(entry.value)]
        if isinstance(entry.value, dict):
            if _class_name(entry) is not None:
                return self.target(key, entry)
            items = {name: self.value(f"{key}.{name}", item) for name, item in entry.value.items()}
            if is_target(items) or is_reference(items):
                self.refuse(key, entry, "a mapping with `type` or `ref` builds an object here; make it in your class")
            return items
        if isinstance(entry.value, str) and "${" in entry.value:
            return self._resolve_references(key, entry)
        return entry.value

    def target(self, key: str, entry: Entry) -> dict[str, Any]:
        """Convert a class with its arguments to `type` and `params`."""
        name = self.script.full_name(str(_class_name(entry))).replace("lightning.pytorch.", "pytorch_lightning.")
        if "." not in name:
            name = _full_name(name)
        params = {}
        for argument, item in _arguments(entry):
            if argument == "_args_" or (argument == "_recursive_" and item.value is False):
                self.refuse(f"{key}.{argument}", item, "cannot be converted: name the arguments, nest their classes")
            elif argument not in ("_partial_", "_recursive_", "_convert_"):
                params[argument] = self.value(f"{key}.{argument}", item)
                if isinstance(item.value, dict) and (partial := item.value.get("_partial_")) and partial.value:
                    self.partials.append((f"{key}.{argument}", name, argument, item))
        return {"type": name, "params": params} if params else {"type": name}

    def _resolve_references(self, key: str, entry: Entry, depth: int = 0) -> Any:
        """Return the value of a text with its references resolved; those to environment variables are kept."""
        whole = re.fullmatch(r"\$\{([\w.]+)\}", entry.value)
        if whole and (found := self._referenced_entry(whole[1])) is not None and depth < MAX_FILES:
            if self.system == "lightning-cli" and file_of(found) != file_of(entry):
                message = (
                    "refers to a value of another file, which LightningCLI may read differently; write the value itself"
                )
                self.refuse(key, entry, message)
            is_text = isinstance(found.value, str) and "${" in found.value
            return self._resolve_references(key, found, depth + 1) if is_text else self.value(key, found)

        def text(match: re.Match[str]) -> str:
            found = self._referenced_entry(match[1])
            if found is None or isinstance(found.value, dict | list) or depth >= MAX_FILES:
                return match[0]
            inner = Entry(str(found.value), entry.place)
            return str(self._resolve_references(key, inner, depth + 1)) if "${" in inner.value else inner.value

        resolved = re.sub(r"\$\{([\w.]+)\}", text, entry.value)
        if rest := re.search(r"\$\{(?!oc\.env:)[^}]*\}?", resolved):
            self.refuse(key, entry, f"`{rest[0]}` has no value here; replace it by the value")
        return resolved

    def _referenced_entry(self, key: str) -> Entry | None:
        names = key.split(".")
        self.referenced.add(names[0])
        numbered = [int(name) if name.isdecimal() else name for name in names]
        return entry_at(self.root, names) or entry_at(self.root, numbered)

    # ---- sections

    def convert(self) -> None:
        """Convert every section."""
        items = dict(self.root.value)
        if self.system == "lightning-cli":
            items = self.script.complete_settings(self._subcommands(items))
            self.root = Entry(dict(items), self.root.place)
            seed, stages = items.pop("seed_everything", None), ["train"]
        else:
            seed = items.pop("seed", None)
            sections = {name for name, e in items.items() if isinstance(e.value, dict)}
            flags = {name: None if name in sections else items.pop(name, None) for name in ("train", "test")}
            stages = [name for name, e in flags.items() if (e is None and name == "train") or (e and e.value)]
        is_fixed = seed is not None and isinstance(seed.value, int) and not isinstance(seed.value, bool)
        self.put("seed", seed.value if seed is not None and is_fixed else None, seed or self.root)
        self.put("stages", stages, self.root)
        trainer = items.pop("trainer", Entry({}, self.root.place))
        arguments = dict(_arguments(trainer))
        if self.system == "hydra":
            for name in ("callbacks", "logger"):
                if (section := items.pop(name, None)) is not None and section.value is not None:
                    is_group = isinstance(section.value, dict) and _class_name(section) is None
                    several = [e for e in section.value.values() if _class_name(e)] if is_group else []
                    arguments[name] = Entry(several, section.place) if is_group else section
        for name in ("data", "datamodule", "model"):
            if name in items:
                self._module(name.removesuffix("module"), name, items.pop(name))
        if self.system == "lightning-cli":
            self._optimizer(items.pop("optimizer", None), items.pop("lr_scheduler", None))
        self._trainer(arguments, trainer)
        for name, entry in items.items():
            self._convert_other(name, entry)

    def _subcommands(self, items: dict[str, Entry]) -> dict[str, Entry]:
        """Return the settings of `fit`; those of the other subcommands must be the same."""
        for name in SUBCOMMANDS:
            section = items.get(name)
            if section is None or not isinstance(section.value, dict):
                continue
            del items[name]
            if name == "fit":
                items = merge(Entry(items, section.place), section).value
                continue
            fit = self.root.value.get("fit", Entry({}, "")).value
            for key, item in section.value.items():
                if key in ("trainer", "model", "data") and plain(fit.get(key, items.get(key, item))) != plain(item):
                    self.refuse(f"{name}.{key}", item, "differs from that of `fit`, but a config has one; remove it")
        return items

    def _module(self, section: str, name: str, entry: Entry) -> None:
        if _class_name(entry) is None:
            remedy = "write it as `class_path` with its arguments in `init_args`, or as `_target_`"
            self.refuse(name, entry, f"names no class; if your Python code passes it to LightningCLI, {remedy}")
            return
        self.put(f"{section}.module", self.target(name, entry), entry)

    def _optimizer(self, optimizer: Entry | None, schedule: Entry | None) -> None:
        """Convert the sections with which LightningCLI replaces the model's `configure_optimizers`."""
        if optimizer is None or optimizer.value is None:
            if schedule is not None and schedule.value is not None:
                self.skip("lr_scheduler", schedule, "LightningCLI reads it only together with `optimizer`")
            return
        if "model" not in self.config:
            return  # already reported
        params, place = {"module": self.config["model"]["module"]}, self.places["model.module"]
        for name, entry in (("optimizer", optimizer), ("lr_scheduler", schedule)):
            if entry is None or entry.value is None:
                continue
            if _class_name(entry) is None:
                self.refuse(name, entry, "names no class; write it as `class_path` with its arguments in `init_args`")
                continue
            params[name] = self.target(name, entry)
        wrapped = {"type": "deeplightning_migrate.configured.with_optimizer", "params": params}
        self.put("model.module", wrapped, optimizer)
        self.places["model.module.params.module"] = place
        if "data" not in self.config:
            self.put("data.module", {"type": OWN_LOADERS}, optimizer)

    def _convert_other(self, name: str, entry: Entry) -> None:
        if entry.value is None or name in ("config", "print_config", "subcommand"):
            return
        if name == "ckpt_path":
            self.put("train.resume_ckpt", self.value(name, entry), entry)
        elif name == "task_name" and self.system == "hydra":
            self.put("logger.params.experiment_name", self.value(name, entry), entry)
        elif name == "tags" and isinstance(entry.value, list):
            self.put("logger.params.tags", {str(tag.value): "true" for tag in entry.value}, entry)
        elif self.system == "hydra" and name in TEMPLATE_SECTIONS:
            self.skip(name, entry, "the template's own script reads it")
        elif name not in self.referenced:
            self.refuse(name, entry, "is not a section of Lightning: only your Python code reads it. Remove it")

    def add_check_faults(self, path: Path) -> None:
        """Add the errors that `check` finds in the config as a file at `path`, with the original lines."""
        text = Text(path.absolute(), dump({"version": schema.VERSION, **self.config}))
        for fault in check(text).faults:
            near = next((key for key in upwards(fault.key or "") if key in self.places), None)
            self.faults.append(replace(fault, place=self.places[near] if near else short(path)))
        meanings = Meanings()
        for key, name, argument, entry in self.partials:
            inner, params = str(_class_name(entry)), dict(_arguments(entry))
            with contextlib.suppress(ValueError, Undecided):  # `check` reports missing classes
                allowed = next((p.allowed for p in meanings.signature(name).parameters if p.name == argument), None)
                paths = meanings.of(inner).bases()[0] if meanings.of(inner).kind == "class" else []
                is_lacking = bool(meanings.signature(inner).lacking(params))
                if not is_bound(paths, is_lacking, factory_of(allowed)):
                    message = (
                        f"`_partial_` needs a parameter that is annotated as a callable; `{argument}` of {name} is not"
                    )
                    self.refuse(key, entry, message)

    # ---- the Trainer

    def _trainer(self, arguments: dict[str, Entry], trainer: Entry) -> None:
        known = {p.name: p for p in definition.look_up("pytorch_lightning.Trainer").signature().parameters}
        given = {
            name: entry
            for name, entry in arguments.items()
            if entry.value is not None and (name not in known or entry.value != known[name].default)
        }
        self._length(given, trainer)
        self._devices(given, trainer)
        self._validation(given)
        may_stop = self._callbacks(given.pop("callbacks", Entry([], "")))
        if (logger := given.pop("logger", None)) is not None and not isinstance(logger.value, bool):
            for number, item in enumerate(logger.value if isinstance(logger.value, list) else [logger]):
                self._logger(f"logger.{number}", item)
        for name, entry in given.items():
            key = f"trainer.{name}"
            if name not in known:
                self.refuse(key, entry, "is not an argument of Lightning's Trainer")
            elif name in NO_EFFECT:
                self.skip(key, entry, NO_EFFECT[name])
            elif name in SAME_ARGUMENTS:
                self._argument(name, self.value(key, entry), entry)
            elif name in ("min_epochs", "min_steps") and not (
                may_stop and (name == "min_steps" or self.value(key, entry) not in (0, 1))
            ):
                self.skip(key, entry, "nothing ends the training earlier")
            elif name == "enable_progress_bar":
                self.put("logger.progress", "bar" if self.value(key, entry) else "off", entry)
            elif name == "fast_dev_run" and entry.value is True:
                self.put("train.fast", True, entry)
            else:
                ours = str(foreign_words.ours(key) or "")
                why = f": {ours.removeprefix('none: ')}" if ours.startswith("none: ") and "remove" not in ours else ""
                self.refuse(
                    key, entry, f"{line(plain(entry))[:80]} has no key here{why}. Remove it, then migrate again"
                )
        clip = self.config.get("train", {}).get("gradient_clip", {})
        if "value" not in clip or clip["value"] == 0:
            self.config.get("train", {}).pop("gradient_clip", None)

    def _argument(self, name: str, value: Any, entry: Entry) -> None:
        key = str(other_tools.key_of(str(foreign_words.ours(f"trainer.{name}"))))
        meant = other_tools.value(key, value) if isinstance(value, str) and name == "profiler" else None
        if name == "deterministic" and value == "warn":
            self.refuse(f"trainer.{name}", entry, "`warn` has no counterpart; write true, which raises an error")
            return
        self.put(key, meant or value, entry)

    def _length(self, given: dict[str, Entry], trainer: Entry) -> None:
        """Convert the limits of the training. Without a limit, Lightning trains 1,000 epochs."""
        epochs, steps, time = (given.pop(name, None) for name in ("max_epochs", "max_steps", "max_time"))
        if time is not None:
            timer = {"type": "pytorch_lightning.callbacks.Timer", "params": {"duration": self.value("max_time", time)}}
            self.config.setdefault("train", {}).setdefault("callbacks", []).append(timer)
        if steps is not None:
            self.put("train.max_steps", self.value("trainer.max_steps", steps), steps)
        if epochs is None and steps is None and time is None:
            self.put("train.num_epochs", 1000, trainer)
        elif epochs is not None and epochs.value != -1:
            self.put("train.num_epochs", self.value("trainer.max_epochs", epochs), epochs)
        elif steps is None:
            self.refuse("trainer.max_epochs", epochs or trainer, "training needs a limit: set a number, or max_steps")

    def _devices(self, given: dict[str, Entry], trainer: Entry) -> None:
        kind, devices, strategy = (given.pop(name, None) for name in ("accelerator", "devices", "strategy"))
        accelerator = "auto" if kind is None else self.value("trainer.accelerator", kind)
        number: Any = "auto" if devices is None else self.value("trainer.devices", devices)
        if devices is not None and isinstance(number, str) and number != "auto":
            try:
                number = [int(index) for index in number.split(",") if index.strip()] if "," in number else int(number)
            except ValueError:
                self.refuse("trainer.devices", devices, f"{number!r} is not a number, numbers with commas, or auto")
        number = "auto" if number == -1 else number
        if accelerator == "auto" and number != "auto":
            message = (
                "with a number of devices, `auto` means GPUs on one machine and the CPU on another; write cpu or gpu"
            )
            self.refuse("trainer.accelerator", kind or devices or trainer, message)
        elif accelerator not in ("auto", "cpu", "gpu", "cuda"):
            self.refuse("trainer.accelerator", kind or trainer, f"`{accelerator}` is not supported; write cpu or gpu")
        self.put("engine.gpus", None if accelerator == "cpu" else number, kind or devices or trainer)
        if accelerator == "cpu" and number not in ("auto", 1):
            self.put("engine.processes", number, devices or trainer)
            self.put("engine.backend", "ddp", devices or trainer)
        if strategy is None:
            return
        name = self.value("trainer.strategy", strategy)
        backend = other_tools.value("engine.backend", name) or name
        if isinstance(name, str) and name.startswith("ddp_find_unused_parameters_"):
            self.put("engine.params", {"find_unused_parameters": name.endswith("true")}, strategy)
            backend = "ddp"
        if backend not in typing.get_args(schema.Backend):
            self.refuse("trainer.strategy", strategy, "has no key here; engine.backend takes ddp, fsdp or deepspeed_…")
        self.put("engine.backend", backend, strategy)

    def _validation(self, given: dict[str, Entry]) -> None:
        interval = given.pop("val_check_interval", None)
        if interval is None:
            return
        if isinstance(interval.value, float) and "check_val_every_n_epoch" not in given:
            self.put("train.val_every_n_epoch", interval.value, interval)
        else:
            message = (
                "a number of batches, or a value with check_val_every_n_epoch, has no key; write a share such as 0.5"
            )
            self.refuse("trainer.val_check_interval", interval, message)

    # ---- callbacks and loggers

    def _callbacks(self, section: Entry) -> bool:
        """Convert the callbacks; return whether one of them may end the training."""
        converted = self.config.setdefault("train", {}).setdefault("callbacks", [])
        for number, item in enumerate(section.value if isinstance(section.value, list) else [section]):
            key = f"trainer.callbacks.{number}"
            name = str(_class_name(item)).rpartition(".")[2]
            arguments = dict(_arguments(item))
            if name in BUILT_IN_CALLBACKS:
                self.skip(key, item, "a run shows and records this without a callback")
            elif name == "ModelCheckpoint" and self._fill_section("train.checkpoint", CHECKPOINT, arguments, item):
                if "every_n_train_steps" in arguments and "every_n_epochs" not in arguments:
                    self.put("train.checkpoint.every_n_epochs", None, item)
            elif name != "EarlyStopping" or not self._fill_section("train.early_stop", EARLY_STOP, arguments, item):
                converted.append(self._convert_callback(key, item))
        if not converted:
            del self.config["train"]["callbacks"]
        return bool(converted) or "early_stop" in self.config["train"]

    def _convert_callback(self, key: str, item: Entry) -> Any:
        """Convert a callback to an item of `train.callbacks`, without `dirpath`: a run has its own folder."""
        arguments = {name: entry for name, entry in _arguments(item) if name != "dirpath"}
        return self.target(key, _class_entry(_class_name(item), arguments, item.place))

    def _fill_section(self, section: str, keys: dict[str, str], arguments: dict[str, Entry], item: Entry) -> bool:
        """Convert a callback to its section, if that is unset and has a key for each argument; return whether it was
        converted."""
        name, _, last = section.partition(".")
        callback = definition.look_up(
            f"pytorch_lightning.callbacks.{'ModelCheckpoint' if last == 'checkpoint' else 'EarlyStopping'}"
        )
        defaults = {p.name: p.default for p in callback.signature().parameters}
        given = {
            argument: entry
            for argument, entry in arguments.items()
            if argument not in UNUSED_ARGUMENTS and (argument in keys or entry.value != defaults.get(argument))
        }
        if last in self.config.get(name, {}) or not set(given) <= {*keys} or "monitor" not in given:
            return False
        if (top := given.get("save_top_k")) is not None and (not isinstance(top.value, int) or top.value < 1):
            return False
        for argument, entry in given.items():
            if entry.value is not None:
                self.put(f"{section}.{keys[argument]}", self.value(argument, entry), entry)
        self.config[name].setdefault(last, {}).setdefault("mode", "min")
        return True

    def _logger(self, key: str, item: Entry) -> None:
        name = _class_name(item)
        if name is None:
            self.refuse(key, item, "names no class")
        elif name.rpartition(".")[2].lower() == "mlflowlogger":
            for argument, entry in _arguments(item):
                if argument in ("experiment_name", "tracking_uri", "run_name", "tags") and entry.value is not None:
                    self.put(f"logger.params.{argument}", self.value(argument, entry), entry)
                elif entry.value is not None:
                    self.skip(f"{key}.{argument}", entry, "the run's logger sets it")
        else:
            extra = self.config.setdefault("logger", {}).setdefault("extra", [])
            arguments = dict(_arguments(item))
            if (folder := arguments.get("save_dir")) is not None and "${" in str(folder.value):
                arguments["save_dir"] = Entry("logs", folder.place)
                self.skip(f"{key}.save_dir", folder, "this logger writes to `logs`")
            given = {argument: entry for argument, entry in arguments.items() if entry.value is not None}
            extra.append(self.target(key, _class_entry(name, given)))


def convert(files: Sequence[Path], system: str) -> str:
    """Return the config of a project as YAML text, with a comment for each setting that is left out.

    Args:
        files: configs, the later over the earlier; for LightningCLI also the Python file that calls it.

    Raises:
        ConfigError: a file cannot be read, or values cannot be converted; it lists all of them with their lines.
    """
    scripts = [file for file in files if file.suffix == ".py" and system == "lightning-cli"]
    configs = [file for file in files if file not in scripts]
    folders = [*(file.parent for file in files), Path.cwd()] if system == "lightning-cli" else []
    use_import_roots(*folders)  # the defaults of linked arguments are read from there
    result = Conversion(read(configs, system), system, CliScript(folders, scripts))
    result.convert()
    if not result.faults:
        result.add_check_faults(files[0])
    if result.faults:
        raise ConfigError(result.faults)
    skipped = "".join(f"# {' '.join(text.split())}\n" for text in result.skipped)
    order = ("seed", "stages", "data", "model", "engine", "train", "logger")
    config = {"version": schema.VERSION} | {name: result.config[name] for name in order if name in result.config}
    return f"# Converted from {', '.join(file.name for file in files)} ({system}).\n{dump(config)}{skipped}"


def file_of(entry: Entry) -> str:
    """Return the file that set a value."""
    return entry.place.rsplit(":", 2)[0]


def _full_name(name: str) -> str:
    """Return the full name of a class that LightningCLI finds by its short name; return other names unchanged."""
    if name == "ReduceLROnPlateau":
        return f"pytorch_lightning.cli.{name}"
    for role in ("model.optimizer", "model.scheduler", "train.callbacks"):
        with contextlib.suppress(ValueError):  # no such class, or several
            if (found := short_names.full_name(role, name)) is not None:
                return found
    return name


def _class_name(entry: Entry) -> str | None:
    """Return the class name in a mapping of LightningCLI or Hydra, or None."""
    items = entry.value if isinstance(entry.value, dict) else {}
    found = items.get("class_path", items.get("_target_"))
    return found.value if found is not None and isinstance(found.value, str) else None


def _class_entry(name: str | None, arguments: dict[str, Entry], place: str = "") -> Entry:
    """Return a class with its arguments in LightningCLI's format."""
    return Entry({"class_path": Entry(name, place), "init_args": Entry(arguments, place)}, place)


def _arguments(entry: Entry) -> Iterator[tuple[Any, Entry]]:
    """Yield the arguments of a class, which are beside `_target_` or in `init_args` and `dict_kwargs`."""
    items = entry.value if isinstance(entry.value, dict) else {}
    if "class_path" in items:
        for name in ("init_args", "dict_kwargs"):
            yield from (items[name].value or {}).items() if name in items else ()
    else:
        yield from ((name, item) for name, item in items.items() if name != "_target_")
