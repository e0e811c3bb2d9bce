"""How a process computes: memory format, threads, and freed memory that is reused."""

import inspect
import os
import resource
import warnings

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.accelerators import cuda
from pytorch_lightning.accelerators import CUDAAccelerator
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.setup import _log_device_info
from torch._inductor import compile_fx
from torch._prims_common import suggest_memory_format

from deeplightning.callbacks.log_lines import to_terminal
from deeplightning.config.examine import load_config
from deeplightning.engine import process_group
from deeplightning.engine.compute import keep_memory, use_channels_last
from deeplightning.engine.trainer_arguments import trainer_arguments


@pytest.fixture(autouse=True)
def own_threads(monkeypatch):
    """Restore the number of threads of this process after a test."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    yield
    torch.set_num_threads(before)


def test_channels_last_lays_out_weights_and_learns_the_same(fit):
    """The weights of convolutions are channels-last, and the losses are equal but for rounding."""
    plain, last = fit(), fit("engine.channels_last=true")

    def are_last(fitted):
        weights = [p for p in fitted.task.network.parameters() if p.ndim == 4]
        return [p.is_contiguous(memory_format=torch.channels_last) for p in weights]

    assert (all(are_last(last)), all(are_last(plain))) == (True, False)
    assert dict(plain.series("train_loss")) == pytest.approx(dict(last.series("train_loss")), abs=1e-4)


def test_channels_last_has_one_order_in_all_tensors_of_a_convolution():
    """All tensors of a convolution are channels-last, even with one channel, whose strides cuDNN gives to the gradient;
    gradients are the same bits."""
    task = torch.nn.Module()
    convs = [torch.nn.Conv2d(*sizes) for sizes in ((1, 4, 3), (4, 4, 1), (4, 2, 3))]
    task.configure_model = lambda: setattr(task, "network", torch.nn.Sequential(*convs))
    use_channels_last(task)
    task.configure_model()
    task.configure_model()  # as for the next stage
    seen = []
    for conv in convs:
        conv.register_forward_hook(lambda module, inputs, output: seen.extend([inputs[0], output, module.weight]))
    pictures = torch.randn(3, 1, 9, 9, requires_grad=True)
    task.network(pictures).square().sum().backward()
    assert [suggest_memory_format(tensor) for tensor in seen] == [torch.channels_last] * 9
    assert all(conv.weight.grad.stride() == conv.weight.stride() for conv in convs)
    assert len(convs[0]._forward_pre_hooks) == 1
    expected, pictures.grad = pictures.grad, None
    convs[0]._forward_pre_hooks.clear()
    task.network(pictures).square().sum().backward()
    assert torch.equal(pictures.grad, expected)


def test_ddp_wraps_the_network_on_the_stream_that_computes(tiny, place, monkeypatch):
    """Our DDP does not wrap the network on a side stream as Lightning does, about which torch warns on GPUs."""
    assert "torch.cuda.stream(torch.cuda.Stream())" in inspect.getsource(DDPStrategy._setup_model)  # 2.6.6
    made = {}
    monkeypatch.setattr(
        process_group, "DistributedDataParallel", lambda module, **given: made.update(given, module=module)
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda: pytest.fail("a side stream"))
    monkeypatch.chdir(place)
    overrides = ["engine.backend=ddp", "engine.processes=2", "engine.params.bucket_cap_mb=5"]
    strategy = trainer_arguments(load_config(tiny, overrides))["strategy"]
    assert isinstance(strategy, process_group.Ddp)
    monkeypatch.setattr(strategy, "determine_ddp_device_ids", lambda: [0])
    network = torch.nn.Linear(1, 1)
    strategy._setup_model(network)
    assert made == {"module": network, "device_ids": [0], "bucket_cap_mb": 5}


def test_lightnings_advice_on_gpus_is_not_shown(tiny, place, monkeypatch, caplog):
    """Advice on TF32 and on an unused GPU is hidden; other warnings are shown."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(cuda, "_is_ampere_or_later", lambda device: True)
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    cfg = load_config(tiny)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        to_terminal(cfg)
        _log_device_info(pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False))
        cuda._check_cuda_matmul_precision.cache_clear()
        cuda._check_cuda_matmul_precision(torch.device("cuda"))
        words = "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled."
        warnings.warn(words, stacklevel=2)  # as torch's compiler does in some versions
        warnings.warn("GPU on fire", stacklevel=2)
    cuda._check_cuda_matmul_precision.cache_clear()
    shown = [str(warning.message) for warning in seen if "srun" not in str(warning.message)]  # if Slurm is installed
    assert shown == ["GPU on fire"]
    assert caplog.messages == []
    assert "GPU available but not used." in inspect.getsource(_log_device_info)
    assert "has Tensor Cores" in inspect.getsource(cuda._check_cuda_matmul_precision)
    assert words in inspect.getsource(compile_fx)


def test_a_number_of_threads_is_taken(fit):
    """`engine.threads` overrides the environment for torch and for child processes."""
    fit("engine.threads=2", "train.max_steps=1")
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (2, "2")


def test_kept_memory_is_not_fetched_again():
    """With glibc, memory that is freed and allocated again causes no page faults."""

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            several = [torch.ones(2**18) for _ in range(8)]  # 8 MiB
            del several
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    if os.confstr("CS_GNU_LIBC_VERSION") is None:
        pytest.skip("malloc is not glibc's")
    keep_memory()
    faults()
    assert faults() < 100  # of 40,960 pages
