"""Engine settings: aliases are mapped with a notice, and params of each strategy are passed on."""

import copy
import inspect
import logging
import re

import pytest
import torch
from conftest import digest
from torch import nn

from deeplightning.callbacks.describe import effective_batch
from deeplightning.callbacks.start import Recompute
from deeplightning.config import devices
from deeplightning.config.examine import examine, load_config
from deeplightning.config.explain import explain
from deeplightning.config.schema import BACKENDS, PRECISIONS
from deeplightning.engine.trainer_arguments import trainer_arguments
from deeplightning.faults import ConfigError
from deeplightning.runfolder import RunFolder

BF16 = (
    "{timeout: 60, precision_plugin: {type: pytorch_lightning.plugins.precision.MixedPrecision, "
    "params: {precision: bf16-mixed, device: cpu}}}"
)
PROFILED = "{config: {wall_clock_breakdown: true, flops_profiler: {enabled: true, profile_step: 2}}}"


@pytest.fixture
def resolved(tiny, place, monkeypatch):
    """`resolved(override, …)` is the resolved config."""
    monkeypatch.chdir(place)
    return lambda *overrides: load_config(tiny, list(overrides))


@pytest.mark.parametrize(
    ("override", "notice"),
    [
        ("engine.backend=fsdp", "engine.backend: fsdp → null (there is one process and no GPU)"),
        ("engine.precision=16", "engine.precision: 16 → bf16-mixed (half precision on CPU is bf16)"),
        ("engine.gpus=0", "engine.gpus: 0 → null"),
    ],
)
def test_settings_that_a_cpu_process_cannot_use_are_mapped_with_a_notice(override, notice, resolved):
    """One CPU process runs with the nearest setting; a notice has the replacement and the reason."""
    cfg = resolved(override)
    assert cfg.notices[0].text.startswith(notice)
    assert cfg.engine.backend is None


def test_several_processes_are_ddp(resolved):
    """With `processes: 2` the default backend is ddp; an explicit ddp gives no notice."""
    assert resolved("engine.processes=2").engine.backend == "ddp"
    cfg = resolved("engine.processes=2", "engine.backend=ddp")
    assert (cfg.engine.backend, cfg.notices) == ("ddp", [])
    arguments = trainer_arguments(cfg)
    assert (arguments["devices"], arguments["strategy"]._process_group_backend) == (2, "gloo")


@pytest.mark.parametrize(("old", "today"), BACKENDS.items())
def test_each_older_backend_is_todays_with_one_notice(old, today, resolved):
    """Two processes run under the successor, and cfg.yaml has its name."""
    cfg = resolved("engine.processes=2", f"engine.backend={old}")
    assert [notice.text for notice in cfg.notices] == [f"engine.backend: {old} → {today} ({old} is its older name)"]
    assert cfg.public()["engine"]["backend"] == today


@pytest.mark.parametrize("old", PRECISIONS)
def test_each_older_precision_is_half_precision(old, resolved, monkeypatch):
    """Each older name is half precision under DeepSpeed; on the CPU a second notice maps it to bf16."""
    monkeypatch.setattr(devices, "cpu_computes_bf16", lambda: True)
    cfg = resolved("engine.processes=2", "engine.backend=deepspeed_stage_2", f"engine.precision={old}")
    first, second = (notice.text for notice in cfg.notices)
    assert first.startswith(f"engine.precision: {old} → 16-mixed ({old} is its older name")
    assert ("16-true is nearer to O2" in first) == (old == "apex_O2")
    assert second == "engine.precision: 16-mixed → bf16-mixed (half precision on CPU is bf16)"


@pytest.mark.parametrize("precision", ["16", "bf16", "bf16-true", "32"])
@pytest.mark.parametrize("flags", ["fpu sse avx2 avx512f", "fpu sse avx2 avx512f avx512_bf16 movdiri"])
def test_bf16_on_a_cpu_without_it_is_reported(precision, flags, resolved, monkeypatch, tmp_path):
    """A notice warns that bf16 is slow on a CPU without instructions for it; other CPUs give no such notice."""
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(devices, "CPU_INFO", info)
    notices = resolved(f"engine.precision={precision}").notices
    warned = any("no instructions for bf16" in notice.text for notice in notices)
    assert warned == ("avx512_bf16" not in flags and precision != "32")


@pytest.mark.parametrize(
    ("backend", "strategy", "param", "owner"),
    [
        (
            *("ddp", "pytorch_lightning.strategies.DDPStrategy"),
            *("find_unused_parameters: true", "torch.nn.parallel.DistributedDataParallel"),
        ),
        ("fsdp", "deeplightning.engine.fsdp.Fsdp", "cpu_offload: true", "deeplightning.engine.fsdp.Fsdp"),
        (
            *("deepspeed_stage_1", "engine.zero.DeepSpeed"),
            *("reduce_bucket_size: 100", "deeplightning.engine.zero.DeepSpeed"),
        ),
        ("fairscale_sddp", "engine.zero.DeepSpeed", None, None),
        ("deepspeed_stage_3_offload", "engine.zero.DeepSpeed", None, None),
    ],
)
def test_explain_shows_the_strategy_of_a_backend(backend, strategy, param, owner, tiny):
    """`explain` shows the class of a backend, and for a param the class that takes it and the default."""
    report = examine(tiny, [f"engine={{backend: {backend}, processes: 2, params: {{{param or ''}}}}}"])
    about = explain(report, "engine.backend")
    assert re.search(rf"^  strategy    .*{strategy}", about, re.MULTILINE)
    if param:
        about = explain(report, f"engine.params.{param.partition(':')[0]}")
        assert f"  taken by    {owner}" in about
        assert "  default     " in about


def test_the_effective_batch_multiplies(resolved):
    """The effective batch is samples per process x processes x accumulated batches."""
    cfg = resolved("engine.processes=2", "train.accumulator_factor=4")
    assert effective_batch(cfg) == "128 samples a step: 16 per process x 2 processes x 4 batches accumulated"
    cfg = resolved("train.accumulator_factor=4", "train.accumulator_epoch=2")
    assert effective_batch(cfg).endswith("from epoch 2 on")
    assert effective_batch(resolved("engine.processes=2"), 100) == "200 samples a step: 100 per process x 2 processes"


@pytest.mark.parametrize("precision", ["bf16", "64", "bf16-true"])
def test_a_precision_trains(precision, fit):
    """The training loss falls."""
    fitted = fit(f"engine.precision={precision}", "train.num_epochs=3")
    losses = [value for _, value in fitted.series("train_loss_epoch")]
    assert losses[-1] < losses[0]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("backend", "params"),
    [
        ("ddp", "{find_unused_parameters: true, process_group_backend: gloo}"),
        ("fsdp", "{cpu_offload: true, wrap: [Linear], timeout: 60, process_group_backend: gloo}"),
        pytest.param(
            *("ddp", "{static_graph: true, gradient_as_bucket_view: true, bucket_cap_mb: 1, broadcast_buffers: false}"),
            marks=SLOW,
        ),
        pytest.param("ddp", BF16, marks=SLOW),
        pytest.param("fsdp", "{reshard_after_forward: false, wrap: 100}", marks=SLOW),
        pytest.param("fsdp", "{output_dtype: float32, reduce_dtype: float32, wrap: [features.0]}", marks=SLOW),
        pytest.param("deepspeed_stage_3", "{zero_optimization: false}", marks=SLOW),
        pytest.param("deepspeed_stage_1_offload", "{reduce_bucket_size: 5000}", marks=SLOW),
        pytest.param("deepspeed_stage_2_offload", "{config: {communication_data_type: fp32}}", marks=SLOW),
        pytest.param("deepspeed_stage_3_offload", "{contiguous_gradients: false, timeout: 60}", marks=SLOW),
        pytest.param("deepspeed_stage_2", PROFILED, marks=SLOW),
    ],
)
def test_params_of_a_strategy_change_how_it_works_and_not_what_it_learns(backend, params, job, plain_loss):
    """A run over two processes with params ends with the loss of a run without any."""
    done = job("train.num_epochs=1", f"engine={{backend: {backend}, processes: 2, params: {params}}}")
    assert loss_of(done) == pytest.approx(plain_loss, abs=1e-3)


@pytest.fixture(scope="module")
def plain_loss(job):
    return loss_of(job("train.num_epochs=1", "engine.backend=ddp"))


def loss_of(outcome):
    """Return the last printed training loss."""
    return float(re.findall(r"train_loss (\S+)", outcome.out + outcome.err)[-1])


class Squares(nn.Module):
    """Counts its forward passes."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return x * x


def test_chosen_modules_compute_twice():
    """Modules chosen by name or by class are recomputed in the backward pass; the gradient is the same."""
    task = nn.Module()
    task.network = nn.Sequential(nn.Linear(3, 3), Squares(), nn.Sequential(Squares(), nn.Dropout(0)))
    inputs = torch.ones(2, 3)
    gradients = []
    for chosen, passes in (([], [1, 1]), (["1"], [3, 2]), (["Squares", "2.0"], [5, 4])):
        Recompute(chosen).on_fit_start(None, task)
        task.zero_grad()
        task.network(inputs).sum().backward()
        assert [m.passes for m in task.modules() if isinstance(m, Squares)] == passes
        gradients.append(task.network[0].weight.grad)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_activation_checkpointing_and_deterministic_algorithms_change_no_weight(fit):
    """Neither setting changes a weight, even with dropout; an unknown module is refused with the nearest name."""
    settings = ["model.network={type: own.Dropout}", "train.num_epochs=1"]
    expected = digest(fit(*settings).folder / "last.ckpt")
    for more in ("activation_checkpointing=[Dropout, layers.1]", "deterministic=true"):
        assert digest(fit(*settings, f"engine.{more}").folder / "last.ckpt") == expected
    torch.use_deterministic_algorithms(False)
    with pytest.raises(ConfigError, match=r"no module has the name or class Dropuot\. Did you mean Dropout\?"):
        fit(*settings, "engine.activation_checkpointing=[Dropuot]")


def test_flops_of_a_step_are_counted(fit):
    """A multiply-add counts as two operations: forward, and backward for weights and inputs."""
    fitted = fit("model.network={type: own.network, params: {width: 32}}", "engine.profiler=flops")
    report = RunFolder(fitted.folder).flops.read_text()
    samples, first, last = 16, 64 * 32, 32 * 10
    expected = 2 * samples * (2 * first + 3 * last)  # the pictures need no gradient
    assert report.endswith(f"\n{expected:>20,}  operations in all\n")
    rows = [row.split()[:2] for row in report.splitlines()[:-1]]
    assert rows == [
        [f"{expected:,}", "network"],
        [f"{2 * samples * 2 * first:,}", "network.1"],
        [f"{2 * samples * 3 * last:,}", "network.3"],
    ]


def test_private_names_of_deepspeed_exist():
    """The private names of DeepSpeed that the engines use exist: renamed ones would be ignored without an error."""
    source = inspect.getsource(pytest.importorskip("deepspeed.runtime.zero.partition_parameters"))
    for name in ("ds_id", "ds_active_sub_modules", "partition"):
        assert f"param.{name} = " in source, name
    scales = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    scaler = scales.DynamicLossScaler(2.0, 1000, 1.0, 1, False)
    assert {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"} <= vars(scaler).keys()
    for module in ("stage_1_and_2", "stage3"):
        assert "self.loss_scaler = " in inspect.getsource(pytest.importorskip(f"deepspeed.runtime.zero.{module}"))


def test_offloaded_shards_are_summed_on_the_cpu(resolved):
    """NCCL cannot add the norms of offloaded gradients, so the group has gloo for tensors on the CPU."""
    cfg = resolved("engine.backend=fsdp", "engine.processes=2", "engine.params={cpu_offload: true}")
    assert trainer_arguments(cfg)["strategy"].process_group_backend is None
    cfg.engine.gpus = [0, 1]
    for given in ({}, {"process_group_backend": None}):
        cfg.engine.params = {"cpu_offload": True, **given}
        assert trainer_arguments(cfg)["strategy"].process_group_backend == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("chosen", ["BatchNorm1d", "1"])
def test_batch_norm_that_is_recomputed_counts_a_batch_once(chosen):
    """The second pass does not change the running means."""
    task, inputs = nn.Module(), torch.randn(8, 3)
    task.network = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3)))
    plain = copy.deepcopy(task)
    Recompute([chosen]).on_fit_start(None, task)
    for each in (task, plain):
        each.network(inputs).square().sum().backward()
    assert plain.network[1][0].num_batches_tracked == 1
    assert task.network[1][0].num_batches_tracked == 1
    for mine, expected in zip(task.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, expected)
    for mine, expected in zip(task.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, expected.grad)


class Rotating(nn.Module):
    """Uses a buffer that another module has too, and assigns one."""

    def __init__(self, shared):
        super().__init__()
        self.register_buffer("cache", shared)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("wide", torch.ones(1).expand(3))
        self.layer = nn.Linear(3, 3)

    def forward(self, inputs, forward=True):
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0).detach()
        return self.layer(inputs * self.cache) * self.wide if forward else inputs


def test_buffers_that_are_shared_or_assigned_are_recomputed_once():
    """A shared buffer counts as unchanged for autograd; one that is assigned in `forward` gets its value once."""
    shared, inputs, task = torch.rand(3), torch.randn(8, 3), nn.Module()
    task.network = nn.Sequential(Rotating(shared), Rotating(shared))
    plain = copy.deepcopy(task)
    Recompute(["1"]).on_fit_start(None, task)
    for each in (task, plain):
        each.network[1](each.network[0](inputs), forward=True).square().sum().backward()
    for mine, expected in zip(task.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, expected)
    assert torch.equal(task.network[0].layer.weight.grad, plain.network[0].layer.weight.grad)


def test_reports_and_traces_of_lightnings_profilers_are_kept(fit):
    """The report of a profiler passes the level of Lightning's other messages; its traces go to the run folder."""
    fitted = fit("engine.profiler=simple", "train.num_epochs=1")
    assert logging.getLogger("pytorch_lightning.profilers.profiler").isEnabledFor(logging.INFO)
    assert str(fitted.trainer.profiler.dirpath) == str(fitted.folder)
