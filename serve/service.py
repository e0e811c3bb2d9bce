"""The state of a process that answers requests: the model, its batcher, its metrics, and whether it is ready."""

import threading
from dataclasses import dataclass, field

from serve.admission import Admission
from serve.batching import Batcher, Job, Model
from serve.limits import Limits
from serve.metrics import Metrics


@dataclass
class Service:
    """All that the parts of the server share.

    Attributes:
        model: what answers.
        limits: what a request may cost.
        batcher: where pictures are decoded and run.
        metrics: where requests are counted.
        layout: how the server is spread, for `/info`.
        admission: which requests are let in.
        fast: predictions take the fast path; False: Flask answers them too (`serve.server`).
        ready: the model is warm, and the process is not about to end.
        counting: held by threads that count; our own server counts in its event loop alone.
    """

    model: Model
    limits: Limits = field(default_factory=Limits)
    batcher: Batcher = None  # type: ignore[assignment] # one lane over `model`, unless it is given
    metrics: Metrics = field(default_factory=Metrics)
    layout: dict[str, object] = field(default_factory=dict)
    admission: Admission = field(default_factory=Admission)
    fast: bool = True
    ready: bool = True
    counting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.batcher = self.batcher or Batcher(self.model, self.limits)

    def count(self, path: str, status: int, seconds: float, job: Job | None = None) -> None:
        """Counts an answer in the metrics; of a prediction also where its time went."""
        self.metrics.count(path, status, seconds)
        self.metrics.queue(self.batcher.waiting)
        if job is not None and job.batch:
            beside = seconds - job.queued - job.decoding - job.forward
            self.metrics.observe((job.queued, job.decoding, job.forward, beside, job.batch))
