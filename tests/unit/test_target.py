"""A target is found, checked against its signature, and built: `deeplightning.config.target`."""

import collections
import copy
import itertools
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from deeplightning.config.schema import Target
from deeplightning.config.signature_check import Meanings, judge
from deeplightning.config.target import build, find, is_reference, is_target
from deeplightning.faults import ConfigError, nearest

OWN = """
import dataclasses
from typing import Literal


class Plain:
    def __init__(self, size: int, rate: float = 0.5, name: str = "x", on: bool = False, mode: Literal["a", "b"] = "a",
                 sides: list[int] | None = None, free=1, flag=True, *, only: int | str = 1):
        self.given = {k: v for k, v in locals().items() if k != "self"}


class Open(Plain):
    def __init__(self, size: int, **more):
        super().__init__(size, **more)


class Any:
    def __init__(self, size: int, **more):
        self.more = more


@dataclasses.dataclass
class Data:
    a: int
    b: "Unknown" = None


def positional(first, /, second, *rest):
    return first, second, rest


def picky(value):
    if value < 0:
        raise ValueError(f"value is {value}; it must not be negative")
    return value


def wants_type(value: "NotThere" = 0):
    return value


class Holder:
    @classmethod
    def made(cls, n: int = 1):
        return n


number = 5
"""


@pytest.fixture
def own(here):
    """A new package of a user in the working directory."""
    (here / "own_parts" / "inner").mkdir(parents=True)
    (here / "own_parts" / "inner" / "custom.py").write_text(OWN)
    return here


CUSTOM = "own_parts.inner.custom"


def errors(name: str, params: dict, given: int = 0) -> dict[str, str]:
    """Return the errors of a call: key to message."""
    return {str(f.key): f.message for f in judge(Meanings(importing=True), name, params, "k", given=given).faults}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("collections.OrderedDict.fromkeys", OrderedDict.fromkeys),
        ("os.path.join", __import__("os").path.join),
        ("collections.abc.Mapping", collections.abc.Mapping),
    ],
)
def test_a_name_leads_to_its_object(name, expected):
    """`find` returns a function, class or method, also from a nested module."""
    assert find(name) == expected


def test_a_users_own_module_is_found(own):
    """A user's module may be in a nested package without `__init__.py` in the working directory."""
    assert find(f"{CUSTOM}.Plain").__name__ == "Plain"
    assert find(f"{CUSTOM}.Holder.made")(n=3) == 3


def test_an_own_module_that_exits_is_told_with_its_line(own):
    """A module that exits does not end the command. test_own_code.py tests other errors with their lines."""
    Path("broken.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ValueError, match=r"importing broken .*SystemExit: 0 \(broken\.py:2\)"):
        find("broken.Thing")


@pytest.mark.parametrize(
    ("word", "words", "meant"),
    [
        ("Adma", ["Adam", "Adamax", "AdamW", "Adadelta", "NAdam"], " Did you mean Adam?"),  # two letters swapped
        ("dpd", ["ddp", "dp", "fsdp"], " Did you mean ddp?"),
        ("kr", ["lr", "momentum", "weight_decay"], " Did you mean lr?"),  # one replaced, in a word of two
        ("rl", ["lr", "momentum", "weight_decay"], " Did you mean lr?"),
        ("llr", ["lr", "momentum", "weight_decay"], " Did you mean lr?"),
        ("num_clases", ["num_classes", "num_channels", "image_size"], " Did you mean num_classes?"),
        ("LR", ["lr", "momentum"], " Did you mean lr?"),
        ("quux", ["lr", "momentum"], ""),
    ],
)
def test_slips_of_a_finger_are_understood(word, words, meant):
    """A letter dropped, doubled, replaced or swapped leads to the intended word, even a short one; distant words have
    no suggestion."""
    assert nearest(word, words) == meant


ALL = {"size": 3, "rate": 1, "mode": "b", "sides": [1], "only": "x", "free": [2]}


@pytest.mark.parametrize(
    ("name", "params", "given", "expected"),
    [
        # required and optional, whole numbers for numbers, one of several words, null for anything
        (f"{CUSTOM}.Plain", ALL, 0, {}),
        (f"{CUSTOM}.Plain", {"size": None, "name": None}, 0, {}),
        (f"{CUSTOM}.Plain", {"size": {"type": "math.sqrt", "params": {}}}, 0, {}),
        # `**kwargs` accept any param; named parameters are still compared
        (f"{CUSTOM}.Any", {"size": 1, "whatever": 2}, 0, {}),
        (f"{CUSTOM}.Any", {"whatever": 2}, 0, {"k.params": f"{CUSTOM}.Any needs size"}),
        # arguments that Deep Lightning passes must not be in params
        (f"{CUSTOM}.Plain", {}, 1, {}),
        (f"{CUSTOM}.positional", {"second": 1}, 1, {}),
        (
            *(f"{CUSTOM}.Plain", {"size": 1}, 1),
            {"k.params.size": f"{CUSTOM}.Plain: `size` is set by Deep Lightning; remove it"},
        ),
        # built-in functions without a signature, annotations of unknown names, dataclasses
        ("builtins.dict", {"a": 1}, 0, {}),
        (f"{CUSTOM}.wants_type", {"value": 3}, 0, {}),
        (f"{CUSTOM}.Data", {"a": 1, "b": 2}, 0, {}),
        (f"{CUSTOM}.Data", {}, 0, {"k.params": f"{CUSTOM}.Data needs a"}),
        # a number and a module cannot be called
        (f"{CUSTOM}.number", {}, 0, {"k.type": f"`{CUSTOM}.number` is int, not a class or function"}),
        (CUSTOM, {}, 0, {"k.type": f"`{CUSTOM}` is module, not a class or function"}),
    ],
)
def test_params_are_compared_with_what_takes_them(own, name, params, given, expected):
    """Params that are right, or cannot be checked, are no errors."""
    assert errors(name, params, given=given) == expected


@pytest.mark.parametrize(
    ("params", "key", "words"),
    [
        ({}, "k.params", "needs size"),
        ({"size": 1, "sise": 2}, "k.params.sise", "has no param `sise`. Did you mean size? It takes: size, rate, name"),
        ({"size": 1.5}, "k.params.size", "takes a whole number here, not 1.5"),
        ({"size": 1, "rate": "1e-3"}, "k.params.rate", "takes a number here, not the text '1e-3'"),
        ({"size": 1, "only": [1]}, "k.params.only", "takes a whole number or a text here, not [1]"),
        ({"size": 1, "free": "1e-3"}, "k.params.free", "takes a number here, not the text '1e-3'"),
        ({"size": 1, "flag": "yes"}, "k.params.flag", "takes true or false here, not the text 'yes'"),
    ],
)
def test_wrong_params_are_told_with_what_is_allowed(own, params, key, words):
    """A param may be unknown, missing, or mistyped according to its annotation or else its default."""
    ((found, message),) = errors(f"{CUSTOM}.Plain", params).items()
    assert found == key
    assert message.startswith(f"{CUSTOM}.Plain ")
    assert words in message


TYPED = """
import enum, os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar
import numpy as np
from torch import Tensor, nn

T = TypeVar("T")
Colour = enum.Enum("Colour", "red blue")

class Named(Protocol):
    name: str

def typed(value: ANNOTATION):
    pass
"""
TARGET = "a target {type: MODULE.CLASS, params: {…}}"
TWO = "a list of 2 items"
BUILT, REF = {"type": "a.B"}, {"ref": "a.b"}


def errors_of_value(own, annotation: str, value: Any) -> dict[str, str]:
    """Return position inside the value to error; the source and the imported object must agree."""
    module = f"own_parts.typed_{abs(hash(annotation))}"
    Path(f"{module.replace('.', '/')}.py").write_text(TYPED.replace("ANNOTATION", annotation))
    live, read = (
        judge(meanings, f"{module}.typed", {"value": value}, "k") for meanings in (Meanings(importing=True), Meanings())
    )
    assert live == read
    return {
        str(f.key).removeprefix("k.params.value"): f.message.removeprefix(f"{module}.typed takes ") for f in read.faults
    }


FITS = [
    # targets
    ("nn.Module", BUILT),
    ("nn.Module", REF),
    ("Sequence[nn.Module]", [BUILT, {"type": "a.B", "params": {"p": 1}}, REF]),
    ("Sequence[nn.Module] | None", {"type": "a.make_them"}),
    ("nn.Module | Callable", "relu"),
    # lists
    ("Sequence[float]", [1, 0.5]),
    ("tuple[float | Tensor, float | Tensor]", [0.9, 0.999]),
    ("list[int] | list[str]", ["a", "b"]),
    ("tuple[int, int] | tuple[int, int, int]", [1, 2, 3]),
    ("tuple[int]", [1, 2, 3]),
    ("list[...]", [1, "a"]),
    ("tuple[()]", [1]),
    ("list[int | None]", [1, None]),
    ("Sequence[str]", "abc"),
    ("Iterable[str]", {"a": 1}),
    ("Sequence[Named]", "abc"),
    # paths and mappings
    ("str | os.PathLike | None", "here"),
    ("dict[str, int]", {"a": "b"}),
    ("Mapping[str, Any] | None", {"type": "b"}),
    # anything
    ("Colour", "red"),
    ("Callable", "relu"),
    ("T", [3]),
    ("np.ndarray", [3]),
    ("Tensor", [1.0, 2.0]),
    # a default that contradicts the annotation
    ("int = 0.1", 0.2),
    ("int = True", False),
    ("int = (8, 8)", [4, 4]),
    ("list[int] = ['a']", ["b"]),
]


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        *((annotation, value, {}) for annotation, value in FITS),
        # targets
        ("nn.Module", 7, {"": f"{TARGET} here, not 7"}),
        ("Sequence[nn.Module]", 7, {"": "a list here, not 7"}),
        ("Sequence[nn.Module]", "relu", {"": "a list here, not the text 'relu'"}),
        ("list[nn.Module] | None", [BUILT, 7], {".1": f"{TARGET} here, not 7"}),
        ("Sequence[nn.Module]", [{"typee": "a.B"}], {".0": f"{TARGET} here, not a mapping. Did you mean type?"}),
        ("Sequence[nn.Module]", [{"type": 7}], {".0": f"{TARGET} here, not a mapping"}),
        ("tuple[nn.Module, ...]", [{"type": "a.B", "parms": {}}],
         {".0": f"{TARGET} here, not a mapping. Did you mean params?"}),
        ("int", {"type": "a.B", "parms": {}}, {"": "a whole number here, not a mapping. Did you mean params?"}),
        # lists and their items
        ("list[int]", [1, "a", 0.5], {".1": "a whole number here, not the text 'a'",
                                      ".2": "a whole number here, not 0.5"}),
        ("list[list[float]]", [[1], ["a"]], {".1.0": "a number here, not the text 'a'"}),
        ("Iterable[int]", "1", {"": "a list here, not the text '1'"}),
        ("Collection[int]", {"a": 1}, {"": "a list here, not a mapping"}),
        ("Sequence[str]", [7], {".0": "a text here, not 7"}),
        ("Sequence", True, {"": "a list here, not true"}),
        ("tuple[float, float]", [1, 1, 1], {"": f"{TWO} here, not [1, 1, 1]"}),
        ("tuple[float | Tensor, float | Tensor]", [0.9, "high"], {".1": "a number here, not the text 'high'"}),
        ("int | tuple[int, int]", "a", {"": f"a whole number or {TWO} here, not the text 'a'"}),
        ("list[int] | list[str]", ["a", "b", 1], {".2": "a text here, not 1"}),
        # paths and mappings
        ("str | os.PathLike | None", 7, {"": "a text here, not 7"}),
        ("str | os.PathLike[str]", ["a"], {"": "a text here, not ['a']"}),
        ("dict[str, Any]", 7, {"": "a mapping here, not 7"}),
        ("Literal['crop', 'pad']", "crp", {"": "'crop' or 'pad' here, not the text 'crp'. Did you mean crop?"}),
    ],
)  # fmt: skip
def test_values_are_compared_with_the_annotation(own, annotation, value, expected):
    """Each wrong item has an error with its position and the allowed values; in doubt there is no error."""
    assert errors_of_value(own, annotation, value) == expected


def test_which_mappings_inside_params_are_targets_and_references():
    """A target has only `type`, with a dot, and optionally `params`; a reference has only `ref`, with a dot."""
    assert all(map(is_target, ({"type": "a.b"}, {"type": "a.b", "params": None}, {"type": "a.b", "params": {"x": 1}})))
    others = ({"type": "word"}, {"type": "a.b", "other": 1}, {"type": "a.b", "params": 3}, {"type": 5}, "a.b")
    assert not any(map(is_target, others))
    assert is_reference({"ref": "a.b"})
    assert not any(map(is_reference, ({"ref": "b"}, {"ref": "a.b", "x": 1}, {"ref": 5}, "a.b")))


def test_a_target_is_called_with_its_params(own):
    """Arguments of the caller come first, params are keyword arguments, and nested targets and references are built.
    The params of the target do not change, so that it can be saved and built again."""
    four = {"type": f"{CUSTOM}.picky", "params": {"value": 4}}
    params = {
        "rate": {"type": f"{CUSTOM}.Holder.made", "params": {"n": four}},
        "free": [four, {"deep": {"ref": "math.sqrt"}}, {"type": "word"}],
    }
    target = Target(type=f"{CUSTOM}.Plain", params=copy.deepcopy(params))
    made = build(target, 7, name="ours")
    assert (made.given["size"], made.given["name"], made.given["rate"]) == (7, "ours", 4)
    assert made.given["free"] == [4, {"deep": math.sqrt}, {"type": "word"}]
    assert target.params == params


def test_a_function_is_as_good_as_a_class(own):
    """Functions, class methods and partial objects are called like classes."""
    assert build({"type": f"{CUSTOM}.picky", "params": {"value": 2}}) == 2
    assert build({"type": "functools.partial"}, max, 1).args == (1,)
    assert list(build({"type": "itertools.islice"}, itertools.count(), 2)) == [0, 1]


def test_a_constructor_that_refuses_is_a_fault_of_the_config(own, monkeypatch):
    """The error has its message, key, place and the line that raised; DEEPLIGHTNING_DEBUG=1 raises the original."""
    target = Target(type=f"{CUSTOM}.picky", params={"value": -1})
    target.name, target.place = "model.network", "c.yaml:3:5"
    with pytest.raises(ConfigError) as caught:
        build(target)
    line = OWN.splitlines().index('        raise ValueError(f"value is {value}; it must not be negative")') + 1
    assert str(caught.value) == (
        f"c.yaml:3:5: model.network: {CUSTOM}.picky refuses its arguments: "
        f"ValueError: value is -1; it must not be negative (own_parts/inner/custom.py:{line})"
    )
    monkeypatch.setenv("DEEPLIGHTNING_DEBUG", "1")
    with pytest.raises(ValueError, match="it must not be negative"):
        build(target)


def test_a_lazy_import_that_fails_is_told_like_any_other(own):
    """A failing import in a module's `__getattr__` is reported like any other."""
    Path("lazy_one.py").write_text("def __getattr__(name):\n    import not_there\n")
    with pytest.raises(ValueError, match=r"importing lazy_one\.Net .* needs not_there, .*\(lazy_one\.py:2\)"):
        find("lazy_one.Net")


def test_a_word_beside_a_number_without_annotation_is_no_error(own):
    """Many such parameters also take a word; only a mistyped number is certainly wrong."""
    assert errors("torchvision.transforms.RandomErasing", {"value": "random"}) == {}
    assert errors(f"{CUSTOM}.Plain", {"size": 1, "free": "same", "flag": "weights.pth"}) == {}
