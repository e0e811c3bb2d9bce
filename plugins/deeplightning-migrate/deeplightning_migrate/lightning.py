"""`deeplightning migrate --from lightning-cli|hydra`: a project of Lightning becomes a config that trains the same.

The files become one tree whose values know their lines. `class_path` and `_target_` become `type` and `params`, and the
arguments of the Trainer become keys. What cannot be converted is a fault at its line; nothing is imported.
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
from deeplightning.signatures import definition
from deeplightning.signatures.signature import Undecided, factory_of
from deeplightning_migrate import foreign_words
from deeplightning_migrate.cli_script import CliScript
from deeplightning_migrate.composed import MAX_FILES, SUBCOMMANDS, over, read

SPARE = {
    *("RichProgressBar", "TQDMProgressBar", "RichModelSummary", "ModelSummary", "LearningRateMonitor"),
    "DeviceStatsMonitor",
}
"""Callbacks whose work a run does anyway."""
ARGUMENTS = {
    *("max_epochs", "max_steps", "num_nodes", "precision", "deterministic", "sync_batchnorm", "profiler"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "log_every_n_steps", "check_val_every_n_epoch"),
}
"""Arguments of the Trainer whose key of ours, in the table of words, takes the same value."""
LEFT_OUT = {
    **dict.fromkeys(("num_sanity_val_steps", "enable_model_summary", "benchmark", "detect_anomaly"), "trains the same"),
    **dict.fromkeys(("enable_checkpointing", "default_root_dir"), "a run keeps its checkpoints in its own folder"),
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
UNUSED = ("dirpath", "filename", "auto_insert_metric_name", "save_last", "verbose", "enable_version_counter")
"""Arguments of callbacks that say where files lie or what is printed."""
OF_TEMPLATE = ("paths", "extras", "hydra", "debug", "optimized_metric", "hparams_search", "experiment", "local")
"""Sections of the Lightning-Hydra template that its own script reads, and no training."""


# ---- converting


class Conversion:
    """The config that is made of a tree.

    Attributes:
        config: nested mappings in our words.
        places: the place in their files that set a key of ours.
        faults: what cannot be converted.
        left: a sentence for each setting of theirs that needs no key here.
        used: the sections of theirs that references lead to.
        partials: the key, the class, the parameter and the value of each argument with `_partial_: true`.
    """

    def __init__(self, root: Entry, system: str, script: CliScript):
        self.root, self.system, self.script = root, system, script
        self.config: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.faults = script.faults
        self.left: list[str] = []
        self.used: set[str] = set()
        self.partials: list[tuple[str, str, str, Entry]] = []

    def put(self, key: str, value: Any, entry: Entry) -> None:
        """Set a key of ours."""
        section = self.config
        *above, last = key.split(".")
        for name in above:
            section = section.setdefault(name, {})
        section[last] = value
        self.places[key] = entry.place

    def refuse(self, key: str, entry: Entry, message: str) -> None:
        self.faults.append(Fault(message, key, entry.place))

    def leave(self, key: str, entry: Entry, why: str) -> None:
        self.left.append(f"{key}: {line(plain(entry))[:100]} is left out: {why}")

    # ---- values

    def value(self, key: str, entry: Entry) -> Any:
        """Return a value of theirs as one of ours: a class with its arguments is a target, a reference its value."""
        if isinstance(entry.value, list):
            return [self.value(f"{key}.{number}", item) for number, item in enumerate(entry.value)]
        if isinstance(entry.value, dict):
            if _class(entry) is not None:
                return self.target(key, entry)
            made = {name: self.value(f"{key}.{name}", item) for name, item in entry.value.items()}
            if is_target(made) or is_reference(made):
                self.refuse(
                    key, entry, "a mapping of `type` or `ref` builds a class here; give it to the class by name"
                )
            return made
        if isinstance(entry.value, str) and "${" in entry.value:
            return self._referred(key, entry)
        return entry.value

    def target(self, key: str, entry: Entry) -> dict[str, Any]:
        """Return a class with its arguments as `type` and `params`."""
        name = self.script.full_name(str(_class(entry))).replace("lightning.pytorch.", "pytorch_lightning.")
        if "." not in name:
            name = _with_module(name)
        params = {}
        for word, item in _arguments(entry):
            if word == "_args_" or (word == "_recursive_" and item.value is False):
                self.refuse(f"{key}.{word}", item, "cannot be converted: name the arguments, and nest their classes")
            elif word not in ("_partial_", "_recursive_", "_convert_"):
                params[word] = self.value(f"{key}.{word}", item)
                if isinstance(item.value, dict) and (partial := item.value.get("_partial_")) and partial.value:
                    self.partials.append((f"{key}.{word}", name, word, item))
        return {"type": name, "params": params} if params else {"type": name}

    def _referred(self, key: str, entry: Entry, depth: int = 0) -> Any:
        """Return the value that a text with references stands for; a variable of the environment stays a reference."""
        whole = re.fullmatch(r"\$\{([\w.]+)\}", entry.value)
        if whole and (found := self._at(whole[1])) is not None and depth < MAX_FILES:
            if self.system == "lightning-cli" and file_of(found) != file_of(entry):
                message = (
                    "refers to a value of another file, which LightningCLI reads by its parser mode; write the value"
                )
                self.refuse(key, entry, message)
            is_text = isinstance(found.value, str) and "${" in found.value
            return self._referred(key, found, depth + 1) if is_text else self.value(key, found)

        def text(match: re.Match[str]) -> str:
            found = self._at(match[1])
            if found is None or isinstance(found.value, dict | list) or depth >= MAX_FILES:
                return match[0]
            made = Entry(str(found.value), entry.place)
            return str(self._referred(key, made, depth + 1)) if "${" in made.value else made.value

        made = re.sub(r"\$\{([\w.]+)\}", text, entry.value)
        if rest := re.search(r"\$\{(?!oc\.env:)[^}]*\}?", made):
            self.refuse(key, entry, f"`{rest[0]}` has no value here; write the value in its place")
        return made

    def _at(self, key: str) -> Entry | None:
        names = key.split(".")
        self.used.add(names[0])
        numbered = [int(name) if name.isdecimal() else name for name in names]
        return entry_at(self.root, names) or entry_at(self.root, numbered)

    # ---- sections

    def convert(self) -> None:
        """Convert every section."""
        items = dict(self.root.value)
        if self.system == "lightning-cli":
            items = self.script.complete(self._subcommands(items))
            self.root = Entry(dict(items), self.root.place)
            seed, stages = items.pop("seed_everything", None), ["train"]
        else:
            seed = items.pop("seed", None)
            flags = {name: items.pop(name, None) for name in ("train", "test")}
            stages = [name for name, e in flags.items() if (e is None and name == "train") or (e and e.value)]
        fixed = seed is not None and isinstance(seed.value, int) and not isinstance(seed.value, bool)
        self.put("seed", seed.value if seed is not None and fixed else None, seed or self.root)
        self.put("stages", stages, self.root)
        trainer = items.pop("trainer", Entry({}, self.root.place))
        arguments = dict(_arguments(trainer))
        if self.system == "hydra":
            for name in ("callbacks", "logger"):
                if (section := items.pop(name, None)) is not None and isinstance(section.value, dict):
                    several = {key: e for key, e in section.value.items() if isinstance(e.value, dict)}
                    arguments[name] = section if _class(section) else Entry([*several.values()], section.place)
        for name in ("data", "datamodule", "model"):
            if name in items:
                self._module(name.removesuffix("module"), name, items.pop(name))
        if self.system == "lightning-cli":
            self._optimizer(items.pop("optimizer", None), items.pop("lr_scheduler", None))
        self._trainer(arguments, trainer)
        for name, entry in items.items():
            self._other(name, entry)

    def _subcommands(self, items: dict[str, Entry]) -> dict[str, Entry]:
        """Return the settings of `fit`; other subcommands may have no others."""
        for name in SUBCOMMANDS:
            section = items.get(name)
            if section is None or not isinstance(section.value, dict):
                continue
            del items[name]
            if name == "fit":
                items = over(Entry(items, section.place), section).value
                continue
            fit = self.root.value.get("fit", Entry({}, "")).value
            for key, item in section.value.items():
                if key in ("trainer", "model", "data") and plain(fit.get(key, items.get(key, item))) != plain(item):
                    self.refuse(f"{name}.{key}", item, "is other than that of `fit`, and a config has one; remove it")
        return items

    def _module(self, section: str, name: str, entry: Entry) -> None:
        if _class(entry) is None:
            remedy = "write it as `class_path` with its arguments in `init_args`, or as `_target_`"
            self.refuse(name, entry, f"names no class, which your Python code gives to LightningCLI; {remedy}")
            return
        self.put(f"{section}.module", self.target(name, entry), entry)

    def _optimizer(self, optimizer: Entry | None, schedule: Entry | None) -> None:
        """Convert the sections by which LightningCLI replaces the `configure_optimizers` of the model."""
        if optimizer is None or optimizer.value is None:
            if schedule is not None and schedule.value is not None:
                self.leave("lr_scheduler", schedule, "LightningCLI reads it only beside `optimizer`")
            return
        if "model" not in self.config:
            return  # a fault already
        params, place = {"module": self.config["model"]["module"]}, self.places["model.module"]
        for name, entry in (("optimizer", optimizer), ("lr_scheduler", schedule)):
            if entry is None or entry.value is None:
                continue
            if _class(entry) is None:
                self.refuse(name, entry, "names no class; write it as `class_path` with its arguments in `init_args`")
                continue
            params[name] = self.target(name, entry)
        wrapped = {"type": "deeplightning_migrate.configured.with_optimizer", "params": params}
        self.put("model.module", wrapped, optimizer)
        self.places["model.module.params.module"] = place
        if "data" not in self.config:
            self.put("data.module", {"type": OWN_LOADERS}, optimizer)

    def _other(self, name: str, entry: Entry) -> None:
        if entry.value is None or name in ("config", "print_config", "subcommand"):
            return
        if name == "ckpt_path":
            self.put("train.resume_ckpt", self.value(name, entry), entry)
        elif name == "task_name" and self.system == "hydra":
            self.put("logger.params.experiment_name", self.value(name, entry), entry)
        elif name == "tags" and isinstance(entry.value, list):
            self.put("logger.params.tags", {str(tag.value): "true" for tag in entry.value}, entry)
        elif self.system == "hydra" and name in OF_TEMPLATE:
            self.leave(name, entry, "the template's own script reads it")
        elif name not in self.used:
            self.refuse(name, entry, "is not a section of Lightning's: only your Python code reads it. Remove it")

    def judge(self, path: Path) -> None:
        """Add what `check` finds wrong with the config as a file at `path`, at the lines of theirs."""
        text = Text(path.absolute(), dump({"version": schema.VERSION, **self.config}))
        for fault in check(text).faults:
            near = next((key for key in upwards(fault.key or "") if key in self.places), None)
            self.faults.append(replace(fault, place=self.places[near] if near else short(path)))
        meanings = Meanings()
        for key, name, word, entry in self.partials:
            inner, params = str(_class(entry)), dict(_arguments(entry))
            with contextlib.suppress(ValueError, Undecided):  # `check` has reported what is not there
                wanted = next((p.allowed for p in meanings.signature(name).parameters if p.name == word), None)
                paths = meanings.of(inner).bases()[0] if meanings.of(inner).kind == "class" else []
                is_lacking = bool(meanings.signature(inner).lacking(params))
                if not is_bound(paths, is_lacking, factory_of(wanted)):
                    message = (
                        f"`_partial_` needs a parameter that is annotated as a callable; `{word}` of {name} is not"
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
        stops = self._callbacks(given.pop("callbacks", Entry([], "")))
        if (logger := given.pop("logger", None)) is not None and not isinstance(logger.value, bool):
            for number, item in enumerate(logger.value if isinstance(logger.value, list) else [logger]):
                self._logger(f"logger.{number}", item)
        for name, entry in given.items():
            key = f"trainer.{name}"
            if name not in known:
                self.refuse(key, entry, "is not an argument of Lightning's Trainer")
            elif name in LEFT_OUT:
                self.leave(key, entry, LEFT_OUT[name])
            elif name in ARGUMENTS:
                self._argument(name, self.value(key, entry), entry)
            elif name in ("min_epochs", "min_steps") and not (stops and (name == "min_steps" or entry.value > 1)):
                self.leave(key, entry, "nothing ends the training earlier")
            elif name == "enable_progress_bar":
                self.put("logger.progress", "off", entry)
            elif name == "fast_dev_run" and entry.value is True:
                self.put("train.fast", True, entry)
            else:
                found = str(foreign_words.ours(key) or "")
                why = (
                    f": {found.removeprefix('none: ')}" if found.startswith("none: ") and "remove" not in found else ""
                )
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
            self.refuse(f"trainer.{name}", entry, "`warn` has no counterpart; write true, which ends the run instead")
            return
        self.put(key, meant or value, entry)

    def _length(self, given: dict[str, Entry], trainer: Entry) -> None:
        """Convert what ends the training. Without any end Lightning takes 1,000 epochs."""
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
            self.refuse("trainer.max_epochs", epochs or trainer, "a training needs an end: a number, or max_steps")

    def _devices(self, given: dict[str, Entry], trainer: Entry) -> None:
        kind, devices, strategy = (given.pop(name, None) for name in ("accelerator", "devices", "strategy"))
        where = "auto" if kind is None else self.value("trainer.accelerator", kind)
        number: Any = "auto" if devices is None else self.value("trainer.devices", devices)
        if isinstance(number, str) and number != "auto":
            number = [int(word) for word in number.split(",") if word.strip()] if "," in number else int(number)
        number = "auto" if number == -1 else number
        if where == "auto" and number != "auto":
            message = (
                "with a number of devices, `auto` is a GPU on one machine and the CPU on another: write cpu or gpu"
            )
            self.refuse("trainer.accelerator", kind or devices or trainer, message)
        elif where not in ("auto", "cpu", "gpu", "cuda"):
            self.refuse("trainer.accelerator", kind or trainer, f"there is none for `{where}` here; write cpu or gpu")
        self.put("engine.gpus", None if where == "cpu" else number, kind or devices or trainer)
        if where == "cpu" and number not in ("auto", 1):
            self.put("engine.processes", number, devices or trainer)
            self.put("engine.backend", "ddp", devices or trainer)
        if strategy is None:
            return
        word = self.value("trainer.strategy", strategy)
        backend = other_tools.value("engine.backend", word) or word
        if isinstance(word, str) and word.startswith("ddp_find_unused_parameters_"):
            self.put("engine.params", {"find_unused_parameters": word.endswith("true")}, strategy)
            backend = "ddp"
        if backend not in typing.get_args(schema.Backend):
            self.refuse("trainer.strategy", strategy, "has no key here; engine.backend takes ddp, fsdp or deepspeed_…")
        self.put("engine.backend", backend, strategy)

    def _validation(self, given: dict[str, Entry]) -> None:
        share = given.pop("val_check_interval", None)
        if share is None:
            return
        if isinstance(share.value, float) and "check_val_every_n_epoch" not in given:
            self.put("train.val_every_n_epoch", share.value, share)
        else:
            message = (
                "a number of batches, or one beside check_val_every_n_epoch, has no key; write a share such as 0.5"
            )
            self.refuse("trainer.val_check_interval", share, message)

    # ---- callbacks and loggers

    def _callbacks(self, section: Entry) -> bool:
        """Convert the callbacks; return whether one of them may end the training."""
        own = self.config.setdefault("train", {}).setdefault("callbacks", [])
        for number, item in enumerate(section.value if isinstance(section.value, list) else [section]):
            key = f"trainer.callbacks.{number}"
            name = str(_class(item)).rpartition(".")[2]
            arguments = dict(_arguments(item))
            if name in SPARE:
                self.leave(key, item, "the run shows and records this without a callback")
            elif name == "ModelCheckpoint" and self._fits("train.checkpoint", CHECKPOINT, arguments, item):
                if "every_n_train_steps" in arguments and "every_n_epochs" not in arguments:
                    self.put("train.checkpoint.every_n_epochs", None, item)
            elif name != "EarlyStopping" or not self._fits("train.early_stop", EARLY_STOP, arguments, item):
                own.append(self._own(key, item))
        if not own:
            del self.config["train"]["callbacks"]
        return bool(own) or "early_stop" in self.config["train"]

    def _own(self, key: str, item: Entry) -> Any:
        """Return a callback as one of `train.callbacks`, without the folder that a run has itself."""
        kept = {name: entry for name, entry in _arguments(item) if name != "dirpath"}
        return self.target(key, _called(_class(item), kept, item.place))

    def _fits(self, section: str, words: dict[str, str], arguments: dict[str, Entry], item: Entry) -> bool:
        """Convert a callback that has a section of its own, if that is free and has all that is set; whether it was."""
        name, _, last = section.partition(".")
        own = definition.look_up(
            f"pytorch_lightning.callbacks.{'ModelCheckpoint' if last == 'checkpoint' else 'EarlyStopping'}"
        )
        defaults = {p.name: p.default for p in own.signature().parameters}
        given = {
            word: entry
            for word, entry in arguments.items()
            if word not in UNUSED and (word in words or entry.value != defaults.get(word))
        }
        if last in self.config.get(name, {}) or not set(given) <= {*words} or "monitor" not in given:
            return False
        if (top := given.get("save_top_k")) is not None and (not isinstance(top.value, int) or top.value < 1):
            return False
        for word, entry in given.items():
            if entry.value is not None:
                self.put(f"{section}.{words[word]}", self.value(word, entry), entry)
        self.config[name][last].setdefault("mode", "min")
        return True

    def _logger(self, key: str, item: Entry) -> None:
        name = _class(item)
        if name is None:
            self.refuse(key, item, "names no class")
        elif name.rpartition(".")[2].lower() == "mlflowlogger":
            for word, entry in _arguments(item):
                if word in ("experiment_name", "tracking_uri", "run_name", "tags") and entry.value is not None:
                    self.put(f"logger.params.{word}", self.value(word, entry), entry)
                elif entry.value is not None:
                    self.leave(f"{key}.{word}", entry, "the run's logger sets it")
        else:
            extra = self.config.setdefault("logger", {}).setdefault("extra", [])
            arguments = dict(_arguments(item))
            if (folder := arguments.get("save_dir")) is not None and "${" in str(folder.value):
                arguments["save_dir"] = Entry("logs", folder.place)
                self.leave(f"{key}.save_dir", folder, "this logger writes to `logs`")
            given = {word: entry for word, entry in arguments.items() if entry.value is not None}
            extra.append(self.target(key, _called(name, given)))


def convert(files: Sequence[Path], system: str) -> str:
    """Return the config of a project as YAML text, with a comment for each setting that is left out.

    Args:
        files: configs, the later over the earlier; of LightningCLI also the Python file that calls it.

    Raises:
        ConfigError: a file cannot be read; or with every value that cannot be converted, each with its line.
    """
    scripts = [file for file in files if file.suffix == ".py" and system == "lightning-cli"]
    configs = [file for file in files if file not in scripts]
    folders = [*(file.parent for file in files), Path.cwd()] if system == "lightning-cli" else []
    made = Conversion(read(configs, system), system, CliScript(folders, scripts))
    made.convert()
    if not made.faults:
        made.judge(files[0])
    if made.faults:
        raise ConfigError(made.faults)
    left = "".join(f"# {' '.join(text.split())}\n" for text in made.left)
    order = ("seed", "stages", "data", "model", "engine", "train", "logger")
    config = {"version": schema.VERSION} | {name: made.config[name] for name in order if name in made.config}
    return f"# Made from {', '.join(file.name for file in files)} ({system}).\n{dump(config)}{left}"


def file_of(entry: Entry) -> str:
    """Return the file that set a value."""
    return entry.place.rsplit(":", 2)[0]


def _with_module(name: str) -> str:
    """Return the full name of a class that LightningCLI finds by its name alone; another name as it is."""
    if name == "ReduceLROnPlateau":
        return f"pytorch_lightning.cli.{name}"
    for role in ("model.optimizer", "model.scheduler", "train.callbacks"):
        with contextlib.suppress(ValueError):  # no such class, or several
            if (found := short_names.full_name(role, name)) is not None:
                return found
    return name


def _class(entry: Entry) -> str | None:
    """Return the class that a mapping names, as LightningCLI or Hydra has it."""
    items = entry.value if isinstance(entry.value, dict) else {}
    found = items.get("class_path", items.get("_target_"))
    return found.value if found is not None and isinstance(found.value, str) else None


def _called(name: str | None, arguments: dict[str, Entry], place: str = "") -> Entry:
    """Return a class with its arguments as LightningCLI has it."""
    return Entry({"class_path": Entry(name, place), "init_args": Entry(arguments, place)}, place)


def _arguments(entry: Entry) -> Iterator[tuple[Any, Entry]]:
    """Yield the arguments beside or below a class."""
    items = entry.value if isinstance(entry.value, dict) else {}
    if "class_path" in items:
        for name in ("init_args", "dict_kwargs"):
            yield from (items[name].value or {}).items() if name in items else ()
    else:
        yield from ((name, item) for name, item in items.items() if name != "_target_")
