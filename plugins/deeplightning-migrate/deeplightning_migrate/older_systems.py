"""`deeplightning migrate --from SYSTEM FILE…`: convert a config of another system, as far as possible.
`lightning` converts those of LightningCLI and Hydra completely.

The file is read as nested mappings (`reading`), its keys are looked up in `foreign_words`, and `check` finds what is
still missing. Each line that needs review has a comment.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deeplightning.cli.init import write_new
from deeplightning.config import other_tools
from deeplightning.config.examine import check
from deeplightning.config.schema import VERSION
from deeplightning.config.tree import dump, line, scalar
from deeplightning_migrate import foreign_words
from deeplightning_migrate.reading import Call, read_python, read_yaml

LOSSES = ("loss", "loss_fn", "loss_creator", "criterion")

FLAGS: dict[str, tuple[str, dict[bool, Any]]] = {
    "use_gpu": ("engine.gpus", {True: "auto", False: None}),
    "gpu": ("engine.gpus", {True: "auto", False: None}),
    "use_fp16": ("engine.precision", {True: 16, False: 32}),
    "use_native_fp16": ("engine.precision", {True: 16, False: 32}),
    "is_distributed": ("engine.backend", {True: "ddp", False: None}),
    "use_fairscale_optimizer_sharding": ("engine.backend", {True: "deepspeed_stage_1", False: None}),
    "use_fairscale_model_sharding": ("engine.backend", {True: "fsdp", False: None}),
}
"""Our key for a flag of another system, and our value for each of its values."""


@dataclass
class Conversion:
    """The converted config, and notes for review.

    Attributes:
        config: nested mappings with our keys.
        remarks: sentences for each of our keys that needs review.
        skipped: a sentence for each original key that has none here.
        devices: the number of GPUs or CPU processes; None: not set.
    """

    system: str
    config: dict[str, Any] = field(default_factory=dict)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    devices: Any = None

    def walk(self, key: str, value: Any) -> None:
        """Convert the value at a dotted key of the other system."""
        if self._convert_special(key, value):
            return
        if isinstance(value, Call):
            self._convert_call(key, value)
        elif isinstance(value, dict) and value:
            for name, item in value.items():
                self.walk(f"{key}.{name}".lstrip("."), item)
        else:
            self._convert_value(key, value)

    def _convert_special(self, key: str, value: Any) -> bool:
        """Convert a setting that needs more than another key; return whether it is one of these."""
        last = key.rpartition(".")[2]
        if key == "seed":
            self.put("seed", value)
        elif last in LOSSES and isinstance(value, Call | str) and "." in getattr(value, "name", str(value)):
            call = value if isinstance(value, Call) else Call(value)
            self.put("model.loss.type", call.name)
            self.put("model.loss.params", _params(call.arguments))
        elif key == "model" and isinstance(value, Call):
            self._convert_call("model_creator", value)
        elif isinstance(value, bool) and last in FLAGS:
            ours, values = FLAGS[last]
            section, name = ours.split(".")
            current = self.config.setdefault(section, {})
            if current.get(name) == values[False]:  # several flags set one key: one that is on wins
                current.pop(name, None)
            if value or name not in current:
                self.put(ours, values[value])
        elif key == "num_workers" and self.system == "raysgd":
            self.devices = value
        elif key == "warmup_proportion":
            self.put("model.scheduler.warmup", value)
        elif key == "log_steps_ratio" and isinstance(value, int | float) and value > 0:
            self.put("logger.log_every_n_steps", {"per_epoch": max(1, round(1 / value))})
        elif key == "is_dev_file":
            self.skipped.append(f"{key}: {_shorten(value)} is left out: validation runs with training")
        else:
            return False
        return True

    def set_device_count(self) -> None:
        """Set the number of GPUs or CPU processes, once all settings are known."""
        if self.devices is None:
            return
        engine = self.config.setdefault("engine", {})
        if engine.get("gpus") is not None:
            engine["gpus"] = self.devices
        elif isinstance(self.devices, int) and self.devices > 1:
            engine |= {"processes": self.devices, "backend": engine.get("backend") or "ddp"}

    def _convert_value(self, key: str, value: Any) -> None:
        found = foreign_words.ours(key)
        if found is None:
            self.skipped.append(f"{key}: {_shorten(value)} has no known key here")
        elif found.startswith("none:"):
            self.skipped.append(f"{key}: {_shorten(value)} is left out: {found.removeprefix('none: ')}")
        else:
            ours = str(other_tools.key_of(found)).lstrip(".")
            remark = re.search(r"\((.*)\)$", found)
            self.put(ours, value, f"was {key}: {_shorten(value)}" + (f"; {remark[1]}" if remark else ""), bool(remark))

    def put(self, key: str, value: Any, origin: str = "", remark: bool = False) -> None:
        """Set one of our keys; a value that cannot be set there is noted for review."""
        if isinstance(value, str) and (target := other_tools.class_of(key.removesuffix(".type"), value)):
            key, value = f"{key.removesuffix('.type')}.type", target
        elif (ours := other_tools.value(key, value)) is not None:
            if "." in ours and key != "engine.precision":
                self.skipped.append(f"{origin}: here it is called {ours}")
                return
            value = _parse_value(ours)
        section = self.config
        *above, last = key.split(".")
        for name in above:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                self.skipped.append(f"{origin}: {key} cannot be set, since {'.'.join(above)} is not a section")
                return
        if last in section and section[last] != value and not (isinstance(section[last], dict) and value == {}):
            self.skipped.append(f"{origin}: {key} is already {_shorten(section[last])}")
            return
        section.setdefault(last, value)
        if remark:
            self.remarks.setdefault(key, []).append(origin)

    def _convert_call(self, key: str, call: Call) -> None:
        """Convert a class or function with its arguments."""
        if call.name.rpartition(".")[2] == "Trainer" or key in ("trainer", "Stoke", "TorchTrainer", "PyTorchTrainer"):
            for name, value in call.arguments.items():
                self.walk(name, value)
            return
        found = (
            "data.module" if key in ("data", "datamodule") else other_tools.key_of(foreign_words.ours(key) or "none:")
        )
        if found is None:
            self.skipped.append(f"{key}: {call.name} has no known key here")
            return
        found = found.removesuffix(".type")
        self.put(f"{found}.type", call.name)
        if call.positional:
            self.remarks.setdefault(f"{found}.type", []).append(
                f"TODO pass its positional arguments by name: {', '.join(map(str, call.positional))}"
            )
        self.put(f"{found}.params", _params(call.arguments))


def _parse_value(text: str) -> Any:
    if text.startswith("["):
        return [scalar(word.strip()) for word in text.strip("[]").split(",")]
    return scalar(text)


def _shorten(value: Any) -> str:
    return line(_params(value))[:100]


def _params(value: Any) -> Any:
    """Return arguments as plain values: a call becomes a target."""
    if isinstance(value, Call):
        return {"type": value.name, "params": _params(value.arguments)}
    if isinstance(value, dict):
        return {str(name): _params(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_params(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def convert_file(path: Path, system: str) -> Conversion:
    """Convert a file of another system.

    Raises:
        ConfigError: it cannot be read.
    """
    conversion = Conversion(system)
    theirs = read_python(path) if path.suffix == ".py" else read_yaml(path)
    for name, value in theirs.items():
        # The table has the keys in these sections without their section.
        if isinstance(value, dict) and name in ("data-params", "transformers-params", "dist-params"):
            for key, item in value.items():
                conversion.walk(str(key), item)
        else:
            conversion.walk(str(name), value)
    conversion.set_device_count()
    return conversion


def text_from(path: Path, system: str) -> str:
    """Return the converted config as YAML text, with comments.

    Raises:
        ConfigError: the file cannot be read.
    """
    result = convert_file(path, system)
    order = ("seed", "stages", "data", "model", "engine", "train", "test", "logger", "tune", "serve")
    config = {name: result.config[name] for name in order if name in result.config}
    config |= result.config
    remarks = {key: [*texts] for key, texts in result.remarks.items()}
    result.skipped = [text if " is left out: " in text else f"TODO {text}" for text in result.skipped]
    for fault in check({"version": VERSION, **config}).faults:
        remarks.setdefault(fault.key or "", []).append(f"TODO {fault.message}")
    return _with_comments({"version": VERSION, **config}, remarks, result.skipped, f"{path.name} ({system})")


def _with_comments(config: dict[str, Any], remarks: dict[str, list[str]], skipped: list[str], origin: str) -> str:
    """Return YAML text with each remark above the line of its key; the others follow at the end."""
    lines, path, placed = [], list[tuple[int, str]](), set[str]()
    for row in dump(config).splitlines():
        if match := re.match(r"( *)([\w~.-]+):", row):
            indent = len(match[1])
            path = [*[part for part in path if part[0] < indent], (indent, match[2])]
            key = ".".join(name for _, name in path)
            if key in remarks and key not in placed:
                placed.add(key)
                lines += [f"{match[1]}# {_one_line(text)}" for text in remarks[key]]
        lines.append(row)
    rest = []
    for key in remarks:
        where = f"{key}: " if key else ""
        rest += [f"# TODO {where}{_one_line(text).removeprefix('TODO ')}" for text in remarks[key] if key not in placed]
    rest += [f"# {_one_line(text)}" for text in skipped]
    head = [f"# Converted from {origin}; review the lines with TODO."]
    return "\n".join([*head, *lines, *rest]) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def convert(files: Sequence[Path], system: str, write: bool) -> str:
    """Return what the verb prints: the configs, or the paths of the new files. Files of LightningCLI or Hydra form one
    project, in which later files take precedence.

    Raises:
        ConfigError: a file cannot be read or converted.
        SetupError: a new file already exists, or cannot be written.
    """
    if system in ("lightning-cli", "hydra"):
        from deeplightning_migrate.lightning import convert as convert_project

        first = next((file for file in files if file.suffix != ".py"), files[0])
        texts = {first: convert_project(files, system)}
    else:
        texts = {path: text_from(path, system) for path in files}
    if not write:
        return "".join(texts.values())
    new = {path.with_name(f"{path.stem}.deeplightning.yaml"): text for path, text in texts.items()}
    write_new(new)
    return "".join(f"{path}\n" for path in new)
