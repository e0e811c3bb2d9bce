"""The shared state of a process that answers requests: model, batcher, metrics, and readiness."""

import threading
from dataclasses import dataclass, field

from serve.admission import Admission
from serve.batching import Batcher, Job
from serve.limits import Limits
from serve.metrics import Metrics
from serve.model import Model


@dataclass
class Service:
    """State that the parts of the server share.

    Attributes:
        model: the model that answers.
        limits: limits of a request.
        batcher: decodes inputs and runs the model.
        metrics: counters of requests.
        layout: processes, lanes and device, for `/info`.
        admission: checks the heads of requests.
        fast: whether predictions take the fast path; otherwise Flask answers them too (`serve.server`).
        ready: whether the model is warm and the process is not shutting down.
        counting: lock for threads that count; our own server counts only in its event loop.
    """

    model: Model
    limits: Limits = field(default_factory=Limits)
    batcher: Batcher = None  # type: ignore[assignment] # by default one with a single lane for `model`
    metrics: Metrics = field(default_factory=Metrics)
    layout: dict[str, object] = field(default_factory=dict)
    admission: Admission = field(default_factory=Admission)
    fast: bool = True
    ready: bool = True
    counting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.batcher = self.batcher or Batcher(self.model, self.limits)

    def count(self, path: str, status: int, seconds: float, job: Job | None = None) -> None:
        """Count a response in the metrics; for a prediction, also record where its time went."""
        self.metrics.count(path, status, seconds)
        self.metrics.queue(self.batcher.waiting)
        if job is not None and job.batch:
            beside = seconds - job.queued - job.decoding - job.forward
            self.metrics.observe((job.queued, job.decoding, job.forward, beside, job.batch))
