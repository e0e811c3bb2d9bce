"""`ImageSpec` turns any kind of picture into the same uint8 array, and a bad one into an error with a status."""

import contextlib
import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
from PIL import Image

from deeplightning.image_spec import FORMATS, ImageError, ImageSpec, shown_size

RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)  # every grey value once


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, 256, (height, width, channels), dtype=np.uint8)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
@pytest.mark.parametrize("resize", ["stretch", "crop", "pad"])
def test_right_size_and_mode_pass_untouched(mode, channels, resize):
    """A picture that has the required size and mode is not changed by a single bit."""
    pixels = noise(9, 7, channels)
    spec = ImageSpec(9, 7, mode, resize)
    decoded = spec.decode(encode(Image.fromarray(pixels.squeeze())))
    assert (decoded.dtype, decoded.shape) == (np.uint8, (9, 7, channels))
    assert decoded.flags.writeable
    assert decoded.flags.c_contiguous
    np.testing.assert_array_equal(pixels, decoded)
    np.testing.assert_array_equal(pixels, spec.from_array(pixels))


def test_sources(tmp_path):
    """Bytes, a path and an open file give the same picture; the file may be at any position and stays open."""
    encoded = encode(Image.fromarray(RAMP))
    path = tmp_path / "an image.png"
    path.write_bytes(encoded)
    spec = ImageSpec(16, 16, "L")
    with path.open("rb") as file:
        file.read(5)
        results = [spec.decode(source) for source in (encoded, memoryview(encoded), path, str(path), file)]
        assert not file.closed
    for result in results:
        np.testing.assert_array_equal(RAMP, result[:, :, 0])
    with pytest.raises(FileNotFoundError):  # the caller's mistake, not the picture's
        spec.decode(tmp_path / "none.png")


def grey16() -> np.ndarray:
    """Return the ramp in 16 bits: v·257 has the brightness of the 8-bit value v."""
    return RAMP.astype(np.uint16) * 257


@pytest.mark.parametrize(
    "encoded",
    [
        encode(Image.fromarray(RAMP)),
        encode(Image.fromarray(grey16())),
        encode(Image.fromarray(grey16()), "TIFF"),
        encode(Image.fromarray(grey16().astype(np.int32)), "TIFF"),
        encode(Image.fromarray(grey16().astype(np.float32)), "TIFF"),
        encode(Image.fromarray(RAMP.astype(np.float32)), "TIFF"),
        encode(Image.fromarray((RAMP / 255).astype(np.float32)), "TIFF"),
        b"P5 16 16 65535\n" + grey16().astype(">u2").tobytes(),
        encode(Image.fromarray(RAMP).convert("RGB")),
        encode(Image.fromarray(RAMP).convert("P")),
        encode(Image.merge("LA", [Image.fromarray(RAMP), Image.new("L", (16, 16), 255)])),
        encode(Image.fromarray(RAMP).convert("RGBA"), "WEBP", lossless=True),
        encode(Image.fromarray(RAMP), "GIF"),
        encode(Image.fromarray(RAMP), "BMP"),
        encode(Image.fromarray(RAMP), "TIFF", compression="tiff_lzw"),
    ],
    ids=["L", "16", "16tiff", "I", "F65535", "F255", "F1", "ppm16", "RGB", "P", "LA", "webp", "gif", "bmp", "lzw"],
)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_every_kind_of_grey_keeps_its_brightness(encoded, mode):
    """A grey ramp gives the same array in any format, depth and colour mode; 16-bit values are scaled, not clipped."""
    decoded = ImageSpec(16, 16, mode).decode(encoded)
    for channel in range(decoded.shape[2]):
        np.testing.assert_array_equal(RAMP, decoded[:, :, channel])


def test_16_bit_colour_and_grey_agree():
    """A 16-bit grey picture gives the same values as the same picture in 16-bit colour."""
    values = (np.arange(64, dtype=np.uint16) * 1021).reshape(8, 8)
    rows = b"".join(b"\0" + np.repeat(row[:, None], 3, 1).astype(">u2").tobytes() for row in values)
    colour = png(8, 8, rows, depth=16, colour=2)
    spec = ImageSpec(8, 8, "RGB")
    np.testing.assert_array_equal(spec.decode(colour), spec.decode(encode(Image.fromarray(values))))


@pytest.mark.parametrize(
    "samples", [np.full((4, 4), 70000, np.int32), np.full((4, 4), -1, np.int32), np.full((4, 4), np.nan, np.float32)]
)
def test_samples_without_a_known_range_are_refused(samples):
    """Grey values outside 16 bits, or NaN, are an error that has their range."""
    with pytest.raises(ImageError, match="grey values run from") as error:
        ImageSpec(4, 4, "L").decode(encode(Image.fromarray(samples), "TIFF"))
    assert error.value.status == 415


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P", "tRNS"])
def test_transparent_is_white(kind):
    """Transparent pixels become white, half transparent ones half white, and opaque ones do not change."""
    if kind == "P":
        image, options = Image.fromarray(np.array([[3, 7]], np.uint8)).convert("P"), {"transparency": 3}
        image.putpalette([0] * 768)
    elif kind == "tRNS":
        image, options = Image.fromarray(np.array([[5, 0]], np.uint8)), {"transparency": 5}
    else:
        image, options = Image.new(kind, (2, 1)), {}  # black
        image.putalpha(Image.fromarray(np.array([[0, 255]], np.uint8)))
    np.testing.assert_array_equal([[[255], [0]]], ImageSpec(1, 2, "L").decode(encode(image, **options)))
    half = Image.merge("LA", [Image.new("L", (1, 1), 0), Image.new("L", (1, 1), 128)])
    np.testing.assert_array_equal([[[127]]], ImageSpec(1, 1, "L").decode(encode(half)))


def test_cmyk():
    """A CMYK picture is not inverted: no ink is white, and cyan is not red."""
    image = Image.new("CMYK", (16, 16), (0, 0, 0, 0))
    image.paste((255, 0, 0, 0), (0, 0, 8, 16))
    decoded = ImageSpec(16, 16).decode(encode(image, "JPEG", quality=95))
    np.testing.assert_allclose(decoded[0, 0], [0, 255, 255], atol=6)
    np.testing.assert_allclose(decoded[0, -1], [255, 255, 255], atol=6)


@pytest.mark.parametrize(
    ("kind", "orientation"),
    [*(("JPEG", number) for number in range(1, 9)), ("PNG", 6), ("WEBP", 6), ("TIFF", 6), ("AVIF", 6)],
)
def test_exif_turns_upright(kind, orientation):
    """The orientation of the EXIF data is applied once, in each format that can have it."""
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16], upright[8:, :16], upright[8:, 16:] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    stored = {  # what the sensor recorded
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    encoded = encode(Image.fromarray(np.ascontiguousarray(stored)), kind, exif=exif, **options)
    decoded = ImageSpec(16, 32).decode(encoded)
    for row, column in ((3, 6), (12, 6), (12, 26), (3, 26)):
        np.testing.assert_allclose(decoded[row, column], upright[row, column], atol=40)


PHOTOS = Path(sklearn.datasets.__file__).parent / "images"


def photo(name: str, size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    with Image.open(PHOTOS / f"{name}.jpg") as image:
        return image.resize(size, Image.Resampling.BICUBIC).convert(mode)


def full(spec: ImageSpec, encoded: bytes) -> np.ndarray:
    """Return the result of a JPEG whose pixels are all decoded before they are scaled."""
    with Image.open(io.BytesIO(encoded)) as image:
        return spec.from_array(np.asarray(image.convert("RGB"))).astype(int)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize(
    "spec",
    [
        ImageSpec(64, 64),
        ImageSpec(28, 28, "L"),
        ImageSpec(96, 64),
        ImageSpec(48, 64, "RGB", "crop"),
        ImageSpec(64, 64, "RGB", "pad"),
    ],
    ids=["stretch", "grey", "tall", "crop", "pad"],
)
def test_large_photos_are_read_at_less_than_their_size(mode, spec):
    """libjpeg scales a photo by 2, 4 or 8 if at least twice the result's size remains, without a visible difference or
    a shift."""
    for name, size in (("china", (640, 427)), ("flower", (963, 1283))):
        encoded = encode(photo(name, size, mode), "JPEG", quality=90)
        difference = np.abs(spec.decode(encoded) - full(spec, encoded))
        assert difference.mean() < 0.5
        assert difference.max() <= 12


def test_photos_below_four_times_the_result_are_read_whole():
    """If less than twice the result's size would remain after halving, every pixel is decoded."""
    spec = ImageSpec(64, 64)
    encoded = encode(photo("china", (255, 400)), "JPEG", quality=90)
    np.testing.assert_array_equal(spec.decode(encoded), full(spec, encoded))
    at_the_edge = encode(photo("china", (256, 400)), "JPEG", quality=90)
    assert (spec.decode(at_the_edge) != full(spec, at_the_edge)).any()


@pytest.mark.parametrize("resize", ["stretch", "crop", "pad"])
@pytest.mark.parametrize(("orientation", "turn"), [(3, 3), (5, 5), (6, 2)])  # from upright to what the sensor recorded
def test_exif_turns_large_photos(resize, orientation, turn):
    """A photo that is scaled and turned gives the same result as one that was saved upright."""
    upright = photo("china", (803, 535))
    stored = upright.transpose(Image.Transpose(turn))
    exif = Image.Exif()
    exif[0x0112] = orientation
    spec = ImageSpec(60, 90, "RGB", resize)
    decoded = spec.decode(encode(stored, "JPEG", quality=95, subsampling=0, exif=exif)).astype(int)
    difference = np.abs(decoded - spec.from_array(np.asarray(upright)))
    assert difference.mean() < 1.5
    assert difference.max() <= 24


def test_a_photo_of_a_phone_with_a_second_picture_inside():
    """The first picture of a multi-picture JPEG (MPO) is read, and scaled like any other."""
    first, second = photo("china", (640, 480)), photo("flower", (640, 480))
    encoded = encode(first, "MPO", save_all=True, append_images=[second], quality=95)
    difference = np.abs(ImageSpec(64, 64).decode(encoded) - ImageSpec(64, 64).from_array(np.asarray(first)).astype(int))
    assert difference.mean() < 1.5


def test_a_large_photo_is_limited_and_must_be_whole():
    """The limit of pixels applies to the size in the header, even if fewer are decoded; a truncated photo is
    refused."""
    encoded = encode(photo("china", (1280, 960)), "JPEG", quality=90)
    with pytest.raises(ImageError, match="1280 x 960 = 1,228,800 pixels; at most 1,228,799"):
        ImageSpec(64, 64).decode(encoded, max_pixels=1_228_799)
    assert ImageSpec(64, 64).decode(encoded, max_pixels=1_228_800).shape == (64, 64, 3)  # the limit is inclusive
    with pytest.raises(ImageError, match="damaged or cut off") as error:
        ImageSpec(64, 64).decode(encoded[: len(encoded) // 2])
    assert error.value.status == 400


def test_damaged_exif_does_not_matter():
    """A damaged EXIF block is ignored without a message, also by `shown_size`."""
    exif = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12" * 40
    decoded = ImageSpec(8, 8).decode(encode(Image.new("RGB", (8, 8), "red"), "JPEG", exif=exif))
    assert decoded[0, 0, 0] > 240
    data = encode(Image.new("RGB", (8, 4)), "JPEG", exif=b"Exif\0\0rubbish!", dpi=(72, 72))
    with Image.open(io.BytesIO(data)) as image:
        assert shown_size(image) == (8, 4)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation(kind):
    """The first frame of an animation is read."""
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    encoded = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    np.testing.assert_array_equal(ImageSpec(8, 8).decode(encoded), np.full((8, 8, 3), (255, 0, 0)))


def test_stretch_averages():
    """Shrinking weights all pixels by a triangle filter as wide as two pixels of the result, as a reference in NumPy
    does."""
    pixels = noise(64, 48, 1)[:, :, 0]

    def weights(size: int, goal: int) -> np.ndarray:  # (goal, size)
        scale = size / goal
        centres, places = (np.arange(goal) + 0.5) * scale, np.arange(size) + 0.5
        triangles = np.maximum(0, 1 - abs(places - centres[:, None]) / scale)
        return triangles / triangles.sum(1, keepdims=True)

    wanted = weights(64, 8) @ pixels @ weights(48, 12).T
    np.testing.assert_allclose(ImageSpec(8, 12, "L").from_array(pixels)[:, :, 0], wanted, atol=1)


@pytest.mark.parametrize(("height", "width"), [(20, 60), (60, 20), (31, 10)])
def test_crop_keeps_the_centre_and_the_proportions(height, width):
    """The shorter side is scaled to fit, and the longer one is cut equally at both ends."""
    pixels = np.zeros((height, width), np.uint8)
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    pixels[top : top + side, left : left + side] = 255
    assert ImageSpec(10, 10, "L", "crop").from_array(pixels).mean() > 240
    tall = ImageSpec(20, 10, "L", "crop").from_array(noise(30, 40, 1))
    wanted = np.asarray(Image.fromarray(noise(30, 40, 1)[:, :, 0]).resize((10, 20), 2, box=(12.5, 0, 27.5, 30)))
    np.testing.assert_array_equal(wanted, tall[:, :, 0])


def test_pad_keeps_all_and_fills_with_black():
    """The longer side is scaled to fit, and the shorter one is filled with black at both ends."""
    padded = ImageSpec(12, 12, "RGB", "pad").from_array(np.full((10, 30, 3), 200, np.uint8))
    np.testing.assert_array_equal(padded[4:8], np.full((4, 12, 3), 200))
    assert padded[:4].max() == padded[8:].max() == 0


@pytest.mark.parametrize("resize", ["stretch", "crop", "pad"])
@pytest.mark.parametrize("size", [(1, 30000), (30000, 1), (1, 1), (3, 5)])
def test_extreme_shapes(resize, size):
    """A picture of 1 x 30,000 pixels, or of a single one, is prepared like any other."""
    decoded = ImageSpec(24, 17, "L", resize).decode(encode(Image.new("L", size, 99)))
    assert decoded.shape == (24, 17, 1)
    assert decoded.max() == 99


def test_from_array_equals_decode():
    """An array of pixels and a file with the same pixels give the same result."""
    for channels in (1, 2, 3, 4):
        pixels = noise(21, 33, channels).squeeze()
        spec = ImageSpec(8, 8, "RGB", "crop")
        np.testing.assert_array_equal(spec.decode(encode(Image.fromarray(pixels))), spec.from_array(pixels))


@pytest.mark.parametrize(
    "array", [np.zeros((8, 8)), np.zeros((8, 8, 5), np.uint8), np.zeros(8, np.uint8), np.zeros((0, 8), np.uint8)]
)
def test_from_array_refuses(array):
    """An array that cannot be pixels, by its type or shape, is an error."""
    with pytest.raises(ImageError, match="Pixels must"):
        ImageSpec(8, 8).from_array(array)


def png(width: int, height: int, rows: bytes, depth: int = 8, colour: int = 0) -> bytes:
    """Write a PNG without Pillow, which would refuse some of them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


NOISE = Image.fromarray(noise(64, 64))
PHOTO = encode(NOISE, "JPEG")
BAD = {
    "empty": (b"", 400, "empty"),
    "text": (b"hello, I am no image", 415, "not an image"),
    "html": (b"<html><body>404</body></html>", 415, "not an image"),
    "random": (np.random.RandomState(1).bytes(5000), 415, "not an image"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3", 415, "not an image"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "not an image"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n", 415, "not an image"),
    "cut jpeg": (PHOTO[: len(PHOTO) // 2], 400, "damaged or cut off"),
    "cut png": (encode(NOISE)[:4000], 400, "damaged or cut off"),
    "cut webp": (encode(NOISE, "WEBP", lossless=True)[:3000], 400, "damaged or cut off"),
    "cut gif": (encode(NOISE, "GIF")[:1000], 400, "damaged or cut off"),
    "cut bmp": (encode(NOISE, "BMP")[:1000], 400, "damaged or cut off"),
    "cut tiff": (encode(NOISE, "TIFF", compression="tiff_lzw")[:-9], None, "The image|not an image"),
    "jpeg with rubbish": (PHOTO[:700] + bytes(300), 400, "damaged or cut off"),
    "png of no size": (png(0, 8, b""), None, "The image|not an image"),
    "png of rubbish": (png(8, 8, b"\xff" * 5), 400, "damaged or cut off"),
    "large": (png(10_000, 6_000, bytes(10)), 413, "10000 x 6000 = 60,000,000 pixels"),
    "larger": (png(12_000, 12_000, bytes(10)), 413, "144,000,000 pixels"),
    "bomb": (png(60_000, 60_000, bytes(1_000_000)), 413, "too many pixels"),
}


@pytest.mark.parametrize(("encoded", "status", "words"), BAD.values(), ids=BAD.keys())
def test_bad_pictures(encoded, status, words):
    """Any bad file is an error of one sentence with a status; if it is too large, after reading only the header."""
    with pytest.raises(ImageError, match=words) as error:
        ImageSpec(8, 8).decode(encoded)
    assert error.value.status == status or (status is None and error.value.status in (400, 415))
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


def test_any_cut_is_an_image_error():
    """A file that is cut anywhere is an ImageError, or is read if no pixel is missing; no other error occurs."""
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF"):
        encoded = encode(Image.fromarray(noise(8, 8)), kind)
        for length in range(0, len(encoded), max(1, len(encoded) // 40)):
            try:
                assert ImageSpec(4, 4).decode(encoded[:length]).shape == (4, 4, 3)
            except ImageError as error:
                assert error.status in (400, 415)  # noqa: PT017 (both outcomes are right)


def test_any_flipped_byte_is_an_image_error():
    """Damage inside a file raises nothing but ImageError, and no warning."""
    random = np.random.RandomState(3)
    for kind in FORMATS:
        encoded = np.frombuffer(encode(Image.fromarray(noise(8, 8)), kind), np.uint8)
        for _ in range(40):
            damaged = encoded.copy()
            damaged[random.randint(len(encoded), size=3)] = random.randint(256, size=3)
            with contextlib.suppress(ImageError):  # raises any other error of Pillow
                ImageSpec(4, 4).decode(damaged.tobytes(), max_pixels=100_000)


@pytest.mark.parametrize("size", [(40, 2), (2, 40)])
def test_max_side(size):
    """`max_side` limits the longer side, inclusive; without it there is no limit."""
    encoded = encode(Image.new("L", size))
    for limit in (None, 40):
        assert ImageSpec(8, 8).decode(encoded, max_side=limit).shape == (8, 8, 3)
    with pytest.raises(ImageError, match=f"{size[0]} x {size[1]} pixels; a side of at most 39 is accepted") as error:
        ImageSpec(8, 8).decode(encoded, max_side=39)
    assert error.value.status == 413


def test_pillow_stays_silent():
    """Pillow's warnings about size do not reach the user, whatever filters are set; other warnings do."""
    large = png(9_500, 9_500, b"")  # Pillow warns from 89,478,485 pixels on
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ImageError):
            ImageSpec(8, 8).decode(large)
        with pytest.raises(ImageError):
            ImageSpec(8, 8).decode(large, max_pixels=10**9)
        assert caught == []
        warnings.warn("something else", stacklevel=1)
    assert len(caught) == 1


def tiff(tags, compression=1):
    """Return a TIFF of 4 x 4 pixels with this number of tags of an unknown type; if compressed, without pixels."""
    known = {256: 4, 257: 4, 258: 8, 259: compression, 262: 1, 273: 8, 277: 1, 278: 4, 279: 16}
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in known.items()]
    entries += [struct.pack("<HHII", 40_000 + tag, 0, 1, 1) for tag in range(tags)]
    return b"II*\0" + struct.pack("<I", 24) + bytes(16) + struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)


@pytest.mark.parametrize(
    "data",
    [tiff(500, 5), tiff(0, 8), tiff(0).replace(b"\x15\x01\4\0\1\0\0\0\1", b"\x15\x01\4\0\1\0\0\0\xff")],
    ids=["unknown tags", "no data", "many samples"],
)
def test_messages_of_decoders_are_not_written(capfd, data):
    """Messages of libtiff and of Pillow's log do not reach stderr."""
    with contextlib.suppress(ImageError):
        ImageSpec(4, 4).decode(data)
    assert capfd.readouterr().err == ""


def test_spec_travels_as_json():
    """A spec survives a round trip through its dictionary, which has plain types only."""
    spec = ImageSpec(8, 9, "RGB", "pad", (0.1, 0.2, 0.3), (1, 2, 3))
    as_dict = {"height": 8, "width": 9, "mode": "RGB", "resize": "pad", "mean": [0.1, 0.2, 0.3], "std": [1.0, 2.0, 3.0]}
    assert as_dict == spec.to_dict()
    assert spec == ImageSpec.from_dict(as_dict)
    assert {"mean": [0.0], "std": [1.0]}.items() <= ImageSpec(1, 1, "L").to_dict().items()
    assert hash(spec) == hash(ImageSpec.from_dict(as_dict))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"height": 0}, "height must be a whole number"),
        ({"width": 8.0}, "width must be a whole number"),
        ({"mode": "CMYK"}, "mode must be one of L, RGB, not 'CMYK'"),
        ({"resize": "zoom"}, "resize must be one of stretch, crop, pad"),
        ({"mean": [0.5]}, "mean must be 3 finite"),
        ({"mean": [0.5, 0.5, float("nan")]}, "mean must be 3 finite"),
        ({"std": ["a", "b", "c"]}, "std must be 3 finite"),
        ({"std": [1, 1, 0]}, "std must be positive"),
        ({"color": 1}, "exactly the keys .* look at color"),
    ],
)
def test_impossible_specs(change, words):
    """The error names the impossible value; anything but a spec's dictionary is refused."""
    with pytest.raises(ValueError, match=words):
        ImageSpec.from_dict(ImageSpec(8, 8).to_dict() | change)
    for values in (None, {}):
        with pytest.raises(ValueError, match="an image spec"):
            ImageSpec.from_dict(values)
