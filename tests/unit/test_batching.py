"""Waiting requests share batches, none waits longer than allowed, and a bad picture does not affect others."""

import contextlib
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from deeplightning.image_spec import ImageError, ImageSpec
from serve import pool
from serve.answers import answered
from serve.batching import TINY_BYTES, TINY_SECONDS, Batcher, Job
from serve.limits import Limits, Refusal
from serve.worker_count import Layout, choose_layout


class Model:
    """Answers each picture with its first pixel, the value of the upload; the test decides when a forward pass ends."""

    task, labels, output, spec = "image_classification", ["a"], {}, ImageSpec(1, 1, "L")

    def __init__(self):
        self.batches = []
        self.threads = []
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def prepare(self, data, max_pixels, max_side):
        if data == b"bad":
            raise ImageError("This is not an image.", 415)
        if len(data) > 3:
            raise ImageError("Too large.", 413)
        return np.full((1, 1, 1), int(data), np.uint8)

    def predict(self, images):
        self.begun.set()
        assert self.may_end.wait(10)
        self.batches.append(images[:, 0, 0, 0].tolist())
        self.threads.append(threading.current_thread())
        if 13 in self.batches[-1]:
            raise RuntimeError("unlucky")
        return images[:, 0, 0].astype(np.float32)


class Submitted:
    """A job that was submitted to a batcher, and an event for its end."""

    def __init__(self, batcher, *pictures, size=10):
        self.ended = threading.Event()
        self.ends = 0
        self.job = Job(lambda tiny: list(pictures), size, self._finish)
        batcher.submit(self.job)

    def _finish(self, job):
        self.ends += 1
        self.ended.set()

    def rows(self):
        assert self.ended.wait(10)
        assert self.job.error is None
        return [row.tolist() for row in self.job.rows]

    def error(self):
        assert self.ended.wait(10)
        return self.job.error


@pytest.fixture
def model():
    return Model()


def occupied(model, batcher):
    """Return a request that blocks the only lane of the batcher."""
    model.may_end.clear()
    first = Submitted(batcher, b"1")
    assert model.begun.wait(10)
    return first


def ready(batcher, number):
    """Wait until this number of pictures waits for a lane."""
    end = time.monotonic() + 10
    while len(batcher._ready) < number:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_lone_request_is_run_alone(model):
    """A single request does not wait, and its pictures share a forward pass."""
    batcher = Batcher(model, Limits())
    assert Submitted(batcher, b"7").rows() == [[7]]
    assert Submitted(batcher, b"3", b"1", b"2").rows() == [[3], [1], [2]]
    assert model.batches == [[7], [3, 1, 2]]
    assert batcher.waiting == 0


def test_what_waits_goes_together_up_to_the_largest_batch(model):
    """Requests that arrive while the lane is busy share forward passes; a request may be split over two."""
    batcher = Batcher(model, Limits(max_batch=4))
    first = occupied(model, batcher)
    others = [Submitted(batcher, b"2"), Submitted(batcher, b"3", b"4"), Submitted(batcher, b"5", b"6")]
    ready(batcher, 5)
    model.may_end.set()
    assert [one.rows() for one in (first, *others)] == [[[1]], [[2]], [[3], [4]], [[5], [6]]]
    assert [len(batch) for batch in model.batches] == [1, 4, 1]
    assert sorted(number for batch in model.batches for number in batch) == [1, 2, 3, 4, 5, 6]
    assert [one.ends for one in (first, *others)] == [1] * 4


def test_two_lanes_run_at_a_time(model):
    """A second forward pass does not wait for the first."""
    batcher = Batcher(model, Limits(), lanes=2)
    first = occupied(model, batcher)
    model.begun.clear()
    second = Submitted(batcher, b"2")
    assert model.begun.wait(10)
    model.may_end.set()
    assert (first.rows(), second.rows()) == ([[1]], [[2]])
    assert len(set(model.threads)) == 2


def test_a_fault_affects_only_its_own_request(model):
    """A fault does not affect others in the batch; an undecodable picture ends only its own request."""
    batcher = Batcher(model, Limits())
    first = occupied(model, batcher)
    unlucky, lucky, none = Submitted(batcher, b"13"), Submitted(batcher, b"2"), Submitted(batcher, b"3", b"bad")
    ready(batcher, 2)
    model.may_end.set()
    assert (first.rows(), lucky.rows()) == ([[1]], [[2]])
    assert str(unlucky.error()) == "unlucky"
    assert (none.error().status, none.error().message) == (415, "Image 2 of 2: This is not an image.")
    assert batcher.waiting == 0


def test_without_a_server_a_fault_affects_only_its_own_input(model):
    """`predict` names the input that the model cannot take, and answers all others."""
    named = []
    model.prepare = lambda data, max_pixels: Model.prepare(model, data, max_pixels, None)
    given = enumerate([b"1", b"13", b"2"])
    rows = answered(model, given, 1, lambda number, error: named.append((number, str(error))))
    assert ([number for number, _ in rows], named) == ([0, 2], [(1, "unlucky")])


def test_answers_that_are_not_finite_are_faults():
    """An answer with NaN, which is no JSON, is a fault of the model."""
    model = Model()
    model.predict = lambda images: np.full((len(images), 1), np.nan, np.float32)
    assert "not finite" in str(Submitted(Batcher(model, Limits()), b"1").error())


def test_a_full_queue_refuses(model):
    """A full queue refuses with 429 and Retry-After; accepted requests are still answered."""
    batcher = Batcher(model, Limits(max_queue=3))
    accepted = [occupied(model, batcher), Submitted(batcher, b"2"), Submitted(batcher, b"3")]
    with pytest.raises(Refusal, match="3 requests are waiting") as refused:
        Submitted(batcher, b"4")
    assert refused.value.status == 429
    assert int(refused.value.headers["Retry-After"]) >= 1
    model.may_end.set()
    assert [one.rows() for one in accepted] == [[[1]], [[2]], [[3]]]
    assert Submitted(batcher, b"4").rows() == [[4]]


def test_a_wait_that_would_be_too_long_refuses(model):
    """A request that could not be answered in time is refused at once."""
    batcher = Batcher(model, Limits(max_wait=0.05))
    batcher._request_cost = 0.2  # seconds for each that waits, as after slow forward passes
    first = occupied(model, batcher)
    with pytest.raises(Refusal, match="busy"):
        Submitted(batcher, b"3")
    model.may_end.set()
    assert first.rows() == [[1]]


def test_what_waited_too_long_is_never_run(model):
    """A request that waited too long gets 504, whether before or after decoding."""
    batcher = Batcher(model, Limits(max_wait=0.1))
    first = occupied(model, batcher)
    late = Submitted(batcher, b"2", b"3")
    ready(batcher, 2)
    time.sleep(0.15)
    model.may_end.set()
    assert first.rows() == [[1]]
    assert (late.error().status, late.ends) == (504, 1)
    assert model.batches == [[1]]
    old = Job(lambda tiny: [b"4"], 1, lambda job: done.set(), accepted=time.perf_counter() - 1)
    done = threading.Event()
    batcher.submit(old)
    assert done.wait(10)
    assert (old.error.status, model.batches, batcher.waiting) == (504, [[1]], 0)


def test_a_small_picture_for_a_small_network_changes_no_thread(model):
    """A small picture runs in the thread that submits it; larger ones, or several, in another thread."""
    batcher = Batcher(model, Limits(), forward_seconds=TINY_SECONDS / 2)
    assert Submitted(batcher, b"7").rows() == [[7]]
    assert Submitted(batcher, b"8", size=TINY_BYTES + 1).rows() == [[8]]
    assert Submitted(batcher, b"8", b"9").rows() == [[8], [9]]
    here = threading.current_thread()
    assert [thread is here for thread in model.threads] == [True, False, False]
    assert Submitted(batcher, b"1000").error().status == 413
    assert batcher.waiting == 0


@pytest.mark.parametrize(
    ("seconds", "cores", "layout"),
    [(0.01, 2, (1, 2)), (0.00005, 2, (2, 1)), (0.005, 16, (1, 16)), (0.0005, 16, (5, 4)), (0.0, 1, (1, 1))],
)
def test_the_layout_follows_the_forward_pass(monkeypatch, seconds, cores, layout):
    """A heavy network has one process with a lane for each core; a light one has several processes."""
    monkeypatch.setattr("serve.worker_count._forward_seconds", lambda model: seconds)
    chosen = choose_layout(SimpleNamespace(), cores)
    assert (chosen.processes, chosen.lanes) == layout
    assert chosen.processes * chosen.lanes >= cores


def test_a_request_waits_no_longer_than_allowed_for_its_turn_to_decode(model):
    """Large pictures are decoded one at a time per lane; a request that waits too long for its turn gets 504."""
    decoding, may_end = threading.Event(), threading.Event()

    def prepare(data, max_pixels, max_side):
        if max_pixels < 24_000_000:
            raise ImageError("Too large.", 413)
        decoding.set()
        assert may_end.wait(10)
        return np.zeros((1, 1, 1), np.uint8)

    model.prepare = prepare
    batcher = Batcher(model, Limits(max_wait=0.3))
    first = Submitted(batcher, b"1")
    assert decoding.wait(10)
    start = time.perf_counter()
    assert Submitted(batcher, b"2").error().status == 504
    assert time.perf_counter() - start < 5
    may_end.set()
    first.ended.wait(10)


def test_a_new_model_is_timed_anew(monkeypatch):
    """A model that replaces another keeps processes and lanes, not the duration of a forward pass."""

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "choose_layout", lambda model: Layout(1, 2, 50.0))
    monkeypatch.setattr(pool, "_resource_limits", lambda memory: contextlib.nullcontext())
    monkeypatch.setattr(pool, "reset_signals", lambda: None)
    monkeypatch.setattr(pool, "collect_signals", stop)
    setup = SimpleNamespace(open_model=lambda device: object())
    replacing = pool.WorkerPool(setup, Layout(2, 1, 0.1), 0, 10**9, -1)
    with pytest.raises(KeyboardInterrupt):
        replacing.run()
    assert replacing._chosen_layout == Layout(2, 1, 50.0)
