"""Deep Lightning: a YAML file becomes a tracked training run, and the run an HTTP endpoint.

Public names; they are imported lazily, so `import deeplightning` alone is cheap:

- `train(config, overrides)`: trains a config as the command does, and returns its `Run`.
- `load_run(run)`: the `Run` of an earlier training.
- `Run(past)`: config, metrics, network, bundle and answers of a run, as both return it.
- `load_config(path, overrides)`: the config of a file, checked and resolved.
- `init_module(cfg, "data")`, `init_module(cfg, "model")`: its data module and its task.
- `init_trainer(cfg)`: a Lightning Trainer that tracks the run.
- `build(target)`: the object that `{type: MODULE.CLASS, params: {...}}` describes.
- `resolve_run(name)`: the folder of a run, by its id, its name or its path.
- `trained_task(folder)`: the task of a finished run with its best weights.
- `predict_files(folder, files)`: writes a table of a finished run's answers to files of inputs.
"""

from typing import TYPE_CHECKING

from deeplightning.version import __version__

if TYPE_CHECKING:
    from deeplightning.api import Run, load_run, train
    from deeplightning.config.examine import load_config
    from deeplightning.config.target import build
    from deeplightning.run.assemble import init_module, init_trainer
    from deeplightning.run.load import trained_task
    from deeplightning.run.predict import predict_files
    from deeplightning.tracking import resolve_run

_MODULES = {
    "Run": "api",
    "build": "config.target",
    "init_module": "run.assemble",
    "init_trainer": "run.assemble",
    "load_config": "config.examine",
    "load_run": "api",
    "predict_files": "run.predict",
    "resolve_run": "tracking",
    "train": "api",
    "trained_task": "run.load",
}

__all__ = [
    "Run",
    "__version__",
    "build",
    "init_module",
    "init_trainer",
    "load_config",
    "load_run",
    "predict_files",
    "resolve_run",
    "train",
    "trained_task",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deeplightning.config.target import find

    return find(f"{__name__}.{_MODULES[name]}.{name}")
