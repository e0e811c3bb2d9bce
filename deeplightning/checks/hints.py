"""What is right in a config and has no effect, as notices."""

from collections.abc import Collection, Iterator

from deeplightning.config.schema import Config, with_keys
from deeplightning.faults import Notice


def rates_without_effect(cfg: Config, searched: Collection[str] = ()) -> Iterator[Notice]:
    """Report the schedule that sets the learning rate instead of the optimizer's `lr`.

    Who writes both rates knows the schedule's; who changes `lr` alone, or searches over it, may not.

    Args:
        searched: keys that a search gives values to.
    """
    if "train" not in cfg.stages:
        return
    optimizers = dict(with_keys(cfg.model.optimizer, "model.optimizer"))
    for key, schedule in with_keys(cfg.model.scheduler, "model.scheduler"):
        name = str(schedule.type).rpartition(".")[2]
        rate = {"OneCycleLR": "max_lr", "CyclicLR": "base_lr"}.get(name)
        of = key.replace("scheduler", "optimizer", 1)
        if not rate or of not in optimizers or optimizers[of].params.get("lr") == schedule.params.get(rate):
            continue
        changed = cfg.written[1] if cfg.written else []
        is_alone = f"{of}.params.lr" in changed and f"{key}.params.{rate}" not in changed
        if is_alone or f"{of}.params.lr" in searched:
            yield Notice(f"{of}.params.lr has no effect: {name} sets the rate, from {key}.params.{rate}", key=key)
