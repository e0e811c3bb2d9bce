"""What torch and Lightning import and most runs do not use is left until something asks for it.

Importing Lightning takes torchmetrics whole, with SciPy, matplotlib and torchvision behind it, `torch._dynamo`, the
compiler's front, and Triton: of these a run in eager mode calls nothing. Stand-ins take their places. At the first
question that they cannot answer the real module is loaded, and from then on all is as if it had been from the
beginning. Where a library is not as we know it (torch 2.15, torchmetrics 1.9, Lightning 2.6), it is imported as ever.
"""

import contextlib
import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

_DYNAMO, _TRITON, _FLOP_COUNTER = "torch._dynamo", "triton", "torch.utils.flop_counter"

_LIGHTNING = ("pytorch_lightning", "lightning_fabric")


def import_lazily() -> None:
    """Has the stand-ins take their places when Lightning is imported; once it has been, this does nothing."""
    if _before_lightning not in sys.meta_path and not any(name in sys.modules for name in _LIGHTNING):
        sys.meta_path.insert(0, _before_lightning)


class _BeforeLightning(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name not in _LIGHTNING:
            return
        sys.meta_path.remove(self)
        if "torchmetrics" not in sys.modules:
            _torchmetrics_later()
        if _DYNAMO not in sys.modules:
            _dynamo_later()
        if _TRITON not in sys.modules and _FLOP_COUNTER not in sys.modules:
            _triton_later()


_before_lightning = _BeforeLightning()


# ---- torchmetrics


class _Package(ModuleType):
    """A package with its submodules, whose own `__init__` runs when it is asked for a name that it has not yet, or for
    all of its names."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _run_init(self)
        return getattr(self, name)

    def __dir__(self) -> list[str]:
        _run_init(self)
        return dir(self)


def _run_init(package: ModuleType) -> None:
    package.__class__ = ModuleType
    spec = package.__spec__
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(package)


def _torchmetrics_later() -> None:
    """Imports of torchmetrics what Lightning and our tasks use of it."""
    try:
        package = _empty("torchmetrics")
        package.__dict__["_logger"] = logging.getLogger("torchmetrics")  # asked for by its submodules
        utilities = _empty("torchmetrics.utilities")
        from torchmetrics.utilities.imports import _MATPLOTLIB_AVAILABLE

        imports = sys.modules["torchmetrics.utilities.imports"]  # to ask the package for it would run its `__init__`
        vars(imports)["_MATPLOTLIB_AVAILABLE"] = False
        from torchmetrics.__about__ import __version__
        from torchmetrics.collections import MetricCollection
        from torchmetrics.metric import Metric
        from torchmetrics.utilities import plot

        package.__dict__.update(__version__=__version__, Metric=Metric, MetricCollection=MetricCollection)
        vars(imports)["_MATPLOTLIB_AVAILABLE"] = _MATPLOTLIB_AVAILABLE
        plot._error_on_missing_matplotlib = functools.partial(_load_plots, plot)
        if isinstance(utilities, _Package):
            _run_init(utilities)
    except (ImportError, AttributeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchmetrics"]:
            del sys.modules[name]


def _empty(name: str) -> ModuleType:
    """A package in `sys.modules` of which nothing has been executed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    package = _Package(name)
    package.__spec__, package.__loader__, package.__file__, package.__package__ = spec, spec.loader, spec.origin, name
    package.__path__ = spec.submodule_search_locations or []
    sys.modules[name] = package
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, package)
    return package


def _load_plots(plot: ModuleType) -> None:
    """What torchmetrics calls before it draws: executes its module once more, with matplotlib."""
    _run_init(plot)
    plot._error_on_missing_matplotlib()


# ---- torch._dynamo


_ASKING = ("torch.", "pytorch_lightning.", "lightning_fabric.")
"""Modules that ask `torch._dynamo` in eager mode for the class of a compiled network."""


class _IsCompiled(type):
    def __instancecheck__(cls, instance: object) -> bool:
        real = sys.modules.get(_DYNAMO)
        return not isinstance(real, _Dynamo | None) and isinstance(instance, real.OptimizedModule)


class _OptimizedModule(metaclass=_IsCompiled):
    """What `torch.compile` makes of a network, before anything has been compiled."""


class _Part:
    """Answers what is asked of a submodule of `torch._dynamo`, and loads that for everything else."""

    def __init__(self, name: str, **answers: object):
        self._name = name
        self.__dict__ |= answers

    def __getattr__(self, name: str) -> object:
        return getattr(getattr(_load_dynamo(), self._name), name)


class _Dynamo(ModuleType):
    """Answers what optimizers, Lightning and a group of processes ask `torch._dynamo` in eager mode, and loads it for
    everything else."""

    # `init_process_group` clears a cache, which is empty; `DistributedDataParallel` asks for its default.
    trace_rules = _Part("trace_rules", clear_lru_cache=lambda: None)
    utils = _Part("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {_DYNAMO!r} has no attribute {name!r}")
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib."):
            frame = frame.f_back
        if name == "OptimizedModule" and frame.f_globals.get("__name__", "").startswith(_ASKING):
            return _OptimizedModule
        return getattr(_load_dynamo(), name)

    def __dir__(self) -> list[str]:
        return dir(_load_dynamo())

    @staticmethod
    def graph_break(*args: object, **kwargs: object) -> None:
        """Nothing is being traced."""

    @staticmethod
    def disable(fn: object = None, recursive: bool = True, **options: Any) -> object:
        """`fn` as it is, until there is a compiler that must be kept from it."""
        if fn is not None and not isinstance(fn, FunctionType):
            return _load_dynamo().disable(fn, recursive, **options)  # type: ignore[attr-defined]
        return (
            functools.partial(_kept_from, recursive=recursive, **options) if fn is None else _kept_from(fn, recursive)
        )


def _kept_from(fn: Callable[..., object], recursive: bool = True, **options: object) -> Callable[..., object]:
    disabled: Callable[..., object] | None = None

    @functools.wraps(fn)
    def call(*args: object, **kwargs: object) -> Any:
        nonlocal disabled
        if disabled is None:
            real = sys.modules.get(_DYNAMO)
            if isinstance(real, _Dynamo | None):
                return fn(*args, **kwargs)
            disabled = real.disable(fn, recursive, **options)
        return disabled(*args, **kwargs)

    return call


class _Submodules(MetaPathFinder, Loader):
    """Loads `torch._dynamo` itself before one of its submodules is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{_DYNAMO}."):
            return None
        _load_dynamo()
        return importlib.util.spec_from_loader(name, self) if name in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has been, as part of the package."""


_submodules = _Submodules()


def _dynamo_later() -> None:
    import torch

    stand_in = _Dynamo(_DYNAMO, "Stands in until something is compiled: see deeplightning.private.lazy_imports.")
    stand_in.__spec__ = spec = importlib.util.find_spec(_DYNAMO)
    stand_in.__file__ = spec.origin if spec is not None else None
    stand_in.__path__ = []
    sys.modules[_DYNAMO] = torch._dynamo = stand_in  # type: ignore[assignment]
    sys.meta_path.insert(0, _submodules)


def _load_dynamo() -> ModuleType:
    import torch

    with contextlib.suppress(ValueError):
        sys.meta_path.remove(_submodules)
    if isinstance(sys.modules.get(_DYNAMO), _Dynamo):
        del sys.modules[_DYNAMO], torch._dynamo
    import torch._dynamo

    return torch._dynamo


# ---- Triton


class _IsKernel(type):
    def __instancecheck__(cls, instance: object) -> bool:
        real = getattr(sys.modules.get(f"{_TRITON}.runtime.jit"), "JITFunction", cls)
        return real is not cls and isinstance(instance, real)


class _JITFunction(metaclass=_IsKernel):
    """What Triton makes of a kernel, before it has been asked to."""


def _triton_later() -> None:
    """Imports torch's counter of operations, which comes with Lightning, without Triton: 70 MiB (3.9) for the one class
    by which it knows a kernel."""
    if importlib.util.find_spec(_TRITON) is None:
        return
    names = [_TRITON, f"{_TRITON}.runtime", f"{_TRITON}.runtime.jit"]
    sys.modules |= {name: ModuleType(name) for name in names}
    sys.modules[names[-1]].JITFunction = _JITFunction  # type: ignore[attr-defined]
    try:
        import torch.utils.flop_counter  # noqa: F401
    except (ImportError, AttributeError):
        sys.modules.pop(_FLOP_COUNTER, None)
    finally:
        for name in names:
            del sys.modules[name]
