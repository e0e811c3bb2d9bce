"""Plant one fault each in shipped configs: YAML files and a seed become mutations whose place is known.

A mutation is made in the text, at a known line, so that comments and layout stay, and so that the place where it must
be told is known without Deep Lightning's own reader: keys and values are found with PyYAML. Nothing here looks at what
`check` can find; what a value certainly may not be stands in tables below, written by hand.

What is planted, and the line where it must be told (`Mutation.lines`):

- key: a typo in a key of the config's language. The key's line.
- class: a typo in one word of a target's `type`, be it the class or a module on the way to it. The line of `type`.
- param: a typo in the name of a param, of nested targets and of an optimizer's groups as well. The param's line.
- type: a value that can never be right there, such as text for a number, or a number for a mapping. The key's line; an
  item's own in a list.
- missing: a required key or param is removed with its value. The line of the section's key that lacks it; for a param
  that of `params`, for a whole section that of the first key of the file.
- word: a word outside an enumeration, by a typo in a legal one, or one that people know from elsewhere. The key's line.
- duplicate: a key stands twice. The second one's line.
- target: a target of another kind, such as a loss as network. The line of `type`.
- contradiction: keys that are each legal, and not together. The line of any of these keys.

Of a config with a `_base_` either file is changed, and what another file overrides is left alone, since it has no
effect. A section that several files write counts where the last of them writes it.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

KINDS = {
    "key": 60,
    "class": 50,
    "param": 40,
    "type": 50,
    "missing": 30,
    "word": 20,
    "duplicate": 20,
    "target": 10,
    "contradiction": 20,
}
"""How many of each kind make 300."""

TYPOS = {"key", "class", "param", "word"}
"""Kinds whose mutations can hold a typo, and then know the word that was meant."""

Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Mutation:
    """One planted fault.

    Attributes:
        kind: one of KINDS.
        config: the config that is checked, below the folder of all configs.
        file: the file that was changed: the config, or one that it builds on.
        text: the whole new text of `file`.
        what: what was done, for people.
        lines: `file:line` of each place where the fault may rightly be told.
        meant: words that a right first suggestion consists of, one of them; empty where no typo was made.
    """

    kind: str
    config: str
    file: str
    text: str
    what: str
    lines: tuple[str, ...]
    meant: tuple[str, ...] = ()


# ---- a file as text and nodes


@dataclass(frozen=True)
class Pair:
    """A key and its value, or an item of a list (then without key)."""

    path: Path_
    key: yaml.ScalarNode | None
    value: yaml.Node
    inside: yaml.Node

    @property
    def line(self) -> int:
        """From 1: of the key, else of the item."""
        return (self.key or self.value).start_mark.line + 1

    @property
    def name(self) -> str:
        return dotted(self.path)


class File:
    """The text of a YAML file, and where its keys and values stand in it."""

    def __init__(self, name: str, text: str):
        self.name, self.text = name, text
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        assert isinstance(root, yaml.MappingNode), f"{name} is no mapping"
        self.root = root
        self.pairs = {pair.path: pair for pair in _pairs(root, ())}
        self.first_line = root.start_mark.line + 1

    def at(self, path: Path_) -> str:
        return f"{self.name}:{self.pairs[path].line}"

    def plain(self, path: Path_) -> Any:
        """Return the value at a path as Python sees it, numbers as YAML 1.2 reads them."""
        return _plain(self.pairs[path].value)

    def with_value(self, path: Path_, new: str) -> str:
        """Return the text with another value at a path, in one line."""
        pair = self.pairs[path]
        start, end = pair.value.start_mark.index, _end(pair.value)
        if pair.key is not None and "\n" in self.text[pair.key.end_mark.index : start]:
            start, new = pair.key.end_mark.index, f": {new}"  # what stood below the key goes beside it
        if end <= start:  # a key without value
            start, new = pair.key.end_mark.index, f": {new}"  # type: ignore[union-attr]
            end = start + 1
        return self.text[:start] + new + self.text[end:]

    def with_key(self, path: Path_, new: str) -> str:
        """Return the text with a key renamed."""
        key = self.pairs[path].key
        assert key is not None
        return self.text[: key.start_mark.index] + new + self.text[key.end_mark.index :]

    def without(self, path: Path_) -> str:
        """Return the text without a key and its value."""
        pair = self.pairs[path]
        assert pair.key is not None
        start, end = pair.key.start_mark.index, _end(pair.value)
        assert isinstance(pair.inside, yaml.MappingNode)
        if not pair.inside.flow_style:
            start = self.text.rfind("\n", 0, start) + 1
            end = (self.text.find("\n", end) + 1) or len(self.text)
            return self.text[:start] + self.text[end:]
        siblings = [key for key, _ in pair.inside.value]
        number = siblings.index(pair.key)
        if number + 1 < len(siblings):
            end = siblings[number + 1].start_mark.index
        elif number:
            start = _end(pair.inside.value[number - 1][1])
        return self.text[:start] + self.text[end:]

    def with_pair_after(self, path: Path_, new: str) -> str:
        """Return the text with `key: value` after the pair at a path, in the same mapping."""
        pair = self.pairs[path]
        assert pair.key is not None
        assert isinstance(pair.inside, yaml.MappingNode)
        end = _end(pair.value)
        if pair.inside.flow_style:
            return f"{self.text[:end]}, {new}{self.text[end:]}"
        end = (self.text.find("\n", end) + 1) or len(self.text)
        before = self.text[:end] if self.text[:end].endswith("\n") else f"{self.text}\n"
        return f"{before}{' ' * pair.key.start_mark.column}{new}\n{self.text[end:]}"

    def source_of(self, path: Path_) -> str:
        """Return `key: value` as it is written, with the lines below the key if the value has any."""
        pair = self.pairs[path]
        assert pair.key is not None
        return self.text[pair.key.start_mark.index : _end(pair.value)]

    def with_setting(self, path: Path_, new: str) -> str:
        """Return the text with a value at a path, whether it exists or not; missing sections are created."""
        if path in self.pairs:
            return self.with_value(path, new)
        depth = max(n for n in range(len(path)) if n == 0 or path[:n] in self.pairs)
        for part in reversed(path[depth + 1 :]):
            new = f"{{{part}: {new}}}"
        above = self.pairs[path[:depth]].value if depth else self.root
        if isinstance(above, yaml.ScalarNode):
            assert above.value in ("", "null", "~"), f"{path} cannot stand below {above.value}"
            return self.with_value(path[:depth], f"{{{path[depth]}: {new}}}")
        if not above.value:
            return self.with_value(path[:depth], f"{{{path[depth]}: {new}}}")
        last = above.value[-1][0].value
        return self.with_pair_after((*path[:depth], last), f"{path[depth]}: {new}")


def _pairs(node: yaml.Node, path: Path_) -> Iterator[Pair]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, key.value)
            yield Pair(here, key, value, node)
            yield from _pairs(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield Pair((*path, number), None, value, node)
            yield from _pairs(value, (*path, number))


def _end(node: yaml.Node) -> int:
    """Return the position of the last character of a value; its own end mark includes blanks after a block."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return node.end_mark.index


def _plain(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {key.value: _plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if node.style:
        return node.value
    for kind in (int, float):
        try:
            return kind(node.value)
        except ValueError:
            pass
    return {"true": True, "false": False, "null": None, "": None}.get(node.value, node.value)


def dotted(path: Path_) -> str:
    return ".".join(map(str, path))


# ---- a config: a file and those that it builds on


@dataclass
class Config:
    """A shipped config, with the files that it builds on behind it."""

    name: str
    files: list[File] = field(default_factory=list)

    def hidden(self, file: File, path: Path_) -> bool:
        """Return whether a file above sets the same value, so that this one's has no effect."""
        above = self.files[: self.files.index(file)]
        return any(not isinstance(f.pairs[path].value, yaml.MappingNode) for f in above if path in f.pairs)

    def section_line(self, path: Path_) -> str:
        """Return the line where the last file that writes a section does so; of the root, its first key."""
        for file in self.files:
            if not path:
                return f"{file.name}:{file.first_line}"
            if path in file.pairs:
                return file.at(path)
        raise KeyError(path)

    def written_elsewhere(self, file: File, path: Path_) -> bool:
        return any(path in other.pairs for other in self.files if other is not file)


def read_configs(root: Path) -> list[Config]:
    """Return every shipped config below the repository `root`, without those of option groups: a key of an option has
    another path in the config than in its file."""
    paths = sorted([*root.glob("configs/*.yaml"), *root.glob("examples/own_code/*.yaml")])
    configs = []
    for path in paths:
        if re.search(r"^_base_: *\[.*\{", path.read_text(), re.MULTILINE):
            continue
        config, todo = Config(str(path.relative_to(root))), [path]
        while todo:
            file = File(str(todo[0].relative_to(root)), todo.pop(0).read_text())
            config.files.append(file)
            if ("_base_",) in file.pairs:
                bases = file.plain(("_base_",))
                todo += [(root / file.name).parent / name for name in ([bases] if isinstance(bases, str) else bases)]
        configs.append(config)
    return configs


# ---- typos

_ROWS = ("1234567890", "qwertyuiop", "asdfghjkl", "zxcvbnm")
_PLACES = {letter: (row, column) for row, letters in enumerate(_ROWS) for column, letter in enumerate(letters)}


def neighbours(letter: str) -> list[str]:
    """Return the keys around a letter, or beside a digit, in its case."""
    if letter.lower() not in _PLACES:
        return []
    row, column = _PLACES[letter.lower()]
    around = [
        other
        for other, (r, c) in _PLACES.items()
        if (r, c) != (row, column)
        and abs(r - row) <= 1
        and abs(c - column) <= 1
        and other.isdigit() == letter.isdigit()
    ]
    return [other.upper() if letter.isupper() else other for other in around]


def typo(word: str, rng: random.Random, legal: set[str]) -> str | None:
    """Return the word with one typing error: a character dropped, doubled, swapped with the next, or replaced by its
    neighbour on the keyboard. The result is never a legal word, nor an invalid name; None if a word allows no such
    error."""
    for _ in range(100):
        spot = rng.randrange(len(word))
        slip = rng.choice(["drop", "double", "swap", "neighbour"])
        if slip == "drop":
            new = word[:spot] + word[spot + 1 :]
        elif slip == "double":
            new = word[: spot + 1] + word[spot:]
        elif slip == "swap":
            new = word[:spot] + word[spot : spot + 2][::-1] + word[spot + 2 :]
        else:
            new = word[:spot] + rng.choice(neighbours(word[spot]) or [word[spot]]) + word[spot + 1 :]
        if new != word and new not in legal and re.fullmatch(r"[A-Za-z_]\w*", new):
            return new
    return None


# Words that one slip turns a word of the shipped configs into and that are legal there. A test compares every typo of
# several seeds with the live classes.
_NEAR_BUT_LEGAL = {"CIFAR100", "AdamW", "Adamax", "NAdam", "RAdam", "ASGD", "L1Loss", "NLLLoss"}

# ---- what values may be, by hand

_NUMBER, _WHOLE, _TEXT, _BOOL, _LIST, _MAPPING, _TARGET = "number", "whole", "text", "bool", "list", "mapping", "target"

_KEYS = {
    "_base_": _TEXT,
    "seed": _WHOLE,
    "stages": _LIST,
    "data": _MAPPING,
    "data.root": _TEXT,
    "data.dataset": _TEXT,
    "data.batch_size": _WHOLE,
    "model": _MAPPING,
    "model.optimizer.groups": _LIST,
    "model.optimizer.groups.0": _MAPPING,
    "model.scheduler.call": _MAPPING,
    "model.scheduler.call.interval": _TEXT,
    "model.scheduler.call.frequency": _WHOLE,
    "engine": _MAPPING,
    "engine.backend": _TEXT,
    "engine.gpus": "devices",  # a whole number, a list of them, or `auto`
    "engine.processes": _WHOLE,
    "train": _MAPPING,
    "train.num_epochs": _WHOLE,
    "train.checkpoint": _MAPPING,
    "train.checkpoint.monitor": _TEXT,
    "train.checkpoint.mode": _TEXT,
    "logger": _MAPPING,
}
_PARAMS = {
    **dict.fromkeys(("num_classes", "num_channels", "padding", "inputs", "outputs", "width", "total_steps"), _WHOLE),
    **dict.fromkeys(("depth", "heads"), _WHOLE),
    **dict.fromkeys(("lr", "momentum", "weight_decay", "gamma", "label_smoothing", "dropout", "pct_start"), _NUMBER),
    **dict.fromkeys(("experiment_name", "tracking_uri", "resize", "match"), _TEXT),
    **dict.fromkeys(("download", "nesterov", "small_images"), _BOOL),
    "max_lr": "rate",  # a number, or one for each group of parameters
    **dict.fromkeys(("image_size", "patch_size"), "size"),  # a whole number, or two of them
    "augment": _LIST,
}
# What can never stand for it. `null` is not here, since it often means "the default"; nor are truth values for numbers
# in params, which Python takes for 0 and 1.
_NEVER = {
    _NUMBER: ["quick", "'0.1'", "[0.1, 0.2]", "{value: 0.1}"],
    "rate": ["quick", "'0.1'", "{value: 0.1}"],
    _WHOLE: ["many", "'10'", "[1, 2]", "2.5", "{value: 3}"],
    "devices": ["2.5", "{first: 0}", "[one, two]", "true"],
    "size": ["large", "2.5", "{height: 3}"],
    _TEXT: ["7", "[one, two]", "{name: one}", "true"],
    _BOOL: ["maybe", "'yes'", "[true]", "{value: true}"],
    _LIST: ["7", "{one: two}", "true"],
    _MAPPING: ["7", "[one, two]", "quick", "true"],
    _TARGET: ["7", "[one, two]", "torch.nn.ReLU", "true"],  # a target is not written as its bare name
}

# Words of enumerations. The second list: what no slip of the fingers makes, but other programs use.
_WORDS: dict[str, tuple[list[str], list[str]]] = {
    "stages": (["train", "validate", "test", "predict"], ["fit", "evaluate"]),
    "model.scheduler.call.interval": (["epoch", "step"], ["minute"]),
    "model.trainable": (["all", "head"], ["last"]),
    "engine.backend": (["ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3"], ["zero", "mpi", "tpu"]),
    "engine.gpus": (["auto"], ["all"]),
    "engine.precision": (["bf16", "16-mixed", "bf16-mixed", "64-true"], ["24", "float32", "fp8"]),
    "engine.profiler": (["simple", "advanced", "torch"], ["nvidia"]),
    "train.checkpoint.mode": (["min", "max"], ["best", "auto"]),
    "train.gradient_clip.algorithm": (["norm", "value"], ["adaptive"]),
    "train.early_stop.mode": (["min", "max"], ["best"]),
    "logger.progress": (["auto", "bar", "lines", "off"], ["verbose"]),
    "data.module.params.resize": (["crop", "stretch", "pad"], ["bicubic"]),
}
# What else a section must hold for the word alone to be wrong.
_WITH = {
    "train.gradient_clip.algorithm": "{value: 1.0, algorithm: WORD}",
    "train.early_stop.mode": "{metric: val_loss, mode: WORD}",
}

# Required: keys by path, params by the name of the class.
_REQUIRED_KEYS = {"data", "data.module", "data.batch_size", "model", "model.module", "model.optimizer.params"}
_REQUIRED_PARAMS = {
    "SimpleCNN": {"num_classes", "num_channels"},
    "ResNet18": {"num_classes"},
    "ViT": {"num_classes"},
    "Perceptron": {"inputs", "outputs"},
    "OneCycleLR": {"max_lr"},
    "ExponentialLR": {"gamma"},
    "RandomCrop": {"padding"},
}

# A class of another kind, by the target that it is put for.
_OTHER_KIND = {
    "data.module.type": ["deeplightning.task.img_classif.ImageClassification", "torch.utils.data.DataLoader"],
    "model.module.type": ["deeplightning.data.digits.Digits", "deeplightning.model.cnn.SimpleCNN"],
    "model.network.type": ["torch.nn.CrossEntropyLoss", "torch.optim.SGD"],
    "model.optimizer.type": ["torch.nn.Linear", "torch.optim.lr_scheduler.StepLR"],
    "model.scheduler.type": ["torch.optim.SGD", "torch.nn.ReLU"],
    "model.loss.type": ["torch.optim.Adam", "torchmetrics.classification.MulticlassAccuracy"],
    "logger.type": ["torch.nn.Linear", "pytorch_lightning.callbacks.ModelCheckpoint"],
}

_DEEPSPEED = {"engine.backend": "deepspeed_stage_2", "engine.gpus": "2"}
_CPU = {"engine.gpus": "null"}
_CLIP = "train.gradient_clip"
# Settings that contradict each other: a name, what is set, and the keys of which one must be told.
_CONTRADICTIONS: list[tuple[str, dict[str, str], tuple[str, ...]]] = [
    (
        "clipping by value with DeepSpeed",
        {**_DEEPSPEED, _CLIP: "{value: 1.0, algorithm: value}"},
        (f"{_CLIP}.algorithm", _CLIP, "engine.backend"),
    ),
    (
        "clipping by another norm than the second with DeepSpeed",
        {**_DEEPSPEED, _CLIP: "{value: 1.0, norm_type: 1.0}"},
        (f"{_CLIP}.norm_type", _CLIP, "engine.backend"),
    ),
    (
        "accumulation that begins late, with DeepSpeed",
        {**_DEEPSPEED, "train.accumulator_epoch": "3", "train.accumulator_factor": "4"},
        ("train.accumulator_epoch", "train.accumulator_factor", "engine.backend"),
    ),
    (
        "two optimizers with DeepSpeed",
        {
            **_DEEPSPEED,
            "model.optimizer": "{one: {type: torch.optim.SGD, params: {lr: 0.1}}, "
            "two: {type: torch.optim.SGD, params: {lr: 0.1}}}",
        },
        ("model.optimizer", "engine.backend"),
    ),
    (
        "a fold beyond the number of splits",
        {"data.num_splits": "5", "data.fold": "5"},
        ("data.fold", "data.num_splits"),
    ),
    (
        "nccl without GPUs",
        {
            **_CPU,
            "engine.backend": "ddp",
            "engine.processes": "2",
            "engine.params": "{process_group_backend: nccl}",
        },
        ("engine.params.process_group_backend", "engine.params", "engine.gpus"),
    ),
    (
        "settings for a strategy that there is not",
        {
            **_CPU,
            "engine.backend": "null",
            "engine.processes": "1",
            "engine.params": "{find_unused_parameters: true}",
        },
        ("engine.params", "engine.backend"),
    ),
    (
        "batch norm over GPUs without GPUs",
        {**_CPU, "engine.sync_batchnorm": "true"},
        ("engine.sync_batchnorm", "engine.gpus"),
    ),
    (
        "several machines without a launcher",
        {"engine.num_nodes": "2"},
        ("engine.num_nodes",),
    ),
]


# ---- one maker per kind: what it can do to one file of a config


def _is_param(path: Path_) -> bool:
    in_group = len(path) >= 3 and path[-3] == "groups" and path[-1] != "match"
    return len(path) >= 2 and (path[-2] == "params" or in_group)


def _is_type(file: File, path: Path_) -> bool:
    return path[-1] == "type" and not _is_param(path) and isinstance(file.pairs[path].value, yaml.ScalarNode)


def _legal(configs: list[Config]) -> set[str]:
    """Return words that a typo must not become: those of shipped configs, of the tables above, and of the schema."""
    from deeplightning.config import allowed, schema

    words = {str(part) for config in configs for file in config.files for path in file.pairs for part in path}
    words |= {f.name for _, section in allowed.sections(schema.Config) for f in schema.keys(section)}
    words |= {word for legal, _ in _WORDS.values() for word in legal}
    return words | _NEAR_BUT_LEGAL


class Maker:
    """Makes mutations of shipped configs, from a seed.

    Args:
        root: the repository.
    """

    def __init__(self, root: Path):
        self.configs = read_configs(root)
        self.legal = _legal(self.configs)

    def make(self, seed: int, counts: dict[str, int] | None = None) -> list[Mutation]:
        """Return so many mutations of each kind (KINDS), no two the same."""
        rng = random.Random(seed)
        made: dict[tuple[str, str, str], Mutation] = {}
        for kind, count in (counts or KINDS).items():
            wanted = len(made) + count
            for _ in range(1000 * count):
                if len(made) == wanted:
                    break
                config = rng.choice(self.configs)
                mutation = getattr(self, f"_{kind}")(config, rng.choice(config.files), rng)
                if mutation is not None:
                    made.setdefault((mutation.config, mutation.file, mutation.text), mutation)
            assert len(made) == wanted, f"the shipped configs do not allow {count} mutations of kind {kind}"
        return list(made.values())

    def _key(self, config: Config, file: File, rng: random.Random) -> Mutation | None:
        sites = [path for path, pair in file.pairs.items() if pair.key is not None and not _is_param(path)]
        return self._renamed("key", config, file, rng.choice(sites), rng)

    def _param(self, config: Config, file: File, rng: random.Random) -> Mutation | None:
        sites = [path for path, pair in file.pairs.items() if pair.key is not None and _is_param(path)]
        return self._renamed("param", config, file, rng.choice(sites), rng) if sites else None

    def _renamed(self, kind: str, config: Config, file: File, path: Path_, rng: random.Random) -> Mutation | None:
        word = str(path[-1])
        new = typo(word, rng, self.legal)
        if new is None:
            return None
        what = f"{dotted(path)}: `{word}` → `{new}`"
        return Mutation(kind, config.name, file.name, file.with_key(path, new), what, (file.at(path),), (word,))

    def _class(self, config: Config, file: File, rng: random.Random) -> Mutation | None:
        sites = [path for path in file.pairs if _is_type(file, path) and not config.hidden(file, path)]
        if not sites:
            return None
        path = rng.choice(sites)
        parts = str(file.plain(path)).split(".")
        # The class is longer and less familiar than its module: two of three slips happen there.
        spot = len(parts) - 1 if rng.random() < 2 / 3 else rng.randrange(len(parts) - 1)
        new = typo(parts[spot], rng, self.legal)
        if new is None:
            return None
        name = ".".join([*parts[:spot], new, *parts[spot + 1 :]])
        meant = dict.fromkeys([parts[spot], ".".join(parts[: spot + 1]), ".".join(parts)])
        what = f"{dotted(path)}: {'.'.join(parts)} → {name}"
        return Mutation(
            "class", config.name, file.name, file.with_value(path, name), what, (file.at(path),), tuple(meant)
        )

    def _type(self, config: Config, file: File, rng: random.Random) -> Mutation | None:
        path = rng.choice(list(file.pairs))
        kind = self._allowed(file, path)
        if kind is None or config.hidden(file, path):
            return None
        wrong = rng.choice(_NEVER[kind])
        what = f"{dotted(path)}: {wrong} for {'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        return Mutation("type", config.name, file.name, file.with_value(path, wrong), what, (file.at(path),))

    @staticmethod
    def _allowed(file: File, path: Path_) -> str | None:
        """Return what the value at a path must be, if that is certain."""
        pair, name = file.pairs[path], str(path[-1])
        if _is_param(path) or name == "match":
            return _PARAMS[name]
        if name == "params":
            return _MAPPING
        if name == "type":
            return _TEXT
        if isinstance(pair.value, yaml.MappingNode) and (*path, "type") in file.pairs and dotted(path) != "logger":
            return _TARGET
        return _KEYS.get(dotted(path))

    def _missing(self, config: Config, file: File, rng: random.Random) -> Mutation | None:
        sites = [
            path
            for path, pair in file.pairs.items()
            if pair.key is not None and not config.written_elsewhere(file, path) and self._required(file, path)
        ]
        if not sites:
            return None
        path = rng.choice(sites)
        above = path[:-1]
        if _is_param(path):
            line = file.at(above)  # `params` itself
        elif above and isinstance(above[-1], int):
            line = file.at(above)
        else:
            line = config.section_line(above)
        what = f"{dotted(path)} removed"
        return Mutation("missing", config.name, file.name, file.without(path), what, (line,))

    @staticmethod
    def _required(file: File, path: Path_) -> bool:
        if _is_param(path):
            name = (*path[:-2], "type")
            cls = str(file.plain(name)).rpartition(".")[2] if name in file.pairs else ""
            return path[-1] in _REQUIRED_PARAMS.get(cls, ())
        if path[-1] == "type":
            return path[:-1] != ("logger",)  # our own is its default
        if dotted(path) == "train.num_epochs":
            return ("train", "max_steps") not in file.pairs
        return dotted(path) in _REQUIRED_KEYS

    def _word(self, config: Config, file: File, rng: random.Random) -> Mutation | None:
        key = rng.choice(list(_WORDS))
        path: Path_ = tuple(key.split("."))
        legal, foreign = _WORDS[key]
        if key == "data.module.params.resize" and "ImageFolder" not in file.text:
            return None
        if path[:-1] in file.pairs and not isinstance(file.pairs[path[:-1]].value, yaml.MappingNode):
            return None
        if config.hidden(file, path) or (path[0] not in {p[0] for p in file.pairs} and file is not config.files[0]):
            return None
        if key == "model.scheduler.call.interval" and ("model", "scheduler") not in file.pairs:
            return None
        word, meant = rng.choice(foreign), ()
        if rng.random() < 0.7:
            right = rng.choice(legal)
            slipped = _typo_of_word(right, rng, set(legal))
            if slipped is None:
                return None
            word, meant = slipped, (right,)
        if key == "stages":
            text = file.with_setting(path, f"[{rng.choice(['train, ', ''])}{word}]")
        elif key in _WITH:
            text = file.with_setting(path[:-1], _WITH[key].replace("WORD", word))
        else:
            text = file.with_setting(path, word)
        line = File(file.name, text).at(path)
        return Mutation("word", config.name, file.name, text, f"{key}: {word}", (line,), meant)

    def _duplicate(self, config: Config, file: File, rng: random.Random) -> Mutation | None:
        path = rng.choice([path for path, pair in file.pairs.items() if pair.key is not None])
        source = file.source_of(path)
        text = file.with_pair_after(path, source)
        pair = file.pairs[path]
        flow = isinstance(pair.inside, yaml.MappingNode) and pair.inside.flow_style
        second = pair.line + source.count("\n") + (0 if flow else 1)
        return Mutation("duplicate", config.name, file.name, text, f"{dotted(path)} twice", (f"{file.name}:{second}",))

    def _target(self, config: Config, file: File, rng: random.Random) -> Mutation | None:
        key = rng.choice(list(_OTHER_KIND))
        path = tuple(key.split("."))
        if path not in file.pairs or config.hidden(file, path):
            return None
        other = rng.choice(_OTHER_KIND[key])
        return Mutation(
            "target", config.name, file.name, file.with_value(path, other), f"{key}: {other}", (file.at(path),)
        )

    def _contradiction(self, config: Config, file: File, rng: random.Random) -> Mutation | None:
        file = config.files[0]  # a base's own half may be overridden above it
        name, settings, keys = rng.choice(_CONTRADICTIONS)
        if any(v.startswith("{") and config.written_elsewhere(file, tuple(k.split("."))) for k, v in settings.items()):
            return None  # it would be merged with what stands there
        for key, value in settings.items():
            file = File(file.name, file.with_setting(tuple(key.split(".")), value))
        lines = [file.at(path) for key in keys if (path := tuple(key.split("."))) in file.pairs]
        return Mutation("contradiction", config.name, file.name, file.text, name, tuple(dict.fromkeys(lines)))


def _typo_of_word(word: str, rng: random.Random, legal: set[str]) -> str | None:
    """Return a typo in the letters of a word that need not be a name (`16-mixed`)."""
    letters = re.findall("[A-Za-z_]{2,}", word)
    if not letters:
        return None
    part = rng.choice(letters)
    slipped = typo(part, rng, legal | {"on", "no", "yes", "true", "false", "null"})
    return slipped and word.replace(part, slipped, 1)
