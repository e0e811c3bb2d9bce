"""Batches on a GPU go through preallocated buffers, are halved when memory runs out, and respect the limits of memory
and time. On a machine without a GPU, ONNX Runtime binds the same buffers for its CPU provider."""

import json
import threading
import time
import warnings

import numpy as np
import onnx.helper as helper
import onnxruntime
import pytest
from served import colour_run
from test_batching import Asked, Model, occupied, ready

from serve.batching import Batcher
from serve.bundle import GPU_TOLERANCE, TOLERANCES, Bundle, BundleError
from serve.device import CPU, Device, DeviceError
from serve.limits import Limits
from serve.private import is_out_of_memory
from serve.session import Bound, bound_to, open_session
from serve.worker_count import Layout, largest_batch, on_gpus

ARENA_FULL = (
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Conv node. Status Message: "
    "onnxruntime/core/framework/bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) "
    "Available memory of 1048576 is smaller than requested bytes of 2097152"
)
"""What ONNX Runtime says where `gpu_mem_limit` is reached."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return Bundle.open(colour_run(tmp_path_factory.mktemp("a run")).bundle)


def images(number, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (number, 3, 8, 8), dtype=np.uint8)


# ---- buffers


def test_answers_through_buffers_are_those_without(bundle):
    """Batches of any size get the same answers as without buffers, and the next batch does not overwrite them."""
    bound = Bound(bundle.session, 16 * 192, 16 * 12)
    sizes = [1, 16, 5, 17, 40]
    given = [bound.predict(images(number, number)) for number in sizes]
    for number, answers in zip(sizes, given, strict=True):
        np.testing.assert_array_equal(answers, bundle.predict(images(number, number)))
        assert (answers.dtype, answers.flags.owndata) == (np.float32, True)


def test_buffers_are_made_once_and_handed_on(bundle):
    """Each lane has one pair of buffers for any number of batches; each batch starts at the beginning of a buffer."""
    made = []

    def allocate(size):
        made.append(np.full(size, 255, np.uint8))
        return made[-1].ctypes.data

    bound = Bound(bundle.session, 16 * 192, 16 * 12, lanes=2, allocate=allocate)
    assert [len(memory) for memory in made] == [3072, 192] * 2
    for number in (3, 16, 1):
        answers = bound.predict(images(number))
        np.testing.assert_array_equal(made[2][: number * 192], images(number).ravel())
        np.testing.assert_array_equal(made[3][: number * 12].view(np.float32), answers.ravel())
    assert len(made) == 4


def test_batching_do_not_share_a_buffer(bundle):
    """Four threads over two pairs of buffers get their own answers."""
    bound = Bound(bundle.session, 16 * 192, 16 * 12, lanes=2)
    batches = [images(1 + seed % 16, seed) for seed in range(200)]
    answers: list = [None] * len(batches)

    def work(first):
        for number in range(first, len(batches), 4):
            answers[number] = bound.predict(batches[number])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for batch, answer in zip(batches, answers, strict=True):
        np.testing.assert_array_equal(answer, bundle.predict(batch))


def test_without_a_driver_buffers_are_ordinary_memory(bundle, capfd):
    """Without a driver, buffers are pageable memory, which is slower, and an event says so."""
    try:
        from serve.cuda import Driver

        Driver.load()
    except OSError:
        bound = bound_to(Device(0, "a GPU"), bundle.session, 192, 12)
        np.testing.assert_array_equal(bound.predict(images(1)), bundle.predict(images(1)))
        event = json.loads(capfd.readouterr().err)
        assert event["event"].startswith("buffers are not page-locked")
        assert (event["device"], "libcuda" in event["reason"]) == ("cuda:0", True)
    else:
        pytest.skip("there is an NVIDIA driver")


# ---- a lack of memory


def test_onnxruntime_names_a_lack_of_memory_as_we_know_it(tmp_path):
    """ONNX Runtime has no class for out of memory, so `serve.private` compares its messages. No machine has 128 TB."""
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


class Small:
    """A session with memory for a limited number of pictures, which fails as ONNX Runtime does."""

    def __init__(self, session, most):
        self.session, self.most, self.sizes = session, most, []

    def __getattr__(self, name):
        return getattr(self.session, name)

    def io_binding(self):
        self.shapes = {}
        binding, shapes = self.session.io_binding(), self.shapes

        class Watched:
            def bind_input(self, name, device, number, kind, shape, address):
                shapes[self] = shape
                binding.bind_input(name, device, number, kind, shape, address)

            def __getattr__(self, name):
                return getattr(binding, name)

        return Watched()

    def run_with_iobinding(self, binding):
        (size, *_) = self.shapes[binding]
        self.sizes.append(size)
        if size > self.most:
            raise onnxruntime.capi.onnxruntime_pybind11_state.Fail(ARENA_FULL)
        self.session.run_with_iobinding(binding)


def small(bundle, most):
    """Return a model with buffers, and its session with memory for `most` pictures at a time."""
    session = Small(bundle.session, most)
    bound = Bound(session, 16 * 192, 16 * 12, lanes=1)
    model = Model()
    model.samples = bundle.samples
    model.prepare = lambda data, *_: images(1, int(data))[0]

    def predict(batch):
        model.begun.set()
        assert model.may_end.wait(10)
        return bound.predict(batch)

    model.predict = predict
    return model, session


def test_a_batch_that_does_not_fit_is_halved_and_no_request_fails(bundle, capfd):
    """Batches are halved until they fit; later ones are no larger; each new limit is one event."""
    model, session = small(bundle, 3)
    batcher = Batcher(model, Limits(max_batch=16))
    first = occupied(model, batcher)
    others = [Asked(batcher, str(number).encode()) for number in range(2, 18)]
    ready(batcher, 16)
    model.may_end.set()
    for number, asked in enumerate([first, *others], 1):
        np.testing.assert_array_equal(asked.rows(), bundle.predict(images(1, number)))
    assert session.sizes == [1, 16, 8, 4, *[2] * 8]
    said = [json.loads(line)["event"] for line in capfd.readouterr().err.splitlines()]
    assert said == [f"the memory is too small for the batch: from now on at most {n} go together" for n in (8, 4, 2)]
    session.sizes.clear()
    model.may_end.clear()
    model.begun.clear()
    first = occupied(model, batcher)
    others = [Asked(batcher, str(number).encode()) for number in range(2, 8)]
    ready(batcher, 6)
    model.may_end.set()
    assert all(len(asked.rows()) == 1 for asked in [first, *others])
    assert session.sizes == [1, 2, 2, 2]


def test_a_single_request_without_memory_is_told_to_come_again(bundle, capfd):
    """The answer is 503 instead of 500, since another program may release memory."""
    model, session = small(bundle, 0)
    error = Asked(Batcher(model, Limits()), b"1").error()
    assert (error.status, error.headers) == (503, {"Retry-After": "1"})
    session.most = 1
    assert "too small for a single request" in capfd.readouterr().err


# ---- the largest batch


def test_the_largest_batch_is_what_memory_allows(bundle):
    """The largest batch is found by doubling, each size run twice; a limit that is no power of two is tried too."""
    model, session = small(bundle, 100)
    assert largest_batch(model, 24, seconds=60) == 24
    assert session.sizes == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 24, 24]
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
    layout = on_gpus((Device(0, "H100"), Device(1, "H100")))
    assert (layout.processes, layout.lanes) == (2, 2)
    assert [str(layout.device(process)) for process in (0, 1)] == ["cuda:0", "cuda:1"]
    assert str(layout) == "2 processes with 2 lanes, on cuda:0 (H100), cuda:1 (H100)"
    assert Layout(3, 1, 0.5).device(2) == CPU


def test_as_many_threads_decode_as_there_are_cores(bundle):
    """A GPU's two lanes would leave the other cores idle."""
    model = Model()
    batcher = Batcher(model, Limits(max_batch=1), number=1, threads=6)
    first = occupied(model, batcher)
    others = [Asked(batcher, b"2") for _ in range(9)]
    ready(batcher, 9)
    assert len(batcher._threads) == 6
    model.may_end.set()
    assert all(asked.rows() for asked in [first, *others])


# ---- what a GPU's answers may differ by


class OnGpu:
    """Answers with a small deviation, like those of another processor."""

    def __init__(self, off):
        self.off = off

    def __call__(self, device, session, *_):
        self.session = session
        return self

    def predict(self, batch):
        return self.session.run(None, {"images": batch})[0] + np.float32(self.off)


@pytest.fixture
def opened_off(bundle, monkeypatch):
    """Return a function that opens the bundle as if on a GPU whose answers deviate by `off`."""
    gpu = Device(0, "H100", 8_000_000_000)

    def opened(off):
        monkeypatch.setattr("serve.bundle.bound_to", OnGpu(off))
        monkeypatch.setattr("serve.bundle.open_session", lambda file, *_: open_session(file))
        return Bundle.open(bundle.folder, device=gpu)

    return opened


def test_golden_samples_are_compared_on_the_device_that_answers(opened_off, capfd):
    """A GPU adds in another order, so a deviation of 0.001 is allowed there, 0.0001 on the CPU."""
    assert (TOLERANCES["fp32"], GPU_TOLERANCE) == (1e-4, 1e-3)
    opened = opened_off(5e-4)
    assert str(opened.device) == "cuda:0"
    with pytest.raises(BundleError, match=r"differ by 0\.002, allowed are 0\.001"):
        opened_off(2e-3)
    with pytest.raises(BundleError, match="differ by nan"):
        opened_off(np.nan)
    assert capfd.readouterr().out == ""


def test_a_gpu_without_memory_for_the_model_says_how_much_was_free(opened_off, monkeypatch):
    """Golden samples run one by one if they do not fit together; if even one does not fit, the exit code is 3."""
    sizes = []

    def predict(self, batch):
        sizes.append(len(batch))
        if len(batch) > 1 or self.off:
            raise MemoryError("Failed to allocate memory")
        return self.session.run(None, {"images": batch})[0]

    monkeypatch.setattr(OnGpu, "predict", predict)
    opened_off(0)
    assert sizes == [4, 1, 1, 1, 1]
    with pytest.raises(DeviceError, match=r"cuda:0 \(H100\) has too little memory .* 8\.0 GB were free") as caught:
        opened_off(1)
    assert caught.value.exit_code == 3


def test_a_provider_that_is_left_out_in_silence_is_noticed(bundle):
    """ONNX Runtime silently falls back to the CPU if CUDA's libraries do not load; that is refused with the reason."""
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is installed, and its provider may load")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a provider that this build does not know
        with pytest.raises(DeviceError, match=r"cuda:0 \(H100\) cannot be used by onnxruntime-gpu .*: .*; ") as caught:
            open_session(bundle.folder / "model.onnx", Device(0, "H100", 1000))
    assert caught.value.exit_code == 3
