"""The meaning and the signature of a dotted name are read from source text alone: `deeplightning.signatures`."""

import contextlib
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest

from deeplightning.config.signature_check import value_misfits
from deeplightning.config.target import find
from deeplightning.signatures.definition import look_up
from deeplightning.signatures.signature import UNKNOWN, Built, Factory, ListOf, Undecided, of_object


@pytest.fixture
def own(tmp_path, tmp_path_factory, monkeypatch):
    """A function that writes a user's modules into the working directory; none of them may be imported."""
    monkeypatch.chdir(tmp_path)
    others = tmp_path_factory.getbasetemp()  # other tests leave modules of these names behind
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not Path(place).is_relative_to(others)])
    for name in [n for n in sys.modules if n.startswith("own")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    yield write
    assert {n for n in set(sys.modules) - before if n.startswith("own")} == set()


def taken(name: str) -> list[str]:
    """Return the parameters, with `!` if required, `*` if keyword-only and `/` if positional-only."""
    parameters = look_up(name).signature().parameters
    return [p.name + "!" * p.required + "*" * (not p.position) + "/" * (not p.keyword) for p in parameters]


def why(name: str) -> str:
    """Return the reason why a name or its signature is undecided."""
    with pytest.raises(Undecided) as caught:
        look_up(name).signature()
    return str(caught.value)


# ---- comparison with the imported objects

LIBRARIES = {  # the smallest number of callables that must be decided
    "torch.optim": 17,
    "torch.optim.lr_scheduler": 15,
    "torch.nn": 160,
    "torch.nn.parallel": 2,
    "torch.utils.data": 20,
    "torchvision.models": 90,
    "torchvision.transforms.v2": 60,
    "torchmetrics.classification": 100,
    "torchmetrics.regression": 20,
    "pytorch_lightning.callbacks": 20,
    "pytorch_lightning.loggers": 5,
    "pytorch_lightning.strategies": 8,
    "sklearn.linear_model": 30,
    "deeplightning.data.image_folder": 5,
    "deeplightning.data.digits": 5,
    "deeplightning.data.mnist": 5,
    "deeplightning.data.cifar": 5,
    "deeplightning.data.augment": 2,
    "deeplightning.data.samplers": 2,
    "deeplightning.task.img_classif": 2,
    "deeplightning.task.pixel_input": 2,
    "deeplightning.task.classes": 1,
    "deeplightning.task.supervised": 1,
    "deeplightning.model.cnn": 1,
    "deeplightning.tracking.logger": 3,
}


def as_yaml(value: object) -> object:
    """Return a value as a config would contain it, or None if it cannot."""
    if isinstance(value, tuple | list):
        return [as_yaml(item) for item in value]
    return value if type(value) in (bool, int, float, str) else None


def differences(name: str, imported: object) -> list[str]:
    """Return contradictions of the source and the imported object, and defaults that either calls wrong."""
    found = look_up(name)
    live, read = of_object(imported), found.signature()
    known, seen = ({p.name: p for p in signature.parameters} for signature in (live, read))
    wrong = [f"{name}: no {p}" for p in known if p not in seen]
    if live.rest is None:
        wrong += [f"{name}: {p} is too much" for p in seen if p not in known]
        wrong += [f"{name}: {read.rest}"] if read.rest else []
    for parameter, real in known.items():
        if (other := seen.get(parameter)) is None:
            continue
        if (real.position, real.keyword, real.required) != (other.position, other.keyword, other.required):
            wrong.append(f"{name}: {real} is read as {other}")
        if other.default is not UNKNOWN and repr(other.default) != repr(real.default):
            wrong.append(f"{name}: {parameter}={real.default}, not {other.default}")
        if None not in (real.allowed, other.allowed) and set(real.allowed or ()) != set(other.allowed or ()):
            wrong.append(f"{name}: {parameter} allows {real.allowed}, not {other.allowed}")
        default = as_yaml(inspect.signature(imported).parameters[parameter].default)
        wrong += [f"{name}: {parameter}={found}" for each in (real, other) for found in value_misfits(default, each)]
    paths, complete = found.bases()
    if isinstance(imported, type) and complete:
        names = [path.rpartition(".")[2] for path in paths]
        if names != [c.__name__ for c in imported.__mro__[:-1]]:
            wrong.append(f"{name}: derives from {names}")
    return wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_source_agrees_with_the_imported_object(library):
    """Parameters, defaults, types and base classes agree for every public class and function of the libraries that
    configs name. Nothing that exists is reported as missing, and no default as mistyped."""
    module = importlib.import_module(library)
    wrong, decided = [], 0
    for name, value in vars(module).items():
        if name.startswith("_") or not callable(value):
            continue
        with contextlib.suppress(Undecided):
            wrong += differences(f"{library}.{name}", value)
            decided += 1
    assert wrong == []
    later = 2 * (library == "torch.optim" and not hasattr(module, "Muon"))  # torch 2.8 has two fewer
    assert decided >= LIBRARIES[library] - later


# ---- definitions

REEXPORTS = {
    "from ._parts import Thing": "own.Thing",
    "from own._parts import Thing as Other": "own.Other",
    "from . import _parts\nThing = _parts.Thing": "own.Thing",
    "import own._parts as p\nThing = p.Thing": "own.Thing",
    "import own._parts\nThing = own._parts.Thing": "own.Thing",
    "from ._parts import *": "own.Thing",
    "from .between import *": "own.Thing",
    "from . import _parts as p": "own.p.Thing",
    "try:\n    from ._parts import Thing\nexcept ImportError:\n    Thing = None": "own.Thing",
    "try:\n    from ._parts import Nothing as Thing\nexcept ImportError:\n    from ._parts import Thing": "own.Thing",
    "try:\n    from not_there import Thing\nexcept ImportError:\n    from ._parts import Thing": "own.Thing",
    "try:\n    from .needing import Thing\nexcept ImportError:\n    from ._parts import Thing": "own.Thing",
    "try:\n    from .needing import *\nexcept ImportError:\n    pass\nfrom ._parts import Thing": "own.Thing",
    "Thing = 1\nfrom ._parts import Thing": "own.Thing",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    Thing = 1\nelse:\n"
    "    from ._parts import Thing": "own.Thing",
    "if unknown():\n    raise ImportError\nfrom ._parts import Thing": "own.Thing",
    "def __getattr__(name):\n    if name == 'Thing':\n        from own._parts import Thing\n        return Thing\n"
    "    raise AttributeError(name)": "own.Thing",
    "import contextlib\nwith open('x') as file:\n    from ._parts import Thing": "own.Thing",
    "for n in range(3):\n    pass\nA, Thing = 1, __import__\nfrom ._parts import Thing": "own.Thing",
}


@pytest.mark.parametrize(("text", "name"), REEXPORTS.items(), ids=range(len(REEXPORTS)))
def test_a_name_is_followed_to_its_definition(own, text, name):
    """It is followed through aliases, `import *`, assignments, and conditions that this Python decides."""
    own(
        own___parts="class Thing:\n    def __init__(self, size):\n        pass\n",
        own__between="from ._parts import *",
        own__needing="import not_there\nclass Thing: ...",
    )
    Path("own/__init__.py").write_text(text)
    found = look_up(name)
    assert (found.path, found.kind, found.file) == ("own._parts.Thing", "class", Path("own/_parts.py").absolute())
    assert taken(name) == ["size!"]


def test_the_names_that_import_star_imports(own):
    """They are those of `__all__`, however it is assembled, or names without an underscore. The last one wins. A
    decorator may add to `__all__`, as that of timm's models does."""
    own(
        own_a="__all__ = ['f']\n__all__ += ['_g']\n__all__.extend(['h'])\ndef f(a): ...\n"
        "def _g(b): ...\ndef h(c): ...\n"
        "def i(d): ...\n@register\ndef registered(d): ...",
        own_b="def f(e): ...\ndef _g(f): ...",
        own_c="from own_a import *\nfrom own_b import *\ndef h(g): ...",
    )
    assert [taken(f"own_c.{name}") for name in ("f", "_g", "h")] == [["e!"], ["b!"], ["g!"]]
    with pytest.raises(ValueError, match=re.escape("own_c has no `i`.")):
        look_up("own_c.i")
    assert "@register may add it to `__all__` of own_a" in why("own_c.registered")


def test_a_folder_without_init_is_a_module(own):
    """It may be inside another one."""
    own(own__deep__part="def f(a): ...")
    assert taken("own.deep.part.f") == ["a!"]
    with pytest.raises(ValueError, match=re.escape("own.deep has no `pert`. Did you mean own.deep.part?")):
        look_up("own.deep.pert.f")


@pytest.mark.parametrize(
    ("name", "kind", "path"),
    [
        ("own_parts.number", "value", "own_parts.number"),
        ("own_parts.Table.columns", "value", "own_parts.Table.columns"),
        ("own_parts.Table.Row", "class", "own_parts.Table.Row"),
        ("own_parts.Table.made", "function", "own_parts.Table.made"),
        ("own_parts.Wide.made", "function", "own_parts.Table.made"),
        ("torch.optim", "module", "torch.optim"),
        ("collections.abc.Mapping", "class", "collections.abc.Mapping"),
        ("os.path.join", "function", "posixpath.join"),
    ],
)
def test_what_a_name_is(own, name, kind, path):
    """It is a class, function, module or other value, also if it is an attribute of a class or inherited."""
    own(
        own_parts="""
        number = 5
        class Table:
            columns = 3
            class Row: ...
            @classmethod
            def made(cls, rows, *, wide=False): ...
        class Wide(Table): ...
        """
    )
    found = look_up(name)
    assert (found.kind, found.path) == (kind, path)


# ---- names that do not exist


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("collections.OrderedDict.fromkey", "collections.OrderedDict has no `fromkey`. Did you mean"),
        ("colections.OrderedDict", "there is no module colections to import (for `colections.OrderedDict`)."),
        ("collections.abd.Mapping", "collections has no `abd`. Did you mean collections.abc?"),
        ("own_parts.inner.custom.Plane", "inner.custom has no `Plane`. Did you mean own_parts.inner.custom.Plain?"),
        ("own_parts.inner.costum.Plain", "own_parts.inner has no `costum`. Did you mean own_parts.inner.custom?"),
        ("own_parts.inner.custom.Plain.mode", "own_parts.inner.custom.Plain has no `mode`."),
        ("SGD", "`SGD` is not a MODULE.NAME such as torch.optim.SGD."),
        ("a..b", "is not a MODULE.NAME"),
        ("", "is not a MODULE.NAME"),
        ("os.class", "is not a MODULE.NAME"),
        ("../x.y", "is not a MODULE.NAME"),
        (f"{'x' * 5000}.y", "there is no module x"),
        ("own_broken.Thing", "SyntaxError"),
        ("own_indent.Thing", "IndentationError"),
        ("own_needs.Thing", "needs not_installed_pkg, which is not installed"),
        ("own_parts.inner.broken.Thing.method", "SyntaxError"),
        ("own_wrong.Thing", "cannot import name 'Nothing' from 'own_parts.inner.custom'"),
        ("own_relative.Thing", "failed: ImportError: attempted relative import with no known parent package"),
        ("torch.optim.dam", "Did you mean torch.optim.Adam?"),  # the class, not the module `adam`
        ("deeplightning.data.signal.SignalFolder", "is called deeplightning.data.signal_folder.SignalFolder here."),
    ],
)
def test_check_and_training_report_a_wrong_name_alike(own, name, words):
    """For a name that does not exist, a file that is not Python or a missing package, `check` and `train` have the same
    error: the part that exists, the part that does not, and the nearest name."""
    own(
        own_relative="from .own_parts.inner.custom import Plain as Thing\n",
        own_parts__inner__custom="class Plain:\n    def made(self): ...",
        own_parts__inner__broken="def f(:",
        own_broken="x = 1\ndef f(:\n",
        own_indent="x = 1\n  y = 2\n",
        own_needs="import os\nimport not_installed_pkg\nclass Thing: ...",
        own_wrong="from own_parts.inner.custom import Nothing as Thing\n",
    )
    with pytest.raises(ValueError, match=re.escape(words)) as of_check:
        look_up(name)
    with pytest.raises(ValueError, match=re.escape(words)) as of_training:
        find(name)
    assert str(of_check.value) == str(of_training.value)
    for module in [n for n in sys.modules if n.startswith("own")]:
        del sys.modules[module]


UNDECIDED_NAMES = {
    "def __getattr__(name):\n    if name == 'Thing':\n        from own_other import Things\n        return Things\n"
    "    raise AttributeError(name)": "`__getattr__`",
    "def __getattr__(name):\n    return make(name)": "`__getattr__`",
    "class _Thing: ...\ndef __getattr__(name):\n    from own_other import Things\n    return globals()['_' + name]": (
        "`__getattr__`"
    ),
    "def __getattr__(name):\n    found = TABLE.get(name)\n    if found is not None:\n        return found\n"
    "    raise AttributeError(name)": "`__getattr__`",
    "globals()['Thing'] = 1": "globals()",
    "import sys\nsys.modules[__name__] = 1": "sys.modules",
    "Thing = make()": "the result of `make()`",
    "import functools\nThing = functools.partial(print, 1)": "functools.partial",
    "from _socket import *": "not written in Python",
    "from _socket import Thing": "not written in Python",
    "if unknown():\n    class Thing: ...\nelse:\n    def Thing(): ...": "which definition of `Thing`",
    "if unknown():\n    class Thing: ...": "depends on the machine",
    "try:\n    Thing = make()\nexcept ValueError:\n    Thing = None": "which definition of `Thing`",
    "for Thing in (1, 2):\n    pass": "is bound by a loop",
    "from own_other import Thing": "circular",
    "Thing = Other\nOther = Thing": "circular",
    "A = (1, 2)\nThing, B = A": "a part of another value",
    "def f(): ...\nThing = f.x": "is known only at import time",
    "import sys\nsys.path.append('lib')\nfrom only_there import Thing": "only_there",
}


@pytest.mark.parametrize(("text", "words"), UNDECIDED_NAMES.items(), ids=range(len(UNDECIDED_NAMES)))
def test_a_name_that_only_running_would_tell_is_undecided(own, text, words):
    """It is neither found nor missing if it is created on import, in C, under a condition, or circularly."""
    own(own_thing=text, own_other="from own_thing import Thing")
    with pytest.raises(Undecided, match=re.escape(words)):
        look_up("own_thing.Thing")


# ---- signatures


METHODS = (
    "class Base:\n    @classmethod\n    def inherited(cls, b): ...\nclass Own(Base):\n    def normal(self, a): ...\n"
    "    @classmethod\n    def of_class(cls, a): ...\n    @staticmethod\n    def static(a): ..."
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def Thing(a, /, b, c=1, *more, d, e=2): ...", ["a!/", "b!", "c", "d!*", "e*"]),
        ("class Made:\n    def __init__(self, b): ...\nclass Thing:\n    def __new__(cls, a): return Made(a)", ["a!"]),
        (
            "class O:\n    def __init__(self, o): ...\nclass A(O): ...\nclass B(O):\n    def __init__(self, b): ...\n"
            "class Thing(A, B): ...",
            ["b!"],
        ),
        ("from abc import ABC, ABCMeta, abstractmethod\nclass Base(metaclass=ABCMeta):\n    @abstractmethod\n"
         "    def __init__(self, a): ...\nclass Thing(Base, ABC): ...", ["a!"]),
        ("class Thing:\n    def _make(self, a): ...\n    __init__ = _make", ["a!"]),
        ("from dataclasses import dataclass\n@dataclass\nclass Thing:\n    a: int\n"
         "    def __init__(self, b): ...", ["b!"]),
        # decorators that keep the signature
        ("import functools\n@functools.cache\ndef Thing(a): ...", ["a!"]),
        ("import contextlib\n@contextlib.contextmanager\ndef Thing(a):\n    yield", ["a!"]),
        ("import torch\n@torch.no_grad()\ndef Thing(a): ...", ["a!"]),
        # methods, called on the class: `self` is an argument, `cls` is not
        (f"{METHODS}\nThing = Own.normal", ["self!", "a!"]),
        (f"{METHODS}\nThing = Own.of_class", ["a!"]),
        (f"{METHODS}\nThing = Own.static", ["a!"]),
        (f"{METHODS}\nThing = Own.inherited", ["b!"]),
    ],
)  # fmt: skip
def test_what_a_target_takes(own, text, expected):
    """A target may be a function, a class with an own or inherited constructor, decorated or not, or a method."""
    own(own_thing=text)
    assert taken("own_thing.Thing") == expected


UNDECIDED = {
    "made = make()\n@made(0.5)\nclass Base:\n    a: int\nclass Thing(Base): ...": "@made(0.5) generates the",
    "def made(cls):\n    cls.__init__ = make\n    return cls\n@made\nclass Base:\n    a: int\nclass Thing(Base): ...":
        "@made generates the constructor of own_thing.Base",
    "def odd(f):\n    return lambda: f(1)\n@odd\ndef Thing(a): ...": "@odd may change what it takes",
    "from not_there_at_all import odd": "",
    "import enum\nclass Thing(enum.Enum):\n    A = 1": "metaclass",
    "from typing import Protocol\nclass Thing(Protocol):\n    def f(self): ...": "Protocol",
    "class Meta(type):\n    def __call__(cls, x): ...\nclass Thing(metaclass=Meta):\n"
    "    def __init__(self, a): ...": "Meta",
    "class Thing(dict): ...": "builtins.dict is not written in Python",
    "class Thing(Exception): ...": "builtins.Exception is not written in Python",
    "class Thing(make()): ...": "an ancestor cannot be read",
    "from typing import NamedTuple\nclass Thing(NamedTuple):\n    a: int": "an ancestor cannot be read",
    "def same(f):\n    return f\n@same\ndef Thing(a): ...": "@same may change",
    "class Thing(Thing): ...": "an ancestor cannot be read",
    "class A(B): ...\nclass B(A): ...\nThing = A": "an ancestor cannot be read",
    "class Thing:\n    def __init__(self, a): ...\nThing.__init__ = other": "assigned outside the class",
    "class Thing:\n    __signature__ = 1\n    def __init__(self, a): ...": "defines `__signature__`",
    "class Thing:\n    __init__ = make()": "",
    "class Base:\n    def __init_subclass__(cls):\n        wrap(cls)\n"
    "class Thing(Base):\n    def __init__(self, a): ...": "`__init_subclass__` of own_thing.Base may change",
    "class Thing:\n    def __new__(cls, a): return object.__new__(cls)\n    def __init__(self, b): ...": "both decide",
    "from dataclasses import dataclass\n@dataclass\nclass Thing:\n    a: int": "@dataclass generates the constructor",
    "import dataclasses as d\n@d.dataclass(frozen=True)\nclass Base:\n    a: int\nclass Thing(Base):\n"
    "    b: int = 1": "@dataclass generates the constructor of own_thing.Base",
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), UNDECIDED.items(), ids=range(len(UNDECIDED)))
def test_what_only_running_would_tell_is_undecided(own, text, words):
    """Generated or C constructors, unknown decorators and unreadable base classes are never guessed."""
    own(own_thing=text)
    if "not_there_at_all" in text:
        with pytest.raises(ValueError, match="needs not_there_at_all, which is not installed here"):
            look_up("own_thing.odd")
        return
    assert words in why("own_thing.Thing")


# ---- `**kwargs`

PASSED_ON = {
    "class A:\n    def __init__(self, a): ...\nclass B:\n    def __init__(self, b): ...\n"
    "def Thing(x, **k):\n    if x:\n        cls = A\n        return cls(**k)\n    cls = B\n    return cls(**k)":
        (["x!"], "`cls` in Thing is known only at run time"),
    # to a parent
    "class Base:\n    def __init__(self, a, b=1, *, c=2): ...\nclass Thing(Base):\n    def __init__(self, x, **more):\n"
    "        super().__init__(x, c=3, **more)": (["x!", "b*"], None),
    "class Base:\n    def __init__(self, a, b=1): ...\nclass Thing(Base):\n    def __init__(self, **more):\n"
    "        Base.__init__(self, **more)": (["a!*", "b*"], None),
    "class Base:\n    def __init__(self, a, b=1): ...\nclass Thing(Base):\n"
    "    def __init__(self, *args, c=0, **more):\n"
    "        super().__init__(*args, **more)": (["a!", "b", "c*"], None),
    "class Thing:\n    def __init__(self, a, **more):\n        super().__init__(**more)": (["a!"], None),
    "class A:\n    def __init__(self, a=1, **k):\n        super().__init__(**k)\nclass B:\n"
    "    def __init__(self, b=1): ...\n"
    "class Thing(A, B): ...": (["a", "b*"], None),
    # to a function, a class, several
    "def inner(a, b, c=1): ...\ndef Thing(x, **more):\n    return inner(x, **more)": (["x!", "b!*", "c*"], None),
    "def inner(a, b=1): ...\ndef Thing(x, **more):\n    if x:\n"
    "        return inner(**more)": (["x!", "a*", "b*"], None),
    "def f(a): ...\ndef g(a, b): ...\ndef Thing(**more):\n    f(**more)\n    g(1, **more)": (["a*", "b*"], None),
    "class Made:\n    def __init__(self, a): ...\n    @classmethod\n    def made(cls, **k):\n        return cls(**k)\n"
    "Thing = Made.made": (["a!*"], None),
    "def Thing(**more):\n    from json import dumps\n    return dumps(1, **more)":
        (["skipkeys*", "ensure_ascii*", "check_circular*", "allow_nan*", "cls*", "indent*", "separators*", "default*",
          "sort_keys*"], ""),  # `dumps` passes its own to a class that is chosen at run time
    # names that are removed
    "def Thing(**k):\n    a = k.pop('a', 1)\n    b = k['b']\n    if k:\n"
    "        raise TypeError(f'unknown: {sorted(k)}')":
        (["a*", "b*"], None),
    "def f(c): ...\ndef Thing(**k):\n    k.setdefault('c', 1)\n    f(**k)": (["c*"], None),
    "def fix(options, name):\n    options[name] = 1\ndef f(c, d=1): ...\ndef Thing(**k):\n    fix(k, 'c')\n    f(**k)":
        (["c*", "d*"], None),
    "D = {'c': 1}\ndef f(c): ...\ndef Thing(**k):\n    k = {**D, **k}\n    return f(**k)":
        (["c*"], "a way that is not followed"),
    # any keyword
    "def Thing(a, **k): ...": (["a!"], "it takes any other keyword and ignores it"),
    "class Thing:\n    def __init__(self, **k):\n        self.k = k": ([], "in a way that is not followed"),
    "def Thing(**k):\n    for name in k:\n        print(name)": ([], "in a way that is not followed"),
    "def Thing(**k):\n    k.pop(name)": ([], "are known only at run time"),
    "def Thing(f, **k):\n    return f(**k)": (["f!"], "`f` in Thing is known only at run time"),
    "def Thing(**k):\n    return odd(k)": ([], "passes `k` to `odd`"),
    "def f(**k):\n    return Thing(**k)\ndef Thing(**k):\n    return f(**k)": ([], "is circular"),
    "def Thing(**k):\n    return dict(**k)": ([], "dict"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), PASSED_ON.items(), ids=range(len(PASSED_ON)))
def test_kwargs_have_the_parameters_of_their_receiver(own, text, expected):
    """`**kwargs` stand for the parameters of the function that receives them; if it is unknown, there is a reason."""
    own(own_thing=text)
    parameters, reason = expected
    assert taken("own_thing.Thing") == parameters
    found = look_up("own_thing.Thing").signature().rest
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("name", "some", "none"),
    [
        ("torchvision.models.resnet18", {"weights", "progress", "num_classes", "norm_layer", "pretrained"}, {"block"}),
        ("torchmetrics.Accuracy", {"task", "num_classes", "sync_on_compute"}, set()),
        ("torch.nn.LSTM", {"input_size", "hidden_size", "num_layers", "bidirectional", "proj_size"}, {"mode"}),
        ("deeplightning.data.image_folder.ImageFolder", {"cfg", "image_size", "augment"}, {"image_spec"}),
    ],
)
def test_what_the_libraries_of_configs_take_is_known(name, some, none):
    """They are known even if the signature has `**kwargs`, so a misspelled param is certainly wrong."""
    signature = look_up(name).signature()
    names = {p.name for p in signature.parameters}
    assert signature.rest is None
    assert some <= names
    assert not (none | {"num_clases"}) & names


@pytest.mark.filterwarnings("ignore")
def test_objects_refuse_keywords_that_the_signature_lacks():
    """If `**kwargs` were followed to their end, the object accepts the keywords found and no others."""
    module, tried = importlib.import_module("torchmetrics.classification"), 0
    for name in module.__all__:
        signature = look_up(f"torchmetrics.classification.{name}").signature()
        given = {"num_classes": 3, "num_labels": 3, "task": "multiclass"}
        required = {p.name for p in signature.parameters if p.required}
        if signature.rest is not None or not required <= set(given):
            continue
        given = {p.name: given[p.name] for p in signature.parameters if p.name in given}
        with pytest.raises((TypeError, ValueError), match="no_such_word"):
            getattr(module, name)(**given, no_such_word=1)
        getattr(module, name)(**given, sync_on_compute=False)
        tried += 1
    assert tried >= 15


# ---- types and defaults


@pytest.mark.parametrize(
    ("annotation", "allowed"),
    [
        ("typing.Union[int, 'str']", (int, str)),
        ("Optional[str]", (str, type(None))),
        ("t.Literal[True] | int", (True, int)),
        ("List['int | None']", (ListOf(((int, type(None)),)),)),
        ("list[unheard_of]", (ListOf(),)),
        ("Tuple[int, ...] | bool", (ListOf(((int,),)), bool)),
        ("tuple[int, *tuple[int, ...]]", None),
        ("Sequence[Literal['a']]", (ListOf((("a",),), also=(str,)),)),
        ("abc.Sequence[float]", (ListOf(((float,),)),)),
        ("dict[str, int] | None", (dict, type(None))),
        ("Size", (int, ListOf(((int,), (int,)), fixed=True))),
        ("Pair", (float, ListOf(((float,), (float,)), fixed=True))),
        ("own_types.Size", (int, ListOf(((int,), (int,)), fixed=True))),
        ("Tree", (int, ListOf())),
        ("torch.Tensor | float", (float,)),
        ("Tensor | str", None),
        ("torch.nn.Linear | None", (Built, type(None))),
        ("Path | int", (str, int)),
        ("Own | int", None),
        ("Callable[..., Module]", (Factory(None, ("torch.nn.modules.module.Module",)),)),
        ("abc.Callable[[int], int] | None", (Factory(1), type(None))),
        (
            "Callable[[int], Module | Own] | Module",
            (Factory(1, ("torch.nn.modules.module.Module", "own_thing.Own")), Built),
        ),
        ("set[int]", None),
        ("unheard_of", None),
        ("T", None),
        ("str", None),
        ("'not an expression ['", None),
    ],
)
def test_an_annotation_names_what_is_allowed(own, annotation, allowed):
    """Builtins that are not rebound, aliases, type variables and callables restrict the values; other annotations allow
    any. test_target.py tests the values themselves."""
    own(
        own_types="""
        from typing import TypeVar, Union
        T = TypeVar("T")
        Tree = Union[int, list["Tree"]]
        Size = Union[int, tuple[int, int]]
        Either = T | tuple[T, T]
        Pair = Either[float]
        """,
        own_thing=f"""
        import typing, typing as t, torch, own_types
        from collections import abc
        from collections.abc import Sequence
        from typing import *
        from pathlib import Path
        from typing import Callable, List, Literal, Optional, Tuple
        from torch import Tensor
        from torch.nn import Module
        from own_types import Pair, Size, T, Tree
        class Own: ...
        {"class str: ..." if annotation == "str" else ""}
        def Thing(a: {annotation}): ...
        """,
    )
    (parameter,) = look_up("own_thing.Thing").signature().parameters
    assert parameter.allowed == allowed
    assert parameter.annotation == annotation.strip("'")


def test_a_default_is_a_plain_value(own):
    """Literals, negative numbers and lists of these are known; other defaults are unknown."""
    own(
        own_thing="""
        SIZE = 3
        def Thing(a=1, b=-0.5, c="x", d=None, e=True, f=SIZE, g=(1, 2), h=[], i=make()): ...
        """
    )
    values = [p.default for p in look_up("own_thing.Thing").signature().parameters]
    assert values == [1, -0.5, "x", None, True, UNKNOWN, [1, 2], [], UNKNOWN]


# ---- base classes, metrics


def test_the_ancestors_of_a_class(own):
    """They have their real paths and Python's order; if one cannot be read, the list is marked as incomplete."""
    own(own_base="class A: ...\nclass B(A): ...\nclass C(A): ...", own_thing="""
        import own_base
        from own_base import B as Bee
        class Thing(Bee, own_base.C): ...
        class Odd(Bee, make()): ...
        """)  # fmt: skip
    assert look_up("own_thing.Thing").bases() == (["own_thing.Thing", "own_base.B", "own_base.C", "own_base.A"], True)
    paths, complete = look_up("own_thing.Odd").bases()
    assert paths[:2] == ["own_thing.Odd", "own_base.B"]
    assert not complete


def test_a_keyword_that_is_converted_may_have_any_type(own):
    """The annotation of the function that receives it holds for the converted value."""
    own(own_thing="def f(size: tuple[int, int]): ...\ndef Thing(**k):\n    k['size'] = (k['size'],) * 2\n    f(**k)")
    assert look_up("own_thing.Thing").signature().parameters[0].allowed is None


LOGGED = {
    "def f(self): self.log('a', 1); self.log(name='b', value=2)": ({"a", "b"}, True),
    "def f(self): self.log_dict({'a': 1, 'b': 2})": ({"a", "b"}, True),
    "def f(self, stage): self.log(f'{stage}_loss', 1)\n    def g(self): self.f('val'); self.f(stage='test')":
        ({"val_loss", "test_loss"}, True),
    "def f(self):\n        for name in ('a', 'b'):\n            self.log(f'x_{name}', 1)": (set(), False),
    "word = 'w'\n    def f(self): self.log(self.word + '_x', 1)": (set(), False),
    "def f(self): self.log(WORD + '_x', 1)\nWORD = 'w'": ({"w_x"}, True),
    "def f(self):\n        values = {'a': 1}\n        values['b'] = 2\n"
    "        self.log_dict(values)": (set(), False),
    "def f(self, names):\n        self.log('a', 1)\n        for n in names: self.log(n, 1)": ({"a"}, False),
    "def f(self): self.log(f'{self.make()}', 1)": (set(), False),
    "def f(self, stage):\n        stage = stage.lower()\n        self.log(f'{stage}_loss', 1)\n"
    "    def g(self): self.f('VAL')": (set(), False),
    "def f(self):\n        log_all(module=self)": (set(), False),
    "def f(self, trainer, pl_module): evaluate(pl_module)": (set(), False),
    "def f(self, trainer, module): evaluate(module)": (set(), False),
    "def f(self, trainer, pl_module): super().f(trainer, pl_module)": (set(), True),
    "def f(self, trainer, pl_module): self.g(pl_module)\n    def g(self, pl_module): pl_module.log('a', 1)":
        ({"a"}, True),
    "def f(self): self.log_dict(make())": (set(), False),
    "logged_metrics = ('{stage}_loss', 'lr')\n    def f(self): self.log(make(), 1)": ({"{stage}_loss", "lr"}, True),
    "def f(self): self.log('a/b', 1, on_epoch=True); self.log('c', 1, on_step=False, on_epoch=True)":
        ({"a/b", "a/b_step", "a/b_epoch", "c"}, True),
    "def f(self):\n        log_all(self, 1)": (set(), False),
    "def f(self): write = self.log; write('a', 1)": (set(), False),
    "def f(self): isinstance(self, Base); self.log('a', 1)": ({"a"}, True),
    "def f(self): ...": (set(), True),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), LOGGED.items(), ids=range(len(LOGGED)))
def test_the_metrics_that_a_task_logs(own, text, expected):
    """They are the literal names in calls of `self.log`; `logged_metrics` of the class takes precedence."""
    own(own_base=f"import pytorch_lightning as pl\nclass Base(pl.LightningModule):\n    {text}\n",
        own_task="from own_base import Base\nclass Task(Base):\n    def g2(self): ...\n")  # fmt: skip
    assert look_up("own_task.Task").logged_names() == expected


# ---- robust


def test_a_changed_file_is_read_again(own):
    """This holds within one process, as in a notebook."""
    own(own_thing="def Thing(a): ...")
    assert taken("own_thing.Thing") == ["a!"]
    own(own_thing="def Thing(b): ...")
    assert taken("own_thing.Thing") == ["b!"]


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "(" * 5000 + ")" * 5000,
        "x = " + "-" * 100_000 + "1",
        "Thing = a" + ".b" * 20_000,
        "class Thing(" + "a." * 3000 + "b): ...",
        "\0",
        "\ud800".encode("utf-8", "surrogatepass").decode("latin1"),
        "\n".join(f"class C{n}(C{n + 1}): ..." for n in range(2000)) + "\nThing = C0",
        "\n".join(f"A{n} = A{n + 1}" for n in range(2000)) + "\nThing = A0",
    ],
    ids=range(8),
)
def test_odd_files_are_answered(own, text):
    """A deeply nested, long or damaged file is read or refused with a message."""
    own(own_thing="")
    Path("own_thing.py").write_text(text)
    with contextlib.suppress(ValueError, Undecided):
        found = look_up("own_thing.Thing")
        assert found.bases()[0][0] == found.path
        found.signature()


@pytest.mark.skipif(sys.version_info < (3, 14), reason="older versions evaluate annotations at the definition")
def test_an_annotation_that_only_type_checkers_import_is_not_evaluated():
    """Python 3.14 evaluates annotations on access; a signature is known without them."""
    names = {}
    exec("def made(cfg: Missing, rate: float = 0.1): ...", names)
    found = of_object(names["made"])
    assert [p.name for p in found.parameters] == ["cfg", "rate"]
    assert found.unresolved
