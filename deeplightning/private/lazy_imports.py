"""Import lazily the modules that torch and Lightning import but most runs do not use.

Importing Lightning imports all of torchmetrics, with SciPy, matplotlib and torchvision, `torch._dynamo`, the front end
of the compiler, and Triton; a run in eager mode uses none of these. Stand-ins replace them in `sys.modules`. The first
access that a stand-in does not cover loads the real module, which replaces the stand-in. If a library differs from the
supported version (torch 2.15, torchmetrics 1.9, Lightning 2.6), it is imported as usual.
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
    """Install the stand-ins when Lightning is imported; do nothing if it is imported already."""
    if _before_lightning not in sys.meta_path and not any(name in sys.modules for name in _LIGHTNING):
        sys.meta_path.insert(0, _before_lightning)


class _BeforeLightning(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name not in _LIGHTNING:
            return
        sys.meta_path.remove(self)
        if "torchmetrics" not in sys.modules:
            _load_torchmetrics_partly()
        if _DYNAMO not in sys.modules:
            _install_dynamo_stand_in()
        if _TRITON not in sys.modules and _FLOP_COUNTER not in sys.modules:
            _load_flop_counter_without_triton()


_before_lightning = _BeforeLightning()


# ---- torchmetrics


class _Package(ModuleType):
    """A package whose `__init__` runs at the first access to a missing name, or to all names. Its submodules can be
    imported before that."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _run_init(self)
        return getattr(self, name)


def _run_init(package: ModuleType) -> None:
    package.__class__ = ModuleType
    spec = package.__spec__
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(package)


def _load_torchmetrics_partly() -> None:
    """Import only the parts of torchmetrics that Lightning and our tasks use."""
    try:
        package = _unexecuted_package("torchmetrics")
        package.__dict__["_logger"] = logging.getLogger("torchmetrics")  # its submodules use it
        utilities = _unexecuted_package("torchmetrics.utilities")
        from torchmetrics.utilities.imports import _MATPLOTLIB_AVAILABLE

        imports = sys.modules["torchmetrics.utilities.imports"]  # the package's attribute would run its `__init__`
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


def _unexecuted_package(name: str) -> ModuleType:
    """Add a package to `sys.modules` without executing it."""
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
    """Execute torchmetrics' plot module again, with matplotlib. torchmetrics calls this before it plots."""
    _run_init(plot)
    plot._error_on_missing_matplotlib()


# ---- torch._dynamo


_EAGER_CALLERS = ("torch.", "pytorch_lightning.", "lightning_fabric.")
"""Modules that read the class of compiled networks from `torch._dynamo` in eager mode."""


class _IsCompiled(type):
    def __instancecheck__(cls, instance: object) -> bool:
        real = sys.modules.get(_DYNAMO)
        return not isinstance(real, _Dynamo | None) and isinstance(instance, real.OptimizedModule)


class _OptimizedModule(metaclass=_IsCompiled):
    """Stands in for the class of compiled networks until something is compiled."""


class _SubmoduleStandIn:
    """Stands in for a submodule of `torch._dynamo`: has the given attributes, and loads the module for any other."""

    def __init__(self, name: str, **attributes: object):
        self._name = name
        self.__dict__ |= attributes

    def __getattr__(self, name: str) -> object:
        return getattr(getattr(_load_dynamo(), self._name), name)


class _Dynamo(ModuleType):
    """Stands in for `torch._dynamo`: has the attributes that optimizers, Lightning and process groups use in eager
    mode, and loads the module for any other."""

    # `init_process_group` clears a cache, which is empty; `DistributedDataParallel` reads the default mode.
    trace_rules = _SubmoduleStandIn("trace_rules", clear_lru_cache=lambda: None)
    utils = _SubmoduleStandIn("utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {_DYNAMO!r} has no attribute {name!r}")
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib."):
            frame = frame.f_back
        if name == "OptimizedModule" and frame.f_globals.get("__name__", "").startswith(_EAGER_CALLERS):
            return _OptimizedModule
        return getattr(_load_dynamo(), name)

    @staticmethod
    def graph_break(*args: object, **kwargs: object) -> None:
        """Do nothing: nothing is being traced."""

    @staticmethod
    def disable(fn: object = None, recursive: bool = True, **options: Any) -> object:
        """Return a function that calls `fn`: directly until `torch._dynamo` is loaded, then with it disabled."""
        if fn is not None and not isinstance(fn, FunctionType):
            return _load_dynamo().disable(fn, recursive, **options)  # type: ignore[attr-defined]
        return functools.partial(_disabled, recursive=recursive, **options) if fn is None else _disabled(fn, recursive)


def _disabled(fn: Callable[..., object], recursive: bool = True, **options: object) -> Callable[..., object]:
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
    """Loads the real `torch._dynamo` before one of its submodules is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{_DYNAMO}."):
            return None
        _load_dynamo()
        return importlib.util.spec_from_loader(name, self) if name in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: importing the package executed the module."""


_submodules = _Submodules()


def _install_dynamo_stand_in() -> None:
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
    """Stands in for Triton's class of kernels until Triton is imported."""


def _load_flop_counter_without_triton() -> None:
    """Import torch's FLOP counter, which Lightning imports, without Triton: 70 MiB (3.9) for the one class that the
    counter needs to recognise a kernel."""
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
