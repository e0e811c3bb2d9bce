"""The environment of a run. Reading a config changes nothing; launching one sets here what it requests."""

import json
import os
from pathlib import Path

from deeplightning.config.schema import Config
from deeplightning.engine.gpus import show_gpus
from deeplightning.engine.plan import address_of
from deeplightning.own_code import ROOTS, add_import_roots, original_roots
from deeplightning.private.python import import_in_spawned
from deeplightning.process.identity import hand_on


def apply_environment(cfg: Config) -> None:
    """Set the environment that a resolved config requests, for this process and those that it starts.

    These are the variables of `engine.env`, those that replace secrets written in clear, the address of rank 0, the
    visible GPUs, the drawn seed, and the folders of the user's own code, which also stay for later configs, such as
    that of the run's export. A second call changes nothing.

    Raises:
        SetupError: GPUs are chosen by id, and CUDA was initialised with others.
    """
    os.environ |= cfg.engine.env
    if cfg.secrets:
        os.environ |= cfg.secrets.variables()
    os.environ |= address_of(cfg.engine)
    show_gpus(cfg.engine)
    hand_on("seed", cfg.seed)
    add_import_roots(*map(Path, cfg.roots or ()))
    os.environ[ROOTS] = json.dumps(original_roots())
    import_in_spawned(add_import_roots)  # a loader's spawned workers need the same import roots
