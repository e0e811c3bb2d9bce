"""Keys that are each right and wrong together."""

from deeplightning.checks.errors import Findings
from deeplightning.checks.targets import with_keys
from deeplightning.config import schema
from deeplightning.config.schema import Config, Target


def contradictions(findings: Findings, config: Config) -> None:
    """Report keys that are each right and wrong together."""
    train, data = config.train, config.data or schema.Data(module=_NONE, batch_size=1)
    model = config.model or schema.Model(module=_NONE, optimizer=None)
    gpus = config.engine.gpus if config.engine is not None else None
    if isinstance(gpus, list):
        _devices(findings, gpus)
    name = config.logger.params.get("experiment_name") if config.logger is not None else None
    if isinstance(name, str) and not name.strip() and config.logger.type.lower().endswith(".mlflowlogger"):
        message = "is empty; give the experiment a name, or remove the key, which means Default"
        findings.fault(message, "logger.params.experiment_name", found=repr(name), allowed="a name")
    if not config.stages:
        findings.fault("nothing to do: give at least one of train, validate, test, predict", "stages")
    if "train" in config.stages:
        if train.num_epochs is None and train.max_steps is None:
            findings.fault("missing: say how long to train, for example `num_epochs: 10`", "train.num_epochs")
        for key, _ in with_keys(model.optimizer, "model.optimizer"):
            if f"{key}.params" not in findings.places:
                findings.fault("missing: the optimizer's settings, for example `params: {lr: 0.01}`", f"{key}.params")
    if data.num_splits is not None and data.num_splits < 2:
        message = f"must be at least 2, not {data.num_splits}; with 10, one tenth of the training set validates"
        findings.fault(message, "data.num_splits", found=str(data.num_splits), allowed="at least 2")
    for key, number in (
        ("train.val_every_n_epoch", train.val_every_n_epoch),
        ("train.checkpoint.every_n_epochs", train.checkpoint.every_n_epochs),
    ):
        if number is not None and not (0 < number <= 1 or (number > 1 and number % 1 == 0)):
            findings.wrong("a whole number of epochs, or a fraction between 0 and 1", number, key)
    if train.limit_batches is not None and train.limit_batches.train == 0:
        allowed = "at least 1 batch, or a fraction above 0; to validate alone set `train.num_epochs=0`"
        findings.wrong(allowed, train.limit_batches.train, "train.limit_batches.train")
    for name, part in vars(train.limit_batches).items() if train.limit_batches else ():
        if isinstance(part, float) and not 0 <= part <= 1:
            allowed = "a whole number of batches, or a fraction between 0 and 1"
            findings.wrong(allowed, part, f"train.limit_batches.{name}")


def _devices(findings: Findings, gpus: list[int | str]) -> None:
    """Report what a list of GPUs says that no machine could have."""
    ids = [entry for entry in gpus if isinstance(entry, str)]
    wrong = [entry for entry in ids if not entry.startswith(("GPU-", "MIG-"))]
    if wrong:
        number = f" Did you mean {wrong[0]}, without quotes?" if wrong[0].isdecimal() else ""
        findings.wrong(
            "indexes, or ids that begin with GPU- or MIG- (`nvidia-smi -L`)", wrong[0], "engine.gpus", near=number
        )
    elif len(set(gpus)) < len(gpus):
        findings.wrong("different device ids", gpus, "engine.gpus")
    elif ids and len(ids) < len(gpus):
        findings.wrong("either indexes or ids, not both", gpus, "engine.gpus")


_NONE = Target(type="none.none")
