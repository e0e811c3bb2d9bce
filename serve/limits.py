"""Limits of a request, and the refusal of one that exceeds them or is invalid."""

from dataclasses import dataclass, field, fields
from typing import Any

FAULT = "Internal server error; the server's log has the details. Other requests are not affected."
"""Message of status 500."""


def _option(default: float, low: float, high: float, meaning: str) -> Any:
    """Define a limit that a user may set from `low` to `high` with an option of the server."""
    return field(default=default, metadata={"bounds": (low, high), "meaning": meaning})


@dataclass(frozen=True)
class Limits:
    """Limits of one request.

    Attributes:
        max_upload_mb: size of a request's body, in units of 1,000,000 bytes; checked before it is read.
        max_pixels: size of a picture, width x height; checked on its header, before it is decoded. The slowest formats
            (WebP, AVIF) take about a second for 24 million (one core, Pillow 12, November 2026).
        max_side: width and height of a picture, also checked on its header. Each row costs time: a PNG of 1 x 24
            million pixels, 46 kB, took 1.4 s of CPU, one of 1,464 x 16,384 0.24 s (one core, Pillow 13, November 2026).
        max_images: pictures, or texts, in one request.
        max_batch: pictures in one forward pass.
        max_queue: requests that may wait for the model at a time.
        max_wait: seconds that a request may wait for the model.
        max_text: size of a text, in bytes of UTF-8; checked before it is tokenized.
    """

    max_upload_mb: int = _option(16, 1, 10_000, "largest request, in units of 1,000,000 bytes")
    max_pixels: int = _option(24_000_000, 1, 178_956_970, "largest image, width x height")
    max_side: int = _option(16_384, 1, 178_956_970, "largest width and height of an image")
    max_images: int = 256
    max_batch: int = _option(16, 1, 1024, "images in one forward pass")
    max_queue: int = _option(256, 1, 100_000, "requests that may wait")
    max_wait: float = _option(5.0, 0.1, 600, "seconds that a request may wait")
    max_text: int = 100_000

    @classmethod
    def of(cls, **values: float) -> "Limits":
        """Return the defaults with some values replaced.

        Raises:
            ValueError, TypeError: a value is outside `BOUNDS`, or a limit is unknown.
        """
        for name, value in values.items():
            low, high = BOUNDS.get(name, (0, float("inf")))
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must be from {low} to {high}")
        return cls(**values)  # type: ignore[arg-type]

    @property
    def max_bytes(self) -> int:
        """Maximum size of a request's body, in bytes."""
        return self.max_upload_mb * 1_000_000

    def check_size(self, size: int) -> None:
        """Check the size of a body, announced or received, in bytes.

        Raises:
            Refusal: the body is too large.
        """
        if size > self.max_bytes:
            raise self.too_large()

    def too_large(self) -> "Refusal":
        """Return the refusal of a body of more than `max_bytes`."""
        return Refusal(
            413,
            f"The request is too large: at most {self.max_upload_mb} MB, {self.max_images} inputs and few other form "
            "fields are accepted. Send smaller inputs, or fewer at a time.",
        )


BOUNDS: dict[str, tuple[float, float]] = {one.name: one.metadata["bounds"] for one in fields(Limits) if one.metadata}
"""Minimum and maximum of the limits that a user may set; others may be any positive number."""


class Refusal(Exception):
    """Raised if a request is refused.

    Attributes:
        status: HTTP status.
        message: one sentence: what is wrong, and what to do.
        headers: headers that the status requires.
    """

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or {}
