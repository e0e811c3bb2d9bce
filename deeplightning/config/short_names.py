"""Expand short names, such as `type: Adam` to `torch.optim.Adam`: names of torch, torchvision, Deep Lightning and
plug-ins without their module.

They are found in source text; nothing is imported. A name with a dot is not a short name.
"""

import pkgutil
from pathlib import Path

from deeplightning.config import other_tools
from deeplightning.faults import Missing, nearest, not_installed, plugin_of

_PACKAGE = Path(__file__).parents[1]
LAUNCHER = "engine.launcher"
MODULES = {
    "model.optimizer": ("torch.optim",),
    "model.scheduler": ("torch.optim.lr_scheduler",),
    "model.loss": ("torch.nn",),
    "model.network": ("torchvision.models", "deeplightning.model.*"),
    "train.callbacks": ("pytorch_lightning.callbacks", *(f"deeplightning.callbacks.{n}" for n in ("average", "watch"))),
    LAUNCHER: ("deeplightning.launch",),
    **dict.fromkeys(("logger", "logger.extra"), ("pytorch_lightning.loggers", "deeplightning.tracking")),
}
"""The modules to search for short names in each section; `*` means every module of a package."""


def full_name(role: str, name: str) -> str | None:
    """Return the name with its module, or None if it is not a short name, which the checks of targets report.

    Args:
        role: the key of a target, such as `model.optimizer`.
        name: without a dot.

    Raises:
        ValueError: it is ambiguous or misspelt; `Missing` if it is in a plug-in that is not installed.
    """
    from deeplightning.signatures import definition
    from deeplightning.signatures.names import Names
    from deeplightning.signatures.signature import Undecided

    names, found, misspelt, modules = Names(), dict[str, str](), "", list[str]()
    for module in MODULES.get(role, ()):
        package = module.removesuffix(".*")
        inside = pkgutil.iter_modules([str(_PACKAGE / package.rpartition(".")[2])])
        modules += [module] if package == module else [f"{package}.{inner.name}" for inner in inside]
    for module in modules:
        try:
            meaning = definition.look_up(f"{module}.{name}", names)
        except (Missing, Undecided):  # the package is not installed, or only importing would show it
            continue
        except ValueError as error:
            hint = "Loss?" if role == "model.loss" else "Did you mean"
            if not module.startswith("deeplightning.") and hint in str(error):
                misspelt = misspelt or str(error)
            continue
        is_loss = role != "model.loss" or name.endswith("Loss")
        is_defined_there = not module.startswith("deeplightning.") or meaning.path.startswith(f"{module}.")
        if meaning.kind in ("class", "function") and is_loss and is_defined_there:
            found.setdefault(meaning.path, f"{module}.{name}")
    if not found:
        from deeplightning.config import plugins  # imported lazily: rarely needed

        group = plugins.LAUNCHERS if role == LAUNCHER else plugins.TARGETS
        found = {full: full for full in plugins.full_names(group, name)}
    if len(found) > 1:
        raise ValueError(f"`{name}` is ambiguous: {', '.join(found.values())}; write one of them in full")
    if not found and role == LAUNCHER:
        if meant := nearest(name, ["Local", *plugins.names(group)]):
            raise ValueError(f"there is no launcher `{name}`.{meant}")
        name = name.title()
    if not found and not name.islower() and (plugin := plugin_of(name)):  # a lower-case name is a verb
        raise Missing(not_installed(plugin))
    if not found and misspelt and (other_tools.class_of(role, name) is None or name != name.lower()):
        raise ValueError(misspelt)
    return next(iter(found.values()), None)
