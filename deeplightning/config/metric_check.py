"""Check monitored metrics: whether they are logged, and whether lower or higher is better."""

import re
from collections.abc import Iterator
from typing import Any

from deeplightning.config.report import Report
from deeplightning.config.schema import Config, Mode, Target, with_keys
from deeplightning.config.signature_check import Meanings
from deeplightning.faults import Notice, nearest, upwards
from deeplightning.words import stage_of

_MIN = "loss error err mae mse rmse mape msle nll perplexity ppl wer cer fid lpips"
_MAX = (
    "acc accuracy top1 top3 top5 f1 fbeta precision recall sensitivity specificity auc auroc auprc ap map iou miou "
    "jaccard dice kappa mcc r2 psnr ssim bleu rouge"
)
_MODE_BY_WORD: dict[str, Mode] = dict.fromkeys(_MIN.split(), "min") | dict.fromkeys(_MAX.split(), "max")  # type: ignore[assignment]
"""Words in the names of metrics, and their mode."""

_LOADER_SUFFIX = re.compile(r"/dataloader_idx_\d+$")
"""The suffix that Lightning adds to the name of a metric if there are several validation loaders."""


def _monitored_metrics(config: Config) -> Iterator[tuple[str, object, Any, str]]:
    """Yield each monitored metric: the key that names it, the metric, the section or target with that key, and the key
    of its mode."""
    train = config.train
    sections = {"train.checkpoint": train.checkpoint, "train.early_stop": train.early_stop, **config.plugin_sections()}
    for key, section in sections.items():
        name = "monitor" if section is train.checkpoint else "metric"
        yield f"{key}.{name}", getattr(section, name, None), section, f"{key}.mode"
    for key, scheduler in with_keys(config.model.scheduler, "model.scheduler"):
        yield f"{key}.call.monitor", scheduler.call and scheduler.call.monitor, scheduler, f"{key}.params.mode"
    for callback in train.callbacks:
        key = f"{callback.name}.params"
        yield f"{key}.monitor", callback.params.get("monitor"), callback, f"{key}.mode"


def check_monitors(report: Report, config: Config) -> None:
    """Compare monitored metrics with those that the task and the callbacks log."""
    asked = {key: metric for key, metric, *_ in _monitored_metrics(config) if isinstance(metric, str)}
    owners = {key: owner for key, _, owner, _ in _monitored_metrics(config)}
    targets = (config.model.module, *config.train.callbacks)
    if not asked or any(target is None or target.type is None for target in targets):  # reported already
        return
    if any(str(key).startswith("model.module") for key in report.faulty_keys):
        return
    names, vague = _logged_metrics(report, config)
    for key, metric in asked.items():
        rate = re.fullmatch(r"lr-(.+)", metric)  # of tasks with several optimizers
        several = config.model.optimizer if isinstance(config.model.optimizer, dict) else {}
        is_counter = metric in ("epoch", "step") and key.startswith("train.callbacks.")
        kind = report.meanings.known(owners[key].type) if is_counter else None
        knows_it = kind is not None and any(path.endswith(".ModelCheckpoint") for path in kind.bases()[0])
        if metric in names or knows_it or (rate and (rate[1].isdigit() or rate[1] in several)):
            continue
        if _LOADER_SUFFIX.sub("", metric) in names:
            report.add_unchecked(key, f"whether `{metric}` is logged: the number of loaders is unknown", "--dry-run")
        elif vague is None:
            known = ", ".join(sorted(names))
            message = f"no metric `{metric}` is logged.{nearest(metric, names)} There are: {known}"
            report.fault(message, key, found=metric, allowed=known)
        else:
            report.add_unchecked(key, f"whether `{metric}` is logged: {vague} computes names", "--dry-run")


def set_modes(report: Report, config: Config) -> None:
    """Set the mode of each monitored metric if the config does not. For a target, only if it is a class of torch or
    Lightning, whose default is always `min`: a user's own class keeps the default of its author."""
    for asked, metric, owner, key in _monitored_metrics(config):
        if not isinstance(owner, Target):
            if getattr(owner, "mode", "") is None:
                owner.mode = _choose_mode(report, config, metric, asked, key)
            continue
        found = Meanings().known(owner.type)
        home = found.path.partition(".")[0] if found is not None else ""
        is_library_class = home in ("torch", "pytorch_lightning") and "mode" in report.meanings.parameters(owner.type)
        if is_library_class and owner.params.get("mode") is None:
            mode = _choose_mode(report, config, metric, asked, key)
            if mode is not None:
                owner.params["mode"] = mode


def _choose_mode(report: Report, config: Config, metric: object, asked: str, key: str) -> Mode | None:
    """Choose the mode, at `key`, of the metric that the key `asked` names, and add a notice with the reason; or report
    it as missing."""
    if not isinstance(metric, str) or not report.faulty_keys.isdisjoint([*upwards(asked), *upwards(key)]):
        return None
    losses, mode, why = config.model.loss, mode_by_name(metric), f"by the name {metric}"
    if isinstance(losses, dict) and own_name(metric) in losses:
        mode, why = "min", f"`{own_name(metric)}` is a loss of model.loss"
    if mode is None:
        message = f"missing: its name does not show whether a lower or a higher {metric} is better"
        report.fault(f"{message}; set `mode: max` or `mode: min`", key, allowed="min, max")
    else:
        config.notices = [*(config.notices or []), Notice(f"{key}: null → {mode} ({why})", False, key)]
    return mode


def _logged_metrics(report: Report, config: Config) -> tuple[set[str], str | None]:
    """Return the metrics that task and callbacks log according to their source, and a class that may log others."""
    found, vague, sources, defaults = {"lr"}, None, Meanings(), set[str]()
    for target in (config.model.module, *config.train.callbacks):
        definition = sources.known(target.type)
        if definition is None:
            return found, str(target.type)
        names, all_of_them = definition.logged_names()
        found, vague = found | names, vague if all_of_them else target.type
        defaults |= definition.declared_words("metric_names") or set()
    metrics = defaults if config.model.metrics is None else set(config.model.metrics)
    losses = list(config.model.loss) if isinstance(config.model.loss, dict) and len(config.model.loss) > 1 else []
    for placeholder, words in (("{stage}", ["train", "val"]), ("{metric}", metrics), ("{loss}", losses)):
        split = [name.replace(placeholder, word) for name in found if placeholder in name for word in words]
        found = {name for name in found if placeholder not in name} | set(split)
    return {name for name in found if stage_of(name)[0] != "test"}, vague


def own_name(metric: str) -> str:
    """Return the name of a metric without its stage and `_epoch`."""
    return stage_of(metric)[1].removesuffix("_epoch")


def mode_by_name(metric: str) -> Mode | None:
    """Guess the mode of a metric from the words in its name; None if unknown."""
    words = re.findall(r"[a-z]+\d*", own_name(metric).lower())
    found = {_MODE_BY_WORD[word] for word in words if word in _MODE_BY_WORD}
    if words and words[-1] == "loss":
        found = {"min"}
    return found.pop() if len(found) == 1 else None
