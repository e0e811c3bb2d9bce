"""The callbacks of a run, in order."""

from pathlib import Path

from pytorch_lightning import Callback

from deeplightning import load_config
from deeplightning.callbacks import TRIAL, run_callbacks

BASE = Path(__file__).parents[2] / "configs" / "base.yaml"


def test_the_callbacks_of_a_run_are_in_the_order_that_they_need(monkeypatch, tmp_path):
    """Weights, run and seed come before the config's callbacks, checkpoints after them, and signals last."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TRIAL, "{}")
    overrides = ["model.init_from=x.ckpt", "train.callbacks=[{type: deeplightning.callbacks.watch.Watchdog}]"]
    overrides += ["train.early_stop={metric: val_loss, patience: 2}", "logger.histograms=2"]
    overrides += ["logger.gradient_norm=true", "train.gradient_clip={value: 0.1, algorithm: agc}"]
    overrides += ["model.scheduler.warmup=0.1", "train.val_every_n_epoch=0.5", f"logger.params.tracking_uri={tmp_path}"]
    order = [type(callback).__name__ for callback in run_callbacks(load_config(BASE, overrides))]
    assert order[:6] == ["StartWeights", "Record", "Seeds", "StreamEnds", "Warmup", "LogSteps"]
    assert order.index("SampleWeights") < order.index("GradientNorm") < order.index("AdaptiveClip")
    ours = order[: order.index("Watchdog")]
    assert {"FiniteLoss", "Console", "Results", "EarlyStopping", "Histograms", "ValidateParts"} <= {*ours}
    assert order[order.index("Watchdog") :] == ["Watchdog", "Trial", "Checkpoints", "Signals"]


def test_hooks_that_do_nothing_are_not_called_in_each_step(monkeypatch, tmp_path):
    """Lightning skips a hook that is None. Built-in callbacks have only the hooks they define, a user's have all."""
    monkeypatch.chdir(tmp_path)
    overrides = ["train.callbacks=[{type: Timer}]", f"logger.params.tracking_uri={tmp_path}"]
    for callback in run_callbacks(load_config(BASE, overrides)):
        for name in ("on_train_batch_end", "on_validation_batch_start", "on_before_backward"):
            is_defined = getattr(type(callback), name) is not getattr(Callback, name)
            is_ours = type(callback).__module__.startswith("deeplightning.")
            assert callable(getattr(callback, name)) == (is_defined or not is_ours)
