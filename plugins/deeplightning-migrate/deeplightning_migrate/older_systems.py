"""`deeplightning migrate --from SYSTEM FILE…`: a config of another system becomes one of ours, as far as it goes.
`lightning` converts those of LightningCLI and Hydra completely.

The file is read to nested mappings (`reading`), its words are looked up in the one table of words
(`foreign_words`), and `check` names what is still missing. Each line that needs a person has a comment.
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
"""What a truth value of theirs is here."""


@dataclass
class Conversion:
    """The config that is made, and what a person must look at.

    Attributes:
        config: nested mappings in our words.
        remarks: a sentence for each key of ours that needs a look.
        left: a sentence for each key of theirs that has none here.
    """

    system: str
    config: dict[str, Any] = field(default_factory=dict)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    devices: Any = None

    def walk(self, key: str, value: Any) -> None:
        """Convert a value of theirs at its dotted key."""
        if self._special(key, value):
            return
        if isinstance(value, Call):
            self._target(key, value)
        elif isinstance(value, dict) and value:
            for name, item in value.items():
                self.walk(f"{key}.{name}".lstrip("."), item)
        else:
            self._leaf(key, value)

    def _special(self, key: str, value: Any) -> bool:
        """Convert what needs more than another word; return whether it was one of these."""
        last = key.rpartition(".")[2]
        if key == "seed":
            self.put("seed", value)
        elif last in LOSSES and isinstance(value, Call | str) and "." in getattr(value, "name", str(value)):
            made = value if isinstance(value, Call) else Call(value)
            self.put("model.loss.type", made.name)
            self.put("model.loss.params", _params(made.arguments))
        elif key == "model" and isinstance(value, Call):
            self._target("model_creator", value)
        elif isinstance(value, bool) and last in FLAGS:
            ours, words = FLAGS[last]
            if words[value] is not None or not value:
                self.put(ours, words[value])
        elif key == "num_workers" and self.system == "raysgd":
            self.devices = value
        elif key == "warmup_proportion":
            self.put("model.scheduler.warmup", value)
        elif key == "log_steps_ratio" and isinstance(value, int | float) and value > 0:
            self.put("logger.log_every_n_steps", {"per_epoch": max(1, round(1 / value))})
        elif key == "is_dev_file":
            self.left.append(f"{key}: {_shown(value)} is left out: validation runs with training")
        else:
            return False
        return True

    def settle(self) -> None:
        """Set what follows from several of their settings: devices count GPUs or CPU processes."""
        if self.devices is None:
            return
        engine = self.config.setdefault("engine", {})
        if engine.get("gpus") is not None:
            engine["gpus"] = self.devices
        elif isinstance(self.devices, int) and self.devices > 1:
            engine |= {"processes": self.devices, "backend": engine.get("backend") or "ddp"}

    def _leaf(self, key: str, value: Any) -> None:
        found = foreign_words.ours(key)
        if found is None:
            self.left.append(f"{key}: {_shown(value)} has no known key here")
        elif found.startswith("none:"):
            self.left.append(f"{key}: {_shown(value)} is left out: {found.removeprefix('none: ')}")
        else:
            ours = str(other_tools.key_of(found)).lstrip(".")
            remark = re.search(r"\((.*)\)$", found)
            self.put(ours, value, f"was {key}: {_shown(value)}" + (f"; {remark[1]}" if remark else ""), bool(remark))

    def put(self, key: str, value: Any, origin: str = "", remark: bool = False) -> None:
        """Set a key of ours; what cannot be set there is left to a person."""
        if isinstance(value, str) and (other := other_tools.class_of(key.removesuffix(".type"), value)):
            key, value = f"{key.removesuffix('.type')}.type", other
        elif (meant := other_tools.value(key, value)) is not None:
            if "." in meant and key != "engine.precision":
                self.left.append(f"{origin}: here it is called {meant}")
                return
            value = _plain_of(meant)
        section = self.config
        *above, last = key.split(".")
        for name in above:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                self.left.append(f"{origin}: {key} cannot be set beside {'.'.join(above)}")
                return
        if last in section and section[last] != value and not (isinstance(section[last], dict) and value == {}):
            self.left.append(f"{origin}: {key} is {_shown(section[last])} already")
            return
        section.setdefault(last, value)
        if remark:
            self.remarks.setdefault(key, []).append(origin)

    def _target(self, key: str, call: Call) -> None:
        """Return a class or function with its arguments."""
        if call.name.rpartition(".")[2] == "Trainer" or key in ("trainer", "Stoke", "TorchTrainer", "PyTorchTrainer"):
            for name, value in call.arguments.items():
                self.walk(name, value)
            return
        found = (
            "data.module" if key in ("data", "datamodule") else other_tools.key_of(foreign_words.ours(key) or "none:")
        )
        if found is None:
            self.left.append(f"{key}: {call.name} has no known key here")
            return
        found = found.removesuffix(".type")
        self.put(f"{found}.type", call.name)
        if call.positions:
            self.remarks.setdefault(f"{found}.type", []).append(
                f"TODO its arguments by position need names: {', '.join(map(str, call.positions))}"
            )
        self.put(f"{found}.params", _params(call.arguments))


def _plain_of(text: str) -> Any:
    if text.startswith("["):
        return [scalar(word.strip()) for word in text.strip("[]").split(",")]
    return scalar(text)


def _shown(value: Any) -> str:
    return line(_params(value))[:100]


def _params(value: Any) -> Any:
    """Return arguments as plain values: a call in them is a target."""
    if isinstance(value, Call):
        return {"type": value.name, "params": _params(value.arguments)}
    if isinstance(value, dict):
        return {str(name): _params(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_params(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def conversion(path: Path, system: str) -> Conversion:
    """Return what a file of another system becomes.

    Raises:
        ConfigError: it cannot be read.
    """
    found = Conversion(system)
    theirs = read_python(path) if path.suffix == ".py" else read_yaml(path)
    for name, value in theirs.items():
        # The sections of a system's own, whose keys have words of their own in the table.
        if isinstance(value, dict) and name in ("data-params", "transformers-params", "dist-params"):
            for word, item in value.items():
                found.walk(str(word), item)
        else:
            found.walk(str(name), value)
    found.settle()
    return found


def text_from(path: Path, system: str) -> str:
    """Return the config as YAML text, with its comments.

    Raises:
        ConfigError: the file cannot be read.
    """
    made = conversion(path, system)
    order = ("seed", "stages", "data", "model", "engine", "train", "test", "logger", "tune", "serve")
    config = {name: made.config[name] for name in order if name in made.config}
    config |= made.config
    remarks = {key: [*texts] for key, texts in made.remarks.items()}
    made.left = [text if " is left out: " in text else f"TODO {text}" for text in made.left]
    for fault in check({"version": VERSION, **config}).faults:
        remarks.setdefault(fault.key or "", []).append(f"TODO {fault.message}")
    return _commented({"version": VERSION, **config}, remarks, made.left, f"{path.name} ({system})")


def _commented(config: dict[str, Any], remarks: dict[str, list[str]], left: list[str], origin: str) -> str:
    """Return YAML text with each remark above the line of its key, or of the nearest section that is there."""
    lines, path, placed = [], list[tuple[int, str]](), set[str]()
    for row in dump(config).splitlines():
        if match := re.match(r"( *)([\w~.-]+):", row):
            indent = len(match[1])
            path = [*[part for part in path if part[0] < indent], (indent, match[2])]
            key = ".".join(name for _, name in path)
            if key in remarks and key not in placed:
                placed.add(key)
                lines += [f"{match[1]}# {_flat(text)}" for text in remarks[key]]
        lines.append(row)
    rest = []
    for key in remarks:
        where = f"{key}: " if key else ""
        rest += [f"# TODO {where}{_flat(text).removeprefix('TODO ')}" for text in remarks[key] if key not in placed]
    rest += [f"# {_flat(text)}" for text in left]
    head = [f"# Made from {origin}; a line with TODO needs a person."]
    return "\n".join([*head, *lines, *rest]) + "\n"


def _flat(text: str) -> str:
    return " ".join(text.split())


def convert(files: Sequence[Path], system: str, write: bool) -> str:
    """Return what the verb prints: the configs, or the paths of the new files. Several files of LightningCLI or Hydra
    are one project, the later over the earlier.

    Raises:
        ConfigError: a file cannot be read or converted.
        SetupError: a new file is there already, or cannot be written.
    """
    if system in ("lightning-cli", "hydra"):
        from deeplightning_migrate.lightning import convert as converted

        first = next((file for file in files if file.suffix != ".py"), files[0])
        texts = {first: converted(files, system)}
    else:
        texts = {path: text_from(path, system) for path in files}
    if not write:
        return "".join(texts.values())
    made = {path.with_name(f"{path.stem}.deeplightning.yaml"): text for path, text in texts.items()}
    write_new(made)
    return "".join(f"{new}\n" for new in made)
