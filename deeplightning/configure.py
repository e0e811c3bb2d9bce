"""The former place of what `deeplightning` offers: programs that import it from here keep working."""

from deeplightning.checks.examine import load_config
from deeplightning.run.assemble import init_module, init_trainer

__all__ = ["init_module", "init_trainer", "load_config"]
