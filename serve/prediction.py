"""Turn a prediction request into a job (`Predictions.job`), and a finished job into an answer (`Predictions.answer`).
The fast path and the Flask application share both, and the state of their process (`Service`)."""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import unquote_to_bytes

from deeplightning.kinds import KINDS
from serve import uploads
from serve.admission import Admission
from serve.answers import DEFAULT_TOP_K, Answer, refused, with_inputs
from serve.batching import Batcher, Job, NotTiny
from serve.limits import Limits, Refusal
from serve.metrics import Metrics
from serve.model import Model
from serve.outputs import JSON, OUTPUTS

T = TypeVar("T")

JOB = "serve.job"
"""Key of the WSGI environment under which Flask puts a prediction's job, for the metrics."""

_TOP_K, _SHOW = (re.compile(rb"(?:\A|&)%b(?:=([^&]*))?(?=&|\Z)" % name) for name in (b"top_k", b"show"))
_COUNT = re.compile(rb"[0-9]{1,9}")


class Predictions:
    """Reads and answers the predictions of a model."""

    def __init__(self, model: Model, limits: Limits):
        self._limits, self._spec = limits, model.spec
        self._shape: tuple[int, ...] = getattr(self._spec, "shape", ())
        readers = {"image": self._pictures, "text": self._texts, "table": self._rows, "array": self._arrays}
        self._takes = KINDS[model.task].takes
        self._read = readers[self._takes]
        self._encode = OUTPUTS[KINDS[model.task].gives].encoder(model.labels, model.output)

    def job(self, query: bytes, content_type: bytes, accept: bytes, body: bytes, finish: Callable[[Job], None]) -> Job:
        """Return the job of a request.

        Args:
            query: the query string, percent-encoded.
            body: the complete body.
            finish: called with the finished job.

        Raises:
            Refusal: top_k is not a count, show is not `input`, or the body is missing or of an unsupported type. Other
                errors in the body appear when the job runs.
        """
        top_k, show = (_top_k(query), self._show_input(query)) if query else (DEFAULT_TOP_K, False)
        return Job(self._read(content_type, body), len(body), finish, top_k, accept.decode("latin-1"), show)

    def answer(self, job: Job) -> Answer:
        """Return the answer of a finished job. Raise its error unless it is a refusal."""
        if isinstance(job.error, Refusal):
            return refused(job.error)
        if job.error is not None:
            raise job.error
        content_type, body = self._encode(job.rows, job.top_k, job.accept)
        return Answer(200, content_type, with_inputs(body, job.shown) if job.show and content_type == JSON else body)

    def _show_input(self, query: bytes) -> bool:
        """Return whether the answer must include the pictures as they reach the network."""
        if (found := _SHOW.search(query)) is None:
            return False
        if self._takes != "image" or found[1] != b"input":
            raise Refusal(400, "show must be input, as in /predict?show=input; only pictures can be shown.")
        return True

    def _pictures(self, content_type: bytes, body: bytes) -> Callable[[bool], Sequence[bytes]]:
        """Return a function that reads the encoded pictures from the body."""
        limits, mimetype = self._limits, _mimetype(content_type)
        if mimetype == b"multipart/form-data":

            def read(tiny: bool) -> Sequence[bytes]:
                try:
                    pictures = uploads.from_form(content_type, body)
                except uploads.NotWellFormed:
                    if tiny:
                        raise NotTiny from None
                    pictures = uploads.from_unusual_form(content_type, body, limits)
                return _within_limit(pictures, limits)

            return read
        if mimetype == b"application/json":
            return lambda _: _within_limit(uploads.from_json(body), limits)
        if not mimetype.startswith(b"image/") and mimetype not in (b"", b"application/octet-stream"):
            raise _unsupported_type(
                mimetype,
                ". Send multipart/form-data with the field image (curl -F image=@FILE), the image itself (curl "
                '--data-binary @FILE -H "Content-Type: image/png"), or JSON {"images": [base64, …]} as '
                "application/json.",
            )
        if not body:
            raise Refusal(400, "The request has no body; send the image as the body, or as the form field image.")
        return lambda _: [body]

    def _texts(self, content_type: bytes, body: bytes) -> Callable[[bool], Sequence[object]]:
        """Return a function that reads the texts, in UTF-8, from the body."""
        mimetype = _mimetype(content_type)
        if mimetype == b"application/json":
            return lambda _: _within_limit(uploads.texts_from_json(body), self._limits, "texts")
        if not uploads.is_text(mimetype, content_type):
            raise _unsupported_type(content_type, f": this server takes texts. Send {uploads.KINDS_OF_TEXT}.")
        if not body:
            raise Refusal(400, f"The request has no body; send {uploads.KINDS_OF_TEXT}.")
        return lambda _: [body.removeprefix(b"\xef\xbb\xbf")]  # the byte order mark of Windows' editors

    def _rows(self, content_type: bytes, body: bytes) -> Callable[[bool], Sequence[object]]:
        """Return a function that reads the rows of a table from the body."""
        mimetype, limits, (columns,) = _mimetype(content_type), self._limits, self._shape
        if not body:
            raise Refusal(400, f"The request has no body; {uploads.ROWS_USAGE}.")
        if mimetype == b"application/json":
            return lambda _: _within_limit(uploads.rows_from_json(body, columns, limits), limits, "rows")
        if mimetype == b"text/csv":
            form, names = self._spec.format, [column.name for column in self._spec.columns]
            return lambda _: _within_limit(uploads.rows_from_csv(body, limits, names, form), limits, "rows")
        raise _unsupported_type(content_type, f": this server takes rows of a table; {uploads.ROWS_USAGE}.")

    def _arrays(self, content_type: bytes, body: bytes) -> Callable[[bool], Sequence[object]]:
        """Return a function that reads arrays from the body."""
        mimetype, limits, shape = _mimetype(content_type), self._limits, self._shape
        if not body:
            raise Refusal(400, f"The request has no body; {uploads.ARRAYS_USAGE}.")
        if mimetype == b"application/json":
            return lambda _: _within_limit(uploads.arrays_from_json(body, shape, limits), limits, "arrays")
        if mimetype in (b"", b"application/octet-stream", b"application/x-npy"):
            return lambda _: _within_limit(uploads.arrays_from_npy(body, shape, limits), limits, "arrays")
        raise _unsupported_type(content_type, f": this server takes arrays; {uploads.ARRAYS_USAGE}.")


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
        ready: whether the model is warm and the process is not shutting down.
        count_lock: lock for threads that count; our own server counts only in its event loop.
    """

    model: Model
    limits: Limits = field(default_factory=Limits)
    batcher: Batcher = None  # type: ignore[assignment] # by default with a single lane for `model`
    metrics: Metrics = field(default_factory=Metrics)
    layout: dict[str, object] = field(default_factory=dict)
    admission: Admission = field(default_factory=Admission)
    ready: bool = True
    count_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.batcher = self.batcher or Batcher(self.model, self.limits)

    def count(self, path: str, status: int, seconds: float, job: Job | None = None) -> None:
        """Count a response in the metrics; for a prediction, also record where its time went."""
        self.metrics.count(path, status, seconds)
        self.metrics.queue(self.batcher.waiting)
        if job is not None and job.batch_size:
            rest = seconds - job.queue_seconds - job.decode_seconds - job.forward_seconds
            self.metrics.observe((job.queue_seconds, job.decode_seconds, job.forward_seconds, rest, job.batch_size))


def _mimetype(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip().lower()


def _unsupported_type(content_type: bytes, remedy: str) -> Refusal:
    return Refusal(415, f"A body of type {content_type.decode('latin-1')[:100]} is not supported{remedy}")


def _top_k(query: bytes) -> int:
    if (found := _TOP_K.search(query)) is None:
        return DEFAULT_TOP_K
    text = unquote_to_bytes((found[1] or b"").replace(b"+", b" "))
    if not _COUNT.fullmatch(text) or int(text) < 1:
        raise Refusal(400, "top_k must be a whole number of at least 1, as in /predict?top_k=3.")
    return int(text)


def _within_limit(inputs: Sequence[T], limits: Limits, what: str = "images") -> Sequence[T]:
    if len(inputs) > limits.max_images:
        raise Refusal(413, f"The request has {len(inputs)} {what}; at most {limits.max_images} are accepted in one.")
    return inputs
