"""Memory, bandwidth and links of the GPUs that `plan --memory` knows, by name."""

from __future__ import annotations

import re
from typing import NamedTuple

GB, GIB, MIB = 10**9, 2**30, 2**20

WORKSPACE_BYTES = 32 * MIB
"""Workspace that torch gives cuBLAS on GPUs since Hopper."""


class Card(NamedTuple):
    """Properties of a kind of GPU."""

    name: str  # from `torch.cuda.get_device_name`, or a generic one
    memory: int  # bytes
    bandwidth: float | None = None  # of its memory, bytes per second; None: unknown
    link: float | None = None  # to other GPUs of its machine, bytes per second in one direction; None: unknown
    peaks: tuple[float, float, float] | None = None  # 10^12 operations per second: 16 bits, TF32, 32 bits
    workspace: int = 8_519_680  # bytes of torch's cuBLAS (2.15): docs.nvidia.com/cuda/cublas/#cublassetworkspace

    def peak(self, precision: str, tf32: bool) -> float | None:
        """Return the peak in operations per second, or None if it is unknown.

        Args:
            precision: Lightning's name for it, such as `bf16-mixed`.
            tf32: whether products of float32 may use TF32.
        """
        if self.peaks is None or precision.startswith("64"):
            return None
        is_half = precision.startswith(("16", "bf16", "transformer-engine"))
        return 1e12 * self.peaks[0 if is_half else 1 if tf32 else 2]


CARDS = {
    r"B200": Card("B200", 180 * GB, 8.0e12, 900e9, None, WORKSPACE_BYTES),
    r"H200": Card("H200", 141 * GB, 4.8e12, 450e9, (989.4, 494.7, 66.9), WORKSPACE_BYTES),
    r"H100 ?PCIe": Card("H100 PCIe", 80 * GB, 2.0e12, 64e9, (756.0, 378.0, 51.2), WORKSPACE_BYTES),
    r"H100": Card("H100 80GB HBM3", 80 * GB, 3.35e12, 450e9, (989.4, 494.7, 66.9), WORKSPACE_BYTES),
    r"A100.*40 ?GB": Card("A100 40GB", 40 * GB, 1.555e12, 300e9, (312.0, 156.0, 19.5)),
    r"A100": Card("A100", 80 * GB, 2.039e12, 300e9, (312.0, 156.0, 19.5)),
    r"L40S": Card("L40S", 48 * GB, 0.864e12, 32e9, (362.0, 183.0, 91.6)),
    r"A10": Card("A10", 24 * GB, 0.6e12, 32e9, (125.0, 62.5, 31.2)),
    r"L4": Card("L4", 24 * GB, 0.3e12, 32e9, (121.0, 60.0, 30.3)),
    r"V100.*16 ?GB": Card("V100 16GB", 16 * GB, 0.9e12, 150e9, (125.0, 15.7, 15.7)),
    r"V100": Card("V100", 32 * GB, 0.9e12, 150e9, (125.0, 15.7, 15.7)),
    r"T4": Card("T4", 16 * GB, 0.32e12, 16e9, (65.0, 8.1, 8.1)),
}
"""Cards by a pattern in the name. Values are from NVIDIA's data sheets; a link is half of their figure for both
directions, and peaks are without sparsity. V100 and T4 have no TF32; their 16-bit type is float16."""

NETWORK_BYTES_PER_SECOND = 25e9
"""Bandwidth between machines: InfiniBand NDR 200, one link per GPU."""


def card_of(name: str) -> Card | None:
    """Return the card with this name, or None if it is not in the table."""
    return next(
        (c for pattern, c in CARDS.items() if re.search(rf"(?<![A-Za-z0-9])({pattern})(?![0-9A-Z])", name)), None
    )


def card_names() -> str:
    """Return the names of the cards in the table."""
    return ", ".join(dict.fromkeys(card.name for card in CARDS.values()))
