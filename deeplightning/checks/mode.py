"""Whether less or more of a metric is better, where a config does not say: one answer for whoever judges by it."""

import re
from collections.abc import Mapping
from typing import Any

from deeplightning.checks.compare import Meanings
from deeplightning.config.schema import Mode, Model, Target

_MIN = "loss error err mae mse rmse mape msle nll perplexity ppl wer cer fid lpips"
_MAX = (
    "acc accuracy top1 top3 top5 f1 fbeta precision recall sensitivity specificity auc auroc auprc ap map iou miou "
    "jaccard dice kappa mcc r2 psnr ssim bleu rouge"
)
WORDS: dict[str, Mode] = dict.fromkeys(_MIN.split(), "min") | dict.fromkeys(_MAX.split(), "max")  # type: ignore[assignment]
"""Words in the names of metrics, and which way of them is better."""


def mode_of(metric: str, model: Model | None, meanings: Meanings) -> tuple[Mode | None, str]:
    """Which way of a logged metric is better, and how that is known; None: that it is not known, and why.

    Raises:
        Undecided: only importing the metric's class can tell.
    """
    name = re.sub(r"^(train|val|test)_|_epoch$", "", metric)
    named: Any = model.loss if model is not None else None
    if isinstance(named, dict) and not isinstance(named, Target) and name in named:
        return "min", f"`{name}` is a loss of model.loss"
    target = (model.metrics or {}).get(name) if model is not None else None
    if name != "loss" and isinstance(target, Target) and isinstance(target.type, str):
        higher, of = _higher_is_better(target, meanings)
        if higher is not None:
            return ("max" if higher else "min"), f"higher_is_better of {of}"
    words = re.findall(r"[a-z]+\d*", name.lower())
    found = {WORDS[word] for word in words if word in WORDS}
    if words and words[-1] == "loss":
        found = {"min"}
    if len(found) == 1:
        return found.pop(), f"by the name {metric}"
    return None, f"neither its name nor a `higher_is_better` shows whether less or more of {metric} is better"


def _higher_is_better(target: Target, meanings: Meanings) -> tuple[bool | None, str]:
    """`higher_is_better` of a metric's class, and that class; a wrapper of torchmetrics means that of its task."""
    names = [target.type]
    task = target.params.get("task") if isinstance(target.params, Mapping) else None
    if target.type.startswith("torchmetrics.") and isinstance(task, str):
        names.append(f"torchmetrics.classification.{task.capitalize()}{target.type.rpartition('.')[2]}")
    for name in names:
        try:
            found = meanings.of(name).constant("higher_is_better")
        except ValueError:  # a fault of the target, which is reported as that
            continue
        if isinstance(found, bool):
            return found, name
    return None, target.type
