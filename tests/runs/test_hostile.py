"""A real server refuses each hostile or malformed request with a message or answers it correctly, at low cost, and
still answers the next good request. Requests of a few bytes are in `hostile/requests.tsv`.

The cost of a request is that of all processes of the server: CPU time as counted by the kernel in nanoseconds, and the
increase of peak memory. A case that may cost more than the others has a separate bound, with the reason.
"""

import concurrent.futures
import contextlib
import functools
import json
import random
import re
import select
import signal
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from clock import slowness
from served import COLOURS, Server, colour_run, encoded, picture, probabilities
from test_hostile_requests import bytes_of, exchange, lines

CPU_MS, MEMORY_MB = 50, 50

Parts = list[bytes]


@dataclass(frozen=True)
class Case:
    """Request, expected answers and limits.

    Attributes:
        parts: makes the bytes to send, in the pieces in which they are sent.
        expected: the status of each answer; None: the connection ends without one.
        label: of the picture, if it can be read.
        ends: the client shuts down its writing side after the last byte.
        reads: the client checks for an answer before each piece; otherwise it sends all first.
        cpu_ms, memory_mb: limits of its cost.
        why: the reason for higher limits.
    """

    parts: Callable[[], Parts]
    expected: tuple[int | None, ...]
    label: str | None = None
    ends: bool = False
    reads: bool = True
    cpu_ms: float = CPU_MS
    memory_mb: float = MEMORY_MB
    why: str = ""


# HTTP.


def head(first: str, *lines: str | bytes) -> bytes:
    """Return the head of a request."""
    texts = [line if isinstance(line, bytes) else line.encode("latin-1") for line in (first, "Host: localhost", *lines)]
    return b"".join(text + b"\r\n" for text in texts) + b"\r\n"


def post(body: bytes, *lines: str | bytes, path: str = "/predict") -> bytes:
    """Return a complete request."""
    return head(f"POST {path} HTTP/1.1", f"Content-Length: {len(body)}", *lines) + body


def wire(data: bytes, *expected: int | None, **options: Any) -> Case:
    """Return a case that sends these bytes."""
    return Case(lambda: [data], expected, **options)


def body(make: Callable[[], bytes], *expected: int | None, kind: str | None = None, **options: Any) -> Case:
    """Return a case with a complete request, whose body is made when the case runs."""
    lines = () if kind is None else (f"Content-Type: {kind}",)
    return Case(lambda: [post(make(), *lines)], expected, **options)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


POST = "POST /predict HTTP/1.1"
CHUNKED = head(POST, "Transfer-Encoding: chunked")
GOOD = picture("green")
COMPLETE = post(GOOD)


CUT = {  # a good request that is cut off gets no answer
    "nothing at all": wire(b"", None),
    "cut in the method": wire(COMPLETE[:2], None),
    "cut after the head": wire(COMPLETE[: COMPLETE.index(b"\r\n\r\n") + 4], None),
    "cut before the last byte": wire(COMPLETE[:-1], None),
    "cut in a chunk": wire(CHUNKED + chunk(GOOD)[:-20], None),
    "cut before the last chunk": wire(CHUNKED + chunk(GOOD), None),
    "abort in mid-upload": wire(head(POST, "Content-Length: 9000000") + b"\0" * 1_000_000, None),
}


BOMB_200_MB = head(POST, "Content-Length: 200000000")
MEGABYTE = chunk(b"\0" * 1_000_000)
DROPPED = "64 MB of a refused body are read and dropped, for clients that read only after they have sent everything"

HTTP = {
    "200 MB declared": wire(BOMB_200_MB, 413),
    "200 MB in chunks": Case(lambda: [CHUNKED, *[MEGABYTE] * 200], (413,)),
    "200 MB sent to the end": Case(
        lambda: [BOMB_200_MB, *[b"\0" * 1_000_000] * 200], (None,), reads=False, cpu_ms=200, why=DROPPED
    ),
    "length too small": wire(head(POST, f"Content-Length: {len(GOOD) - 9}") + GOOD, 200, 400, label="green"),
    "request after a body": wire(COMPLETE + head("GET /nothing HTTP/1.1"), 200, 404, label="green"),
    "two lengths": wire(head(POST, "Content-Length: 5", "Content-Length: 6") + b"hello", 400),
    "length twice": wire(head(POST, "Content-Length: 5", "Content-Length: 5") + b"hello", 400),
    "chunk smaller than its size": wire(CHUNKED + b"9\r\nhello\r\n0\r\n\r\n", 400),
    "chunk larger than its size": wire(CHUNKED + b"3\r\nhello\r\n0\r\n\r\n", 400),
    "bad chunk after a refusal": wire(
        head(POST, f"Content-Type: {'x' * 2000}", "Transfer-Encoding: chunked") + b"zz\r\n", 400, None
    ),
    "chunks of two bytes": Case(
        lambda: [CHUNKED + b"2\r\nab\r\n" * 100_000 + b"0\r\n\r\n"], (415,), cpu_ms=150, why="a microsecond per chunk"
    ),
    "endless chunk extension": Case(
        lambda: [CHUNKED + b"5;", *[b"x" * 100_000] * 10, b"\r\nhello\r\n0\r\n\r\n"], (431,)
    ),
    "endless trailer": Case(lambda: [CHUNKED + b"0\r\nX: ", *[b"x" * 100_000] * 50], (431,)),
    "very many trailers": Case(
        lambda: [CHUNKED + b"0\r\n", *[b"".join(b"X-%d: y\r\n" % n for n in range(5000))] * 20], (431,)
    ),
    "very long query": wire(head(f"POST /predict?top_k={'9' * 60_000} HTTP/1.1", "Content-Length: 1") + b"x", 400),
    "binary garbage": wire(random.Random(0).randbytes(10_000), 400),
    "refusals after the client's shutdown": wire(head("GET /nothing HTTP/1.1") * 3, 404, 404, 404, None, ends=True),
    "picture before the client's shutdown": body(
        lambda: picture("green", "JPEG", (400, 400)), 200, None, label="green", ends=True
    ),
    "half a picture before the client's shutdown": wire(COMPLETE[:-20], None, ends=True),
} | CUT


# Forms.

FORM = "multipart/form-data; boundary=x"
FILE = 'Content-Disposition: form-data; name="image"; filename="a.png"'


def part(data: bytes, *lines: str | bytes) -> bytes:
    """Return a part of a form, with the boundary before it."""
    texts = [line if isinstance(line, bytes) else line.encode("latin-1") for line in lines]
    return b"--x\r\n" + b"".join(text + b"\r\n" for text in texts) + b"\r\n" + data + b"\r\n"


def form(*parts: bytes, kind: str = FORM, expected: int = 400, label: str | None = None, **options: Any) -> Case:
    """Return a case with a form, which is answered with a label or refused."""
    return body(lambda: b"".join(parts) + b"--x--\r\n", 200 if label else expected, kind=kind, label=label, **options)


def named(disposition: str, **options: Any) -> Case:
    return form(part(GOOD, f"Content-Disposition: {disposition}"), **options)


FORMS = {
    "form with a boundary of 60 kB": form(part(GOOD, FILE), kind=f"multipart/form-data; boundary={'x' * 60_000}"),
    "form in a form": form(part(part(GOOD, FILE) + b"--y--", "Content-Type: multipart/mixed; boundary=y", FILE)),
    "form in a form, same boundary": form(part(part(GOOD, FILE), FILE)),
    "form of 10,000 parts": form(part(b"", FILE) * 10_000, expected=413),
    "form of 10,000 pictures": form(part(GOOD, FILE) * 10_000, expected=413),
    "form of 10,000 fields": form(part(b"x", 'Content-Disposition: form-data; name="a"') * 10_000, expected=413),
    "form of 300,000 boundaries": form(b"--x\r\n" * 300_000, expected=413),
    "form of 300,000 lines": form(part(b"\r\n" * 300_000, FILE), expected=415),
    "form of 300,000 near boundaries": form(part(b"\r\n--" * 300_000, FILE), expected=415),
    "form with a preamble of 1 MB": form(b"y" * 1_000_000 + b"\r\n", part(GOOD, FILE), expected=413),
    "form with text of 1 MB": form(part(b"x" * 1_000_000, 'Content-Disposition: form-data; name="a"'), expected=413),
    "form with a header of 1 MB": form(part(GOOD, FILE, "X: " + "y" * 1_000_000), expected=413),
    "form with 50,000 headers": form(
        part(GOOD, FILE, *["X: y"] * 50_000), label="green", cpu_ms=200, why="the parser reads 300 kB of headers"
    ),
    "field of another disposition": named('attachment; name="image"; filename="a.png"', label="green"),
    "field with a name of 60 kB": named(f'form-data; name="{"x" * 60_000}"; filename="a.png"'),
    "two fields, one is text": form(
        part(GOOD, FILE), part(b"x", 'Content-Disposition: form-data; name="image"'), label="green"
    ),
    "two fields, one is no picture": form(part(GOOD, FILE), part(b"hello", FILE), expected=415),
    "two fields, one is empty": form(part(b"", FILE), part(GOOD, FILE)),
    "path in the file name": named('form-data; name="image"; filename="../../../etc/passwd"', label="green"),
    "NUL in the file name": named('form-data; name="image"; filename="a\0.png"', label="green"),
    "file name of 1 MB": named(f'form-data; name="image"; filename="{"x" * 1_000_000}"', expected=413),
    "file name in an unknown charset": named("form-data; name=\"image\"; filename*=klingon''%ff%fe", label="green"),
    "file name in 2,000 pieces": named(
        'form-data; name="image"; filename="a"' + "".join(f'; filename*{n}="x"' for n in range(2000)), label="green"
    ),
    "lying part length": form(part(GOOD, FILE, "Content-Length: 999999"), label="green"),
    "coded part": form(part(encoded(GOOD).encode(), "Content-Transfer-Encoding: base64", FILE), expected=415),
}


# Other bodies.

JSON = "application/json"


def json_of(data: bytes | Callable[[], bytes], expected: int = 400, **options: Any) -> Case:
    return body(data if callable(data) else lambda: data, expected, kind=JSON, **options)


def in_json(data: bytes) -> bytes:
    return json.dumps({"image": encoded(data)}).encode()


LONG = {"cpu_ms": 500, "memory_mb": 120, "why": "15 MB are parsed as JSON and then decoded as base64"}

BODIES = {
    "no body": body(lambda: b"", 400),
    "unknown picture type": body(lambda: GOOD, 200, kind="image/x-nothing", label="green"),
    "URL-encoded": body(lambda: b"image=a.png&" * 10_000, 415, kind="application/x-www-form-urlencoded"),
    "type of 60 kB": body(lambda: GOOD, 400, kind="x" * 60_000),
    "type with 5,000 parameters": body(lambda: GOOD, 400, kind="text/x" + ";a=b" * 5_000),
    "noise as picture": body(lambda: random.Random(1).randbytes(1_000_000), 415),
    "JSON in another encoding": json_of(in_json(GOOD).decode().encode("utf-16"), 200, label="green"),
    "JSON of objects of depth 200,000": json_of(b'{"a":' * 200_000),
    "JSON of 1,000,000 parts": json_of(lambda: b"[" + b"0," * 1_000_000 + b"0]"),
    "JSON of 300 pictures": json_of(lambda: json.dumps({"images": [encoded(GOOD)] * 300}).encode(), 413),
    "JSON with a huge number": json_of(b'{"image": ' + b"9" * 1_000_000 + b"}"),
    "JSON with a long fraction": json_of(b'{"image": 0.' + b"1" * 1_000_000 + b"}"),
    "base64 of base64": json_of(in_json(encoded(GOOD).encode()), 415),
    "data URL without end": json_of(lambda: b'{"image": "' + b"data:" * 200_000 + b'"}'),
    "base64 with 5,000,000 blanks": json_of(lambda: b'{"image": "' + b"AA " * 5_000_000 + b'"}', 415, **LONG),
    "base64 of 15 MB": json_of(lambda: b'{"image": "' + b"A" * 15_000_000 + b'"}', 415, **LONG),
}


# Pictures.


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    *chunks: tuple[bytes, bytes],
    size: tuple[int, int] = (8, 8),
    depth: int = 8,
    colour: int = 2,
    data: bytes | None = None,
    after: Iterable[tuple[bytes, bytes]] = (),
) -> bytes:
    """Return a PNG of these parts; without `data` it is all green."""
    if data is None:
        data = zlib.compress((b"\0" + bytes(COLOURS["green"]) * 8) * 8)
    start = struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, 0)
    all_chunks = [(b"IHDR", start), *chunks, (b"IDAT", data), *after, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, value) for kind, value in all_chunks)


@functools.cache
def gigabyte() -> bytes:
    """Return 1 MB that zlib expands to 1 GB of zeros, with a wrong checksum at the end."""
    packer = zlib.compressobj(9)
    first = packer.compress(b"\0" * 1_000_000) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(b"\0" * 1_000_000) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + block * 999 + packer.flush()


def tiff(*tags: tuple[int, int, int, int], after: bytes = b"", following: int = 0) -> bytes:
    """Return a little-endian TIFF with one directory; each tag is number, type, count and value."""
    entries = b"".join(struct.pack("<HHII", *tag) for tag in sorted(tags))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", following) + after


GREY_TAGS = [(256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 1)]


def tiff_of_strips(number: int) -> bytes:
    """Return a TIFF whose strips all have the same offset; it has one list of offsets."""
    place = 8 + 2 + 12 * (len(GREY_TAGS) + 3) + 4
    tags = [*GREY_TAGS, (278, 4, 1, 1), (273, 4, number, place), (279, 4, 1, 64)]
    return tiff(*tags, after=struct.pack("<I", 8) * number)


def plain_tiff(*tags: tuple[int, int, int, int], **options: Any) -> bytes:
    """Return a TIFF of eight by eight grey pixels; `tags` replace the usual ones."""
    place = 8 + 2 + 12 * (len(GREY_TAGS) + 3 + sum(tag[0] not in (256, 257, 258, 259, 262, 277) for tag in tags)) + 4
    own = {tag[0]: tag for tag in [*GREY_TAGS, (278, 4, 1, 8), (273, 4, 1, place), (279, 4, 1, 64), *tags]}
    return tiff(*own.values(), after=b"\x80" * 64, **options)


def jpeg_with(*segments: tuple[int, bytes], colour: str = "green") -> bytes:
    """Return a JPEG with more segments at its start; each is a marker's number and its data."""
    data = picture(colour, "JPEG")
    own = b"".join(struct.pack(">BBH", 255, number, len(value) + 2) + value for number, value in segments)
    return data[:2] + own + data[2:]


def exif_jpeg(*tags: tuple[int, int, int, int], following: int = 0) -> bytes:
    return jpeg_with((0xE1, b"Exif\0\0" + tiff(*tags, following=following)))


def jpeg_of_size(width: int, height: int) -> bytes:
    """Return a JPEG whose header has this size."""
    data = picture(kind="JPEG")
    return changed(data, data.index(b"\xff\xc0") + 5, struct.pack(">HH", height, width))


def gif_with(extensions: bytes = b"", frames: int = 1) -> bytes:
    data = picture("green", "GIF")
    start = 13 + 3 * (2 << (data[10] & 7))  # after the palette
    return data[:start] + extensions + data[start:-1] * frames + data[-1:]


def changed(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


def webp(size: tuple[int, int]) -> bytes:
    """Return a lossy WebP whose header has this size."""
    data = picture("green", "WEBP")
    place = data.index(b"\x9d\x01\x2a") + 3
    return changed(data, place, struct.pack("<HH", *size))


def many_texts(kind: bytes, text: str, number: int) -> bytes:
    packed = zlib.compress(text.encode(), 9)
    between = b"\0\0" if kind == b"zTXt" else b"\0\1\0\0\0"
    return png(*[(kind, b"key %d" % n + between + packed) for n in range(number)])


def accepted(make: Callable[[], bytes], label: str = "green", **options: Any) -> Case:
    return body(make, 200, label=label, **options)


REFUSED = 4000
"""Status 400 or 415: Pillow decides whether a file is damaged or unknown."""

PIXELS = "the largest picture that is read by default: 49 megapixels with transparency"
STRIPS = "Pillow makes an object of every strip, with 4 bytes of the file for each"

PICTURES = {
    "60,000 x 60,000 pixels in 100 kB": body(lambda: png(size=(60_000, 60_000), data=gigabyte()[:100_000]), 413),
    "2^31 x 2^31 pixels": body(lambda: png(size=(2**31 - 1, 2**31 - 1)), 413),
    "no pixels": body(lambda: png(size=(0, 0)), REFUSED),
    "no rows": body(lambda: png(size=(8, 0)), REFUSED),
    "BMP without pixels": body(lambda: changed(picture(kind="BMP"), 18, struct.pack("<ii", 0, 0)), REFUSED),
    "BMP of negative height": body(lambda: changed(picture(kind="BMP"), 22, struct.pack("<i", -(2**31))), 413),
    "BMP of 60,000 x 60,000": body(lambda: changed(picture(kind="BMP"), 18, struct.pack("<ii", 60_000, 60_000)), 413),
    "GIF of 65,535 x 65,535": body(lambda: changed(picture(kind="GIF"), 6, b"\xff" * 4), 413),
    "GIF without pixels": accepted(lambda: changed(picture(kind="GIF"), 6, b"\0" * 4), "red"),
    "PPM of 1 MB of remark": body(lambda: b"P6\n#" + b"x" * 1_000_000 + b"\n8 8 255\n" + b"\0" * 192, 400),
    "PPM of a maximum of 0": body(lambda: b"P6 8 8 0\n" + b"\0" * 192, REFUSED),
    "PPM in letters": body(lambda: b"P3 8 8 255\n" + b"x " * 192, REFUSED),
    "header with more rows": accepted(lambda: png(size=(8, 4000))),
    "header with other colours": body(lambda: png(depth=16, colour=6), REFUSED),
    "header with an impossible depth": body(lambda: png(depth=7), REFUSED),
    "header with fewer rows": accepted(lambda: png(size=(8, 4))),
    "16 bits of colour": accepted(
        lambda: png(depth=16, data=zlib.compress((b"\0" + bytes(n for c in COLOURS["green"] for n in (c, 0)) * 8) * 8))
    ),
    "palette without colours": body(lambda: png(colour=3, data=zlib.compress(b"\0" * 72)), REFUSED),
    "palette of half a colour": body(lambda: png((b"PLTE", b"\0"), colour=3, data=zlib.compress(b"\7" * 72)), REFUSED),
    "index beyond the palette": accepted(
        lambda: png((b"PLTE", bytes(COLOURS["green"])), colour=3, data=zlib.compress((b"\0" + b"\xff" * 8) * 8)), "red"
    ),
    "transparency of a wrong length": body(lambda: png((b"tRNS", b"\0")), REFUSED),
    "two headers": body(lambda: png((b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 0, 0, 0, 0))), REFUSED),
    "wrong check sum": body(lambda: png()[:-30] + b"\0\0\0\0" + png()[-26:], REFUSED),
    "chunk of 2 GB": body(lambda: png()[:8] + b"\x7f\xff\xff\xffIHDR" + b"\0" * 100, REFUSED),
    "pixels of 1 GB": accepted(lambda: png(data=gigabyte()), "red"),
    "iCCP of 1 GB": body(lambda: png((b"iCCP", b"p\0\0" + gigabyte())), 400),
    "zTXt of 1 GB": body(lambda: png((b"zTXt", b"k\0\0" + gigabyte())), 400),
    "iTXt of 1 GB": body(lambda: png((b"iTXt", b"k\0\1\0\0\0" + gigabyte())), 400),
    "zTXt of 1 GB after the pixels": body(lambda: png(after=[(b"zTXt", b"k\0\0" + gigabyte())]), REFUSED),
    "EXIF in zTXt of 1 GB": body(lambda: png((b"zTXt", b"Raw profile type exif\0\0" + gigabyte())), 400),
    "60 zTXt of 1 MB": body(lambda: many_texts(b"zTXt", "x" * 1_000_000, 60), 400),
    "60 iTXt of 1 MB and wide letters": body(lambda: many_texts(b"iTXt", "x" * 1_000_000 + "\U0001f600", 60), 400),
    "tEXt of 1 MB": accepted(lambda: png((b"tEXt", b"k\0" + b"x" * 1_000_000))),
    "70,000 chunks": body(lambda: png(*[(b"tEXt", b"k\0")] * 70_000), 400),
    "EXIF that leads to itself": accepted(lambda: exif_jpeg((0x8769, 4, 1, 8), (0x8825, 4, 1, 8), following=8)),
    "EXIF with 2^32 values": accepted(lambda: exif_jpeg((0x0112, 3, 2**32 - 1, 8), (0x010E, 2, 2**32 - 1, 8))),
    "EXIF turned by nonsense": accepted(lambda: exif_jpeg((0x0112, 3, 1, 99))),
    "EXIF with a division by 0": accepted(lambda: exif_jpeg((0x011A, 5, 1, 8))),
    "EXIF with 5,000 tags": accepted(lambda: exif_jpeg(*[(n, 4, 1, 8) for n in range(5000)])),
    "EXIF of noise": accepted(lambda: jpeg_with((0xE1, b"Exif\0\0II*\0" + random.Random(2).randbytes(5000)))),
    "EXIF of PNG in noise": accepted(lambda: png((b"eXIf", random.Random(3).randbytes(5000)))),
    "EXIF in 90,000 pieces": body(lambda: jpeg_with(*[(0xE1, b"Exif\0\0x")] * 90_000), 400),
    "ICC in 255 pieces": accepted(
        lambda: jpeg_with(*[(0xE2, b"ICC_PROFILE\0" + bytes([n, 255]) + b"\0" * 60_000) for n in range(1, 256)]),
        why="15 MB are as large as a request may be",
        cpu_ms=150,
        memory_mb=100,
    ),
    "ICC pieces with a wrong count": accepted(lambda: jpeg_with(*[(0xE2, b"ICC_PROFILE\0\xff\1")] * 1000)),
    "JPEG of 65,500 x 65,500": body(lambda: jpeg_of_size(65_500, 65_500), 413),
    "JPEG without rows": body(lambda: jpeg_of_size(8, 0), REFUSED),
    "JPEG segment without length": body(lambda: b"\xff\xd8\xff\xe0\0\0" + b"\0" * 100, REFUSED),
    "GIF of 5,000 frames": accepted(lambda: gif_with(frames=5000)),
    "GIF of 200,000 remarks": body(lambda: gif_with(b"\x21\xfe\x01x\0" * 200_000), 400),
    "GIF of a remark of 1 MB": accepted(lambda: gif_with(b"\x21\xfe" + (b"\xff" + b"x" * 255) * 4000 + b"\0")),
    "GIF of a wrong code size": body(
        lambda: changed(data := picture("green", "GIF"), data.index(b",\0\0\0\0\x08\0\x08\0") + 10, b"\xff"), REFUSED
    ),
    "TIFF in itself": accepted(lambda: plain_tiff(following=8), "red"),
    "TIFF with 2^32 values in a tag": body(lambda: plain_tiff((273, 4, 2**32 - 1, 8)), REFUSED),
    "TIFF of 60,000 x 60,000": body(lambda: plain_tiff((256, 4, 1, 60_000), (257, 4, 1, 60_000)), 413),
    "TIFF of 2^32 samples": body(lambda: plain_tiff((277, 4, 1, 2**32 - 1)), REFUSED),
    "TIFF of unknown coding": body(lambda: plain_tiff((259, 3, 1, 60_000)), REFUSED),
    "TIFF of unknown colours": body(lambda: plain_tiff((262, 3, 1, 60_000)), REFUSED),
    "TIFF without tags": body(lambda: tiff(), REFUSED),
    "TIFF that begins beyond its end": body(lambda: b"II*\0\xff\xff\xff\x7f" + b"\0" * 100, REFUSED),
    "TIFF of 64 bits that begins beyond its end": body(lambda: b"II+\0\x08\0\0\0" + b"\xff" * 100, REFUSED),
    "TIFF of damaged LZW": body(lambda: plain_tiff((259, 3, 1, 5)), REFUSED),
    "TIFF with tiles of 0 pixels": accepted(
        lambda: plain_tiff((322, 4, 1, 0), (323, 4, 1, 0), (324, 4, 1, 8), (325, 4, 1, 8)), "red"
    ),
    "TIFF of 10,000 strips": accepted(lambda: tiff_of_strips(10_000), "red", cpu_ms=250, why=STRIPS),
    "TIFF of 250,000 strips": body(lambda: tiff_of_strips(250_000), 400, cpu_ms=3000, memory_mb=150, why=STRIPS),
    "WebP of 16,383 x 16,383": body(lambda: webp((16_383, 16_383)), 413),
    "WebP without pixels": body(lambda: webp((0, 0)), REFUSED),
    "WebP of 4,000 x 4,000 in 50 bytes": body(
        lambda: webp((4000, 4000)), REFUSED, cpu_ms=200, memory_mb=150, why=PIXELS
    ),
    "WebP with noise inside": body(
        lambda: changed(picture("green", "WEBP", (64, 64)), 34, random.Random(4).randbytes(40)), REFUSED
    ),
    "WebP of a wrong length": body(lambda: changed(picture("green", "WEBP"), 4, b"\xff" * 4), REFUSED),
    "AVIF with noise inside": body(
        lambda: changed(picture("green", "AVIF", (64, 64)), 200, random.Random(5).randbytes(60)), REFUSED
    ),
    "AVIF of endless boxes": body(lambda: b"\0\0\0\x1cftypavif" + b"\0" * 16 + b"\0\0\0\x08free" * 50_000, REFUSED),
    "49 megapixels": body(lambda: picture(size=(7000, 7000), mode="LA"), 413),
    "24 megapixels": accepted(
        lambda: picture(size=(6000, 4000), mode="LA"), "red", cpu_ms=3000, memory_mb=900, why=PIXELS
    ),
}


QUERIES = {
    name: Case(lambda query=query: [post(GOOD, path=f"/predict?{query}")], (200,), label="green")
    for name, query in {"query of 9,000 parameters": "a=b&" * 9000, "query of nonsense": "%%%&&&===%c0%ae"}.items()
}

CASES = HTTP | FORMS | BODIES | PICTURES | QUERIES


# The server, its answers and its cost.


ESTABLISHED, CLOSE_WAIT = "01", "08"
"""States of a connection in /proc/net/tcp that its server has not closed."""


class Watched(Server):
    """A server whose cost can be measured."""

    def cpu(self) -> float:
        """Return the CPU time of all its threads in milliseconds."""
        files = [file for process in self.processes() for file in Path(f"/proc/{process}/task").glob("*/schedstat")]
        return sum(int(file.read_text().split()[0]) for file in files) / 1e6

    def memory(self, peak: bool) -> float:
        """Return the memory of all its processes in megabytes; the peaks are those since `forget_peaks`."""
        texts = [Path(f"/proc/{process}/status").read_text() for process in self.processes()]
        return sum(int(re.search(r"VmHWM:\s+(\d+)" if peak else r"VmRSS:\s+(\d+)", text)[1]) for text in texts) / 1000

    def forget_peaks(self) -> None:
        for process in self.processes():
            Path(f"/proc/{process}/clear_refs").write_text("5")

    def wait_for_connections(self) -> None:
        """Wait until all its connections have ended: it drops the rest of a refused body."""
        while any(
            row[1].endswith(f":{self.port:04X}") and row[3] in (ESTABLISHED, CLOSE_WAIT)
            for row in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
        ):
            time.sleep(0.002)

    def least(self, cost: float, again: Callable[[], object], most: float) -> float:
        """Return the least cost of several repetitions: other load on the machine only increases it."""
        for _ in range(10):
            if cost >= most:
                before = self.cpu()
                again()
                self.wait_for_connections()
                cost = min(cost, (self.cpu() - before) / slowness())
        return cost

    def exchange(self, case: Case, parts: Parts) -> list[tuple[int | None, Any, dict[str, str]]]:
        """Return status, document and headers of each answer to `parts`."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            for one in parts:
                if case.reads and one is not parts[0] and select.select([connection], [], [], 0)[0]:
                    break
                try:
                    connection.sendall(one)
                except (BrokenPipeError, ConnectionResetError):
                    break
            if case.ends:
                connection.shutdown(socket.SHUT_WR)
            if case.expected == (None,) and not case.ends:
                return [(None, None, {})]
            return [ended(connection) if one is None else answer_of(connection) for one in case.expected]


def ended(connection: socket.socket) -> tuple[None, None, dict[str, str]]:
    """Assert that the connection has ended."""
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    return None, None, {}


def answer_of(connection: socket.socket) -> tuple[int, Any, dict[str, str]]:
    """Return the next answer; it is read to its last byte and no further."""
    text = b""
    while not text.endswith(b"\r\n\r\n"):
        more = connection.recv(1)
        assert more, f"the connection ended without an answer, after {text!r}"
        text += more
    lines = text.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:-2])
    left, data = int(headers["content-length"]), b""
    while len(data) < left:
        more = connection.recv(left - len(data))
        assert more, f"the answer ended in its body, after {data!r}"
        data += more
    return int(lines[0].split()[1]), json.loads(data), headers


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server all of whose processes have imported the modules that requests need."""
    server = Watched(colour_run(tmp_path_factory.mktemp("run")).path, tmp_path_factory.mktemp("server") / "errors")
    warm = [picture(kind=kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "AVIF")]
    for _ in range(4):
        for data in (*warm, picture("red", "JPEG", (1500, 1500)), b"hello"):
            server.ask("POST", "/predict", data)
            server.ask("POST", "/predict?x", data)  # answered by Flask
            server.ask("POST", "/predict", form_of(data), {"Content-Type": FORM + ";x"})
    yield server
    server.stop(signal.SIGKILL)


def form_of(data: bytes) -> bytes:
    return part(data, FILE) + b"--x--\r\n"


@pytest.fixture(scope="module", autouse=True)
def no_internal_error(server):
    """No request of this file ends a worker, causes a status of 500 or more except for an unknown coding, method or
    version, or causes a line on stderr except for counts of requests that are not logged."""
    processes = server.processes()
    yield
    assert server.processes() == processes
    assert server.stop() == 0
    assert [line for line in server.requests() if line["status"] >= 500 and line["status"] not in (501, 505)] == []
    events = {json.loads(line)["event"] for line in server.errors.read_text().splitlines()}
    assert events <= {"refused requests without a line"}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_hostile_request_is_refused_and_costs_little(server, case):
    """Each answer is JSON, either 4xx with the one key ERROR, or correct; CPU time and memory are within their bounds;
    and the next client gets a correct answer."""
    parts = case.parts()
    server.forget_peaks()
    memory, cpu = server.memory(peak=False), server.cpu()
    answers = server.exchange(case, parts)
    server.wait_for_connections()
    cost, grown = server.cpu() - cpu, server.memory(peak=True) - memory
    cost = server.least(cost, lambda: server.exchange(case, parts), case.cpu_ms)
    assert_good(*server.ask("POST", "/predict", GOOD))

    for (status, document, headers), expected in zip(answers, case.expected, strict=True):
        assert status in ((400, 415) if expected == REFUSED else (expected,))
        if status is None:
            continue
        assert headers["content-type"] == "application/json"
        assert re.fullmatch("[a-z0-9._-]{1,64}", headers["x-request-id"])
        if status == 200:
            assert document["label"] == case.label
        else:
            assert list(document) == ["ERROR"]
            assert re.fullmatch(r"([A-Z]|top_k |images ).{10,900}[.]", document["ERROR"])
    assert cost < case.cpu_ms
    assert grown < case.memory_mb


def assert_good(status: int, document: Any, colour: str = "green") -> None:
    """Assert the correct answer to a picture of one colour, computed independently of the graph."""
    assert (status, document["label"]) == (200, colour)
    found = {one["label"]: one["probability"] for one in document["predictions"]}
    assert found == pytest.approx(dict(zip(COLOURS, probabilities(colour), strict=True)), abs=1e-6)


def test_no_request_of_the_corpus_costs_much(server):
    """Each request of `hostile/requests.tsv` costs little; `test_hostile_requests.py` compares the answers."""
    server.forget_peaks()
    memory, expensive = server.memory(peak=False), {}
    for name, _, recipe in lines("requests.tsv"):
        data, before = bytes_of(recipe), server.cpu()
        exchange(server.port, data)
        server.wait_for_connections()
        cost = server.least(server.cpu() - before, lambda data=data: exchange(server.port, data), CPU_MS)
        expensive |= {name: cost} if cost >= CPU_MS else {}
    assert expensive == {}
    assert server.memory(peak=True) - memory < MEMORY_MB
    assert_good(*server.ask("POST", "/predict", GOOD))


def test_two_hundred_good_requests_at_once_are_answered_rightly(server):
    """Two hundred concurrent pictures, sent as bodies, forms and JSON, get correct answers."""
    colours = [list(COLOURS)[number % 3] for number in range(200)]
    ways: list[Callable[[bytes], bytes]] = [
        post,
        lambda data: post(form_of(data), f"Content-Type: {FORM}"),
        lambda data: post(in_json(data), f"Content-Type: {JSON}"),
    ]
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(50) as threads:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20)) for _ in colours
        ]
        for number, (connection, colour) in enumerate(zip(connections, colours, strict=True)):
            connection.sendall(ways[number // 3 % 3](picture(colour)))
        answers = list(threads.map(answer_of, connections))
    for (status, document, _), colour in zip(answers, colours, strict=True):
        assert_good(status, document, colour)
