"""Damage a file at random: flip bits, truncate it, swap, duplicate, zero or delete parts, insert foreign ones."""

import random
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[random.Random, bytearray, bytes], str]
"""Changes content in place, perhaps with parts of a foreign file; returns a description."""


def _flip(draw: random.Random, content: bytearray, foreign: bytes) -> str:
    place, bit = draw.randrange(len(content)), draw.randrange(8)
    content[place] ^= 1 << bit
    return f"bit {bit} of byte {place} flipped"


def _byte(draw: random.Random, content: bytearray, foreign: bytes) -> str:
    place, value = draw.randrange(len(content)), draw.randrange(256)
    content[place] = value
    return f"byte {place} set to {value}"


def _cut(draw: random.Random, content: bytearray, foreign: bytes) -> str:
    end = draw.choice([0, draw.randrange(len(content)), max(0, len(content) - draw.randint(1, 64))])
    del content[end:]
    return f"cut at byte {end}"


def _append(draw: random.Random, content: bytearray, foreign: bytes) -> str:
    added = draw.randbytes(draw.randint(1, 300))
    content += added
    return f"{len(added)} bytes appended"


def _span(draw: random.Random, content: bytearray) -> tuple[int, int]:
    """Draw a range that is often aligned, like disk blocks and memory words."""
    length = min(len(content), draw.choice([1, 8, 64, 512, 4096, draw.randint(1, len(content))]))
    start = draw.randrange(len(content) - length + 1)
    if draw.random() < 0.5:
        start -= start % min(length, 512)
    return start, start + length


def _zero(draw: random.Random, content: bytearray, foreign: bytes) -> str:
    start, end = _span(draw, content)
    content[start:end] = bytes(end - start)
    return f"bytes {start} to {end} zeroed"


def _swap(draw: random.Random, content: bytearray, foreign: bytes) -> str:
    start, end = _span(draw, content)
    length = end - start
    other = draw.randrange(len(content) - length + 1)
    other -= (other - start) % length if other >= length else 0
    if abs(other - start) < length:
        return _flip(draw, content, foreign)
    one, two = bytes(content[start:end]), bytes(content[other : other + length])
    content[start:end], content[other : other + length] = two, one
    return f"bytes {start} to {end} swapped with those from {other}"


def _double(draw: random.Random, content: bytearray, foreign: bytes) -> str:
    start, end = _span(draw, content)
    content[end:end] = content[start:end]
    return f"bytes {start} to {end} doubled"


def _drop(draw: random.Random, content: bytearray, foreign: bytes) -> str:
    start, end = _span(draw, content)
    del content[start:end]
    return f"bytes {start} to {end} left out"


def _graft(draw: random.Random, content: bytearray, foreign: bytes) -> str:
    if not foreign:
        return _flip(draw, content, foreign)
    start, end = _span(draw, content)
    part = foreign[start:end]
    content[start : start + len(part)] = part
    return f"bytes {start} to {start + len(part)} of another file"


DAMAGES: list[tuple[int, Damage]] = [
    (6, _flip),
    (2, _byte),
    (2, _cut),
    (1, _append),
    (2, _zero),
    (2, _swap),
    (1, _double),
    (1, _drop),
    (1, _graft),
]
"""Weight and damage."""


def damage(draw: random.Random, path: Path, others: list[Path]) -> str:
    """Damage a file in a random way; return a description. Draw again if the file is unchanged."""
    before = path.read_bytes()
    foreign = draw.choice(others).read_bytes() if others else b""
    while True:
        (do,) = draw.choices([do for _, do in DAMAGES], [weight for weight, _ in DAMAGES])
        content = bytearray(before)
        what = do(draw, content, foreign) if content else _append(draw, content, foreign)
        if bytes(content) != before:
            path.chmod(path.stat().st_mode | 0o200)
            path.write_bytes(content)
            return f"{path.name}: {what}"
