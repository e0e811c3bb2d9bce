"""Requests of a batch that does not fit into memory run one by one; the largest batch respects memory and time."""

import time
import warnings
from dataclasses import replace

import numpy as np
import onnx.helper as helper
import onnxruntime
import pytest
from served import colour_run
from test_batching import Model, Submitted, occupied, ready

from serve.batching import Batcher
from serve.bundle import GPU_TOLERANCE, TOLERANCES, Bundle, BundleError
from serve.device import CPU, Device, DeviceError
from serve.limits import Limits
from serve.private import is_out_of_memory
from serve.session import open_session
from serve.worker_count import Layout, gpu_layout, largest_batch

ARENA_FULL = (
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Conv node. Status Message: "
    "onnxruntime/core/framework/bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) "
    "Available memory of 1048576 is smaller than requested bytes of 2097152"
)
"""The message of ONNX Runtime if `gpu_mem_limit` is reached."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return Bundle.open(colour_run(tmp_path_factory.mktemp("a run")).bundle)


def images(number, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (number, 3, 8, 8), dtype=np.uint8)


# ---- out of memory


def test_out_of_memory_errors_of_onnxruntime_are_recognised(tmp_path):
    """ONNX Runtime has no class for them, so `serve.private` compares messages. No machine has these 128 TB."""
    shape = helper.make_tensor_value_info("shape", 7, ["n"])
    filled = helper.make_tensor_value_info("filled", 1, None)
    graph = helper.make_graph([helper.make_node("ConstantOfShape", ["shape"], ["filled"])], "g", [shape], [filled])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (tmp_path / "large.onnx").write_bytes(model.SerializeToString())
    session = open_session(tmp_path / "large.onnx")
    with pytest.raises(Exception, match=r".") as caught:
        session.run(None, {"shape": np.array([2**45], np.int64)})
    assert is_out_of_memory(caught.value), caught.value
    with pytest.raises(Exception, match=r".") as caught:
        session.run(None, {"shape": np.zeros((1, 1), np.int64)})
    assert not is_out_of_memory(caught.value)
    assert is_out_of_memory(RuntimeError(ARENA_FULL))
    assert is_out_of_memory(RuntimeError("CUDA failure 2: out of memory ; GPU=0"))
    assert is_out_of_memory(RuntimeError("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0"))


def small(bundle, most):
    """Return a model with memory for `most` pictures at a time, and the list of the batch sizes that it received."""
    model, sizes = Model(), []
    model.samples = bundle.samples
    model.prepare = lambda data, *_: images(1, int(data))[0]

    def predict(batch):
        model.begun.set()
        assert model.may_end.wait(10)
        sizes.append(len(batch))
        if len(batch) > most:
            raise MemoryError(ARENA_FULL)
        return bundle.predict(batch)

    model.predict = predict
    return model, sizes


def test_a_batch_that_does_not_fit_is_run_one_by_one(bundle):
    """The requests of the batch are run one by one, and none fails."""
    model, sizes = small(bundle, 3)
    batcher = Batcher(model, Limits(max_batch=16))
    first = occupied(model, batcher)
    others = [Submitted(batcher, str(number).encode()) for number in range(2, 8)]
    ready(batcher, 6)
    model.may_end.set()
    for number, submitted in enumerate([first, *others], 1):
        np.testing.assert_array_equal(submitted.rows(), bundle.predict(images(1, number)))
    assert sizes == [1, 6, *[1] * 6]


def test_onnxruntime_without_memory_is_a_memory_error(bundle):
    """On a GPU, the message of ONNX Runtime becomes MemoryError; other errors stay as they are."""

    class Full:
        def run(self, *_):
            raise RuntimeError(self.message)

    full = replace(bundle, session=Full(), device=Device(0, "H100"))
    for Full.message, expected in ((ARENA_FULL, MemoryError), ("no such node", RuntimeError)):
        with pytest.raises(expected):
            full.predict(images(1))


def test_a_single_request_that_does_not_fit_gets_503(bundle, capfd):
    """The answer is 503 with Retry-After, not 500, because another program may release memory."""
    model, _ = small(bundle, 0)
    error = Submitted(Batcher(model, Limits()), b"1").error()
    assert (error.status, error.headers) == (503, {"Retry-After": "1"})
    assert "out of memory for a single request" in capfd.readouterr().err


# ---- the largest batch


def test_the_largest_batch_is_what_memory_allows(bundle):
    """Sizes are doubled, each is run twice, and a limit that is not a power of two is tried too."""
    model, sizes = small(bundle, 100)
    assert largest_batch(model, 24, seconds=60) == 24
    assert sizes == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 24, 24]
    model, _ = small(bundle, 5)
    assert largest_batch(model, 16, seconds=60) == 4
    assert largest_batch(model, 1, seconds=60) == 1
    model, _ = small(bundle, 0)
    with pytest.raises(MemoryError):
        largest_batch(model, 16)


def test_the_largest_batch_takes_no_longer_than_allowed(bundle, monkeypatch):
    """New requests wait for a forward pass to end, so its time is limited; the size is at least 1."""
    clock = 0.0

    class Slow:
        samples = bundle.samples

        def predict(self, batch):
            nonlocal clock
            clock += 0.05 * len(batch)

    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    assert largest_batch(Slow(), 64, seconds=0.25) == 4
    assert largest_batch(Slow(), 64, seconds=0.01) == 1


def test_each_gpu_has_a_process(bundle):
    """Each GPU gets a process with two lanes, one of which computes while the next batch is assembled."""
    layout = gpu_layout((Device(0, "H100"), Device(1, "H100")))
    assert (layout.processes, layout.lanes) == (2, 2)
    assert [str(layout.device(process)) for process in (0, 1)] == ["cuda:0", "cuda:1"]
    assert str(layout) == "2 processes with 2 lanes, on cuda:0 (H100), cuda:1 (H100)"
    assert Layout(3, 1, 0.5).device(2) == CPU


def test_as_many_threads_decode_as_there_are_cores(bundle):
    """A GPU's two lanes would leave the other cores idle."""
    model = Model()
    batcher = Batcher(model, Limits(max_batch=1), lanes=1, threads=6)
    first = occupied(model, batcher)
    others = [Submitted(batcher, b"2") for _ in range(9)]
    ready(batcher, 9)
    assert len(batcher._threads) == 6
    model.may_end.set()
    assert all(submitted.rows() for submitted in [first, *others])


# ---- tolerance of a GPU


class OnGpu:
    """A session whose answers deviate a little, like those of another processor."""

    def __init__(self, session, off):
        self.session, self.off = session, off

    def __getattr__(self, name):
        return getattr(self.session, name)

    def run(self, outputs, inputs):
        return [answers + np.float32(self.off) for answers in self.session.run(outputs, inputs)]


@pytest.fixture
def opened_off(bundle, monkeypatch):
    """Return a function that opens the bundle as if on a GPU whose answers deviate by `off`."""
    gpu = Device(0, "H100", 8_000_000_000)

    def opened(off):
        monkeypatch.setattr("serve.bundle.open_session", lambda file, *_: OnGpu(open_session(file), off))
        return Bundle.open(bundle.folder, device=gpu)

    return opened


def test_golden_samples_are_compared_on_the_device_that_answers(opened_off, capfd):
    """A GPU adds in another order, so a deviation of 0.001 is allowed there, 0.0001 on the CPU."""
    assert (TOLERANCES["fp32"], GPU_TOLERANCE) == (1e-4, 1e-3)
    opened = opened_off(5e-4)
    assert str(opened.device) == "cuda:0"
    with pytest.raises(BundleError, match=r"differ by 0\.002; the limit is 0\.001"):
        opened_off(2e-3)
    with pytest.raises(BundleError, match="differ by nan"):
        opened_off(np.nan)
    assert capfd.readouterr().out == ""


def test_a_gpu_without_memory_for_the_model_says_how_much_was_free(opened_off, monkeypatch):
    """Golden samples run one by one if they do not match; if even one does not fit, the exit code is 3."""
    sizes = []

    def run(self, outputs, inputs):
        sizes.append(len(inputs["images"]))
        if sizes[-1] > 1 or self.off:
            raise RuntimeError("Failed to allocate memory")
        return self.session.run(outputs, inputs)

    monkeypatch.setattr(OnGpu, "run", run)
    opened_off(0)
    assert sizes == [4, 1, 1, 1, 1]
    with pytest.raises(DeviceError, match=r"cuda:0 \(H100\) has too little memory .* 8\.0 GB were free") as caught:
        opened_off(1)
    assert caught.value.exit_code == 3


def test_a_silent_fallback_to_the_cpu_is_refused(bundle):
    """ONNX Runtime falls back if CUDA's libraries do not load; the error has the reason."""
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is installed, and its provider may load")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a provider that this build does not know
        with pytest.raises(DeviceError, match=r"cuda:0 \(H100\) cannot be used by onnxruntime-gpu .*: .*; ") as caught:
            open_session(bundle.folder / "model.onnx", Device(0, "H100", 1000))
    assert caught.value.exit_code == 3
