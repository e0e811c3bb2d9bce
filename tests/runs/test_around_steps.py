"""Warm-up of the learning rate, adaptive gradient clipping (AGC), and logged gradient norms."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from deeplightning.callbacks.gradients import AdaptiveClip

ONE = "train.num_epochs=1"
BY_EPOCH = "{type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 0.5}, warmup: 0.6}"


def test_the_rate_grows_to_what_the_schedule_gives(fit):
    """Warm-up scales the rate of a per-epoch schedule linearly over the given share of the training: 11 of 18 steps."""
    done = fit(f"model.scheduler={BY_EPOCH}")
    expected = [0.05 * 0.5 ** (step // 9) * min(1, (step + 1) / 11) for step in range(18)]
    assert done.series("lr") == [(step, pytest.approx(rate, rel=1e-6)) for step, rate in enumerate(expected)]
    assert done.trainer.optimizers[0].param_groups[0]["lr"] == 0.05 * 0.5**2


@pytest.mark.slow
def test_a_warm_up_trains_as_a_linear_schedule_of_torchs_does(fit):
    """Warm-up gives the weights of torch's LinearLR, with accumulation too: the logged rate is the one in use."""
    constant = "model.scheduler={type: torch.optim.lr_scheduler.ConstantLR, params: {factor: 1}, warmup: 1.0}"
    for steps, accumulated in ((9, "train.accumulator_factor=1"), (5, "train.accumulator_factor=2")):
        linear = f"{{start_factor: {1 / steps}, total_iters: {steps - 1}}}"
        schedule = f"{{type: torch.optim.lr_scheduler.LinearLR, params: {linear}, call: {{interval: step}}}}"
        settings = ([constant], [f"model.scheduler={schedule}"], [])
        fitted = [fit(ONE, accumulated, *more).task.network for more in settings]
        ours, torchs, without = (parameters_to_vector(network.parameters()) for network in fitted)
        assert torch.allclose(ours, torchs, atol=1e-6)
        assert not torch.allclose(ours, without, atol=1e-4)


def test_the_norm_of_the_gradients_is_logged_before_they_are_clipped(fit):
    """`grad_norm` at each logged step is the L2 norm of the gradients before clipping."""
    free = fit("logger.gradient_norm=true", ONE)
    assert free.series("grad_norm") == [
        (step, pytest.approx(float(gradient.norm()), rel=1e-5)) for step, gradient in enumerate(free.seen.gradients)
    ]
    for clip in ("{value: 0.01}", "{value: 0.001, algorithm: agc}"):
        clipped = fit("logger.gradient_norm=true", f"train.gradient_clip={clip}", ONE)
        assert clipped.series("grad_norm")[0] == free.series("grad_norm")[0]
        assert clipped.seen.gradients[0].norm() < free.seen.gradients[0].norm()


def test_gradients_are_clipped_by_the_norm_of_each_units_weights(fit):
    """AGC of a run's first step matches a computation unit by unit from its gradients and weights."""
    first = fit("model.optimizer.params.lr=0.0", ONE)
    clipped = fit("train.gradient_clip={value: 0.02, algorithm: agc}", ONE)
    expected, start = [], 0
    for parameter in first.task.network.parameters():
        gradient = first.seen.gradients[0][start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
        units = [(parameter, gradient)] if parameter.ndim < 2 else zip(parameter, gradient, strict=True)
        for weight, part in units:
            most = 0.02 * max(float(weight.detach().norm()), 1e-3)
            expected.append(part.flatten() * min(1.0, most / max(float(part.norm()), 1e-12)))
    assert torch.allclose(clipped.seen.gradients[0], torch.cat(expected), atol=1e-7)
    assert not torch.allclose(clipped.seen.gradients[0], first.seen.gradients[0], atol=1e-4)


def test_weights_that_are_zero_may_learn():
    """AGC clips a unit of zeros as if its norm were 1e-3, and keeps a gradient of zeros."""
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    weight.grad = torch.tensor([[3.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
    AdaptiveClip(0.1).on_before_optimizer_step(None, None, torch.optim.SGD([weight], lr=1))
    assert torch.allclose(weight.grad, torch.tensor([[6e-5, 0.0, 8e-5], [0.0, 0.0, 0.0]]))


def test_a_dry_run_accepts_agc_warm_up_and_norms(command, tiny, place, tmp_path):
    """`check --dry-run` and `lr` accept `algorithm: agc`, which Lightning does not have."""
    clip = "train.gradient_clip={value: 0.02, algorithm: agc}"
    for words in (["check", tiny, "--dry-run"], ["lr", tiny, "--out", tmp_path]):
        command(*words, clip, f"model.scheduler={BY_EPOCH}", "logger.gradient_norm=true", cwd=place, code=0)


def test_each_of_several_optimizers_has_its_norm_and_its_warm_up(command, tmp_path, store, tracked):
    """In adversarial training norms and warm-up are per optimizer, by name; here only the generator's rate warms up."""
    from example_code import copy_code
    from test_gan import CONFIG

    copy_code("dcgan", tmp_path)
    (tmp_path / "gan_steps.yaml").write_text(CONFIG.replace("STORE", str(store)))
    words = ["logger.gradient_norm=true", "model.scheduler.generator.warmup=0.5", "logger.log_every_n_steps=1"]
    done = command("train", "gan_steps.yaml", *words, "logger.pictures=null", cwd=tmp_path, code=0)
    series = tracked(done.folder).series()
    assert {"grad_norm-generator", "grad_norm-discriminator"} <= series.keys()
    rates = [rate for _, rate in series["lr-generator"]]
    assert rates[:3] == [pytest.approx(0.002 * (step + 1) / 9) for step in range(3)]
    assert rates[-1] == pytest.approx(0.001)
