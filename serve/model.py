"""A loaded network that answers requests: the base of a bundle, and of a checkpoint that torch serves.
Letters: N inputs, C channels, H height, W width."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import PngImagePlugin

from deeplightning.image_spec import ImageError, ImageSpec
from serve.device import CPU, Device

MAX_READS = 14_000
"""Maximum number of reads that decoding a picture may take. One of 9 MB needs 420, one of 12,000 tiles 12,000; one of
16 MB took 5 s of CPU with a comment that is read byte by byte, or with as many segments as fit (Pillow 13, November
2026)."""

SMALL_BYTES = 65_536
"""Reads of pictures up to this size are not counted: there cannot be many, and counting costs 0.004 ms."""

PngImagePlugin.MAX_TEXT_MEMORY = 2_000_000
"""Maximum length of all text chunks of a PNG, unpacked. With Pillow's default of 64 million characters, a file of
0.06 MB took 240 MB."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that is loaded and verified. Threads call `predict` and `prepare`.

    Attributes:
        folder: source of the model.
        task: one of `deeplightning.kinds.KINDS`.
        spec: how an input is prepared for it: an `ImageSpec`, `TextSpec`, `TableSpec` or `ArraySpec`.
        labels: names of the classes or targets, in the order of the answer; empty if it answers with pictures.
        run: origin of the model (`id`, `name`, `folder_name`, `checkpoint`, `created`, …).
        precision: precision that the model computes in: "fp32", "int8" or "fp16".
        samples: real prepared inputs, uint8 (N, C, H, W), int64 (N, L) or float32 (N, …), for warm-up.
        output: the interval of a regression, or each label's threshold.
        examples: some inputs as clients send them, of JSON types; a picture is a PNG in base64.
        device: device of the model.
    """

    folder: Path
    task: str
    spec: Any
    labels: list[str]
    run: dict[str, object]
    precision: str = "fp32"
    samples: np.ndarray
    output: Mapping[str, Any] = field(default_factory=dict)
    examples: Sequence[Any] = ()
    device: Device = CPU

    @property
    def example(self) -> Any:
        """An input as a client sends it; None unless the model takes rows or arrays."""
        return self.examples[0] if self.task.startswith(("table", "array")) and self.examples else None

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Return the answers to prepared inputs (N, …): probabilities or numbers, float32 (N, K); for each pixel,
        (N, K, H, W); or pictures, float32 (N, C, H, W) from 0 to 1.

        Raises:
            MemoryError: the device has too little memory for this batch.
            deeplightning.words.InputError: the network rejects the values, such as an index out of range.
        """
        raise NotImplementedError

    def prepare(self, data: bytes, max_pixels: int, max_side: int | None = None) -> np.ndarray:
        """Decode and resize an encoded picture to the model's input, uint8 (C, H, W).

        Raises:
            deeplightning.image_spec.ImageError: the data is not a picture, is damaged, or is too large.
        """
        return prepare_picture(self.spec, data, max_pixels, max_side)


def prepare_picture(spec: ImageSpec, data: bytes, max_pixels: int, max_side: int | None = None) -> np.ndarray:
    """Decode and resize an encoded picture that a client sent, uint8 (C, H, W).

    Raises:
        deeplightning.image_spec.ImageError: not a picture, damaged, too large, or needs more than `MAX_READS` reads.
    """
    source = data if len(data) <= SMALL_BYTES else _CountedReads(data)
    return np.ascontiguousarray(spec.decode(source, max_pixels, max_side).transpose(2, 0, 1))


class _CountedReads(io.BytesIO):
    """A file in memory that can be read `MAX_READS` times."""

    def __init__(self, data: bytes):
        super().__init__(data)
        self._remaining = MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._remaining -= 1
        if self._remaining < 0:
            raise ImageError("The image has too many chunks, tiles or metadata entries; save it again.", 400)
        return super().read(size)
