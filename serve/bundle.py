"""A bundle is opened: what is used is checked against its digest, and the model against the answers it gave at export.

Nothing is unpickled and nothing is imported that a bundle names, and no file outside its folder is read.
`deeplightning.export.bundle` writes what is read here.
Letters: N samples, C channels, H height, W width, L tokens, K classes or targets.
"""

import base64
import contextlib
import ctypes
import hashlib
import io
import json
import math
import re
from dataclasses import dataclass, field
from io import BufferedReader
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
from PIL import PngImagePlugin

from deeplightning.image_spec import ImageError, ImageSpec, caught_messages
from deeplightning.kinds import KINDS, Kind, row_spec
from deeplightning.runfolder import BUNDLE_FORMAT, Card, RunFolder, card_digest, golden_digest
from deeplightning.words import first_line
from serve.device import CPU, Device, DeviceError
from serve.log import leave_out, log_event
from serve.private import onnxruntime
from serve.session import TEXT_TOKENS, Bound, bound_to, open_session, tensorrt_options

if TYPE_CHECKING:  # a server of pictures does without
    from deeplightning.array_spec import ArraySpec
    from deeplightning.table_spec import TableSpec
    from deeplightning.text_spec import TextSpec

TOLERANCES = {"fp32": 1e-4, "int8": 0.05, "fp16": 0.02}
"""How far an answer to a golden sample may be from that at export, possibly on another machine, by precision, as a
share of the largest answer, or of 1 where that is more. Where a machine rounds a sum otherwise before it becomes int8,
a probability may move by hundredths; where sums overflow, by more. fp16 has no answers of its own in a bundle: it is
compared with those of fp32, on the GPU that it is served by."""

GPU_TOLERANCE = 1e-3
"""The same for fp32 on a GPU, whose kernels add in another order and use quicker exponentials."""

MAX_TOKENIZER_BYTES = 64_000_000
"""The largest known tokenizer.json has 35 MB (November 2026)."""

MOST_EXAMPLES = 8
"""Golden samples that are offered to clients."""

MAX_CARD_BYTES = 32_000_000
"""bundle.json carries samples of 2 MB together, or a single larger one; more than this is none of ours."""

MAX_PIECES = 14_000
"""How often a parser may fetch something of a picture. One of 9 MB needs 420, one of 12,000 tiles 12,000; one of 16 MB
with a remark that is read byte by byte, or in all the segments that fit, took 5 s of CPU (Pillow 13, November 2026)."""

SMALL_BYTES = 65_536
"""Pictures up to here are not counted so: they cannot have many pieces, and counting costs 0.004 ms."""

PngImagePlugin.MAX_TEXT_MEMORY = 2_000_000
"""Letters of all remarks in a PNG, unpacked; Pillow's own 64 million took 240 MB, from a file of 0.06 MB."""


class BundleError(Exception):
    """A bundle is missing, damaged, or of a kind that is not known here; the message is one sentence for people."""

    exit_code = 4


@dataclass(frozen=True)
class Bundle:
    """A model that is loaded, checked and ready; safe to share between threads, and with forked processes.

    Attributes:
        folder: where it was read from.
        task: what it does, one of `deeplightning.kinds.KINDS`.
        image_spec: how a picture is prepared for it; None: it takes something else.
        labels: the names of the K classes or targets, in the order of the answer; none where it answers with pictures.
        run: where it comes from, as `bundle.json` says (`id`, `name`, `folder_name`, `checkpoint`, `created`, …).
        precision: the numbers that its model computes in: "fp32", "int8" or "fp16".
        samples: the golden samples, uint8 (N, C, H, W), int64 (N, L) or float32 (N, …): real ones, to warm up with.
        session: ONNX Runtime with the model, one thread per call.
        text_spec: how a text is prepared for it; None: it takes something else.
        row_spec: how a row of a table, or an array, is prepared for it; None: it takes something else.
        output: what the card says of the answers: the interval of a regression, or each label's threshold.
        examples: some of the golden samples as clients send them, of JSON types; a picture is a PNG as base64.
        input: the name of the model's input.
        device: where it computes.
        bound: the session with its buffers; None on the CPU, which reads a batch where it is.
    """

    folder: Path
    task: str
    image_spec: ImageSpec | None
    labels: list[str]
    run: dict[str, object]
    precision: str
    samples: np.ndarray
    session: onnxruntime.InferenceSession
    text_spec: "TextSpec | None" = None
    row_spec: "TableSpec | ArraySpec | None" = None
    output: dict[str, Any] = field(default_factory=dict)
    examples: list[Any] = field(default_factory=list)
    input: str = "images"
    device: Device = CPU
    bound: Bound | None = None

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        precision: str = "fp32",
        device: Device = CPU,
        max_batch: int = 16,
        tensorrt: bool = False,
    ) -> Self:
        """Read the bundle in `path` (a bundle, a run folder or an MLflow model), and replay its golden samples on
        `device`.

        Args:
            path: a folder.
            precision: which of the bundle's models is taken.
            device: where it computes. CUDA does not survive a fork, so a process that opens a bundle on a GPU serves it
                itself.
            max_batch: the largest batch, for the buffers of a GPU.
            tensorrt: whether TensorRT compiles the model for the GPU.

        Raises:
            BundleError: it is missing, incomplete, changed since its export, unknown, or answers otherwise than it did.
            DeviceError: the GPU cannot be used.
        """
        try:
            folder = _find(Path(path).expanduser().absolute())
        except (OSError, RuntimeError, ValueError) as error:  # a user's home that is unknown, a name that cannot be
            raise BundleError(f"There is no folder {str(path)!r:.200} ({first_line(error)}).") from error
        card = _read_card(folder)
        task, labels, run, output = card["task"], card["labels"], card["run"], card.get("output", {})
        _expect(
            isinstance(task, str) and task in KINDS, f"is for the task {task!r:.80}; known: {', '.join(KINDS)}", folder
        )
        kind = KINDS[task]
        _expect(
            _are_names(labels) if kind.has_labels else labels == [],
            "has labels that are not what its task needs: a list of different texts, and none for pictures",
            folder,
        )
        _expect(_are_details(output, len(labels), kind), "describes its answers wrongly", folder)
        _expect(_is_origin(run), "does not say in words which run it comes from", folder)
        _check_files(folder, card["files"], precision)
        spec = _spec(folder, card, kind)
        dtype, shape = _DTYPES[kind.takes], _shape(spec, kind)
        options = None
        if tensorrt and kind.takes != "text":
            options = tensorrt_options(kind.input, shape, max_batch, precision == "fp16")
        session = _load(folder, precision, kind, dtype, shape, len(labels), device, options)
        samples, examples = _input(folder, card["golden"], kind, spec)
        specs = {f"{_SPECS[kind.takes]}_spec": spec}
        bundle = cls(
            folder,
            task,
            specs.pop("image_spec", None),
            labels,
            run,
            precision,
            samples,
            session,
            output=output,
            examples=examples[:MOST_EXAMPLES],
            input=kind.input,
            device=device,
            bound=_bound(device, session, shape, dtype, max_batch),
            **specs,
        )
        _replay(bundle, card["golden"])
        _prove(folder, card)
        _return_memory()
        return bundle

    @property
    def example(self) -> Any:
        """An input as a client sends it; only of rows and arrays."""
        return self.examples[0] if self.row_spec is not None else None

    @classmethod
    def open_on(cls, device: Device, path: str | PathLike[str], precision: str, max_batch: int, tensorrt: bool) -> Self:
        """The same, with what is for GPUs left out on the CPU. `auto` may have fallen back to it, where 16 bits are
        slower than 32."""
        precision = "fp32" if precision == "fp16" and not device.on_gpu else precision
        return cls.open(path, precision, device, max_batch, tensorrt and device.on_gpu)

    def predict(self, images: np.ndarray) -> np.ndarray:
        """What the model answers to prepared images, uint8 (N, C, H, W), texts, int64 (N, L), or rows and arrays,
        float32 (N, …): probabilities or numbers, float32 (N, K); of each pixel, (N, K, H, W); or pictures, float32
        (N, C, H, W) from 0 to 1."""
        if self.bound is not None:
            return self.bound.predict(images)
        rows: np.ndarray = self.session.run([KINDS[self.task].output], {self.input: images})[0]
        return rows

    def prepare(self, data: bytes, max_pixels: int, max_side: int | None = None) -> np.ndarray:
        """One encoded picture as the model wants it, uint8 (C, H, W).

        Raises:
            deeplightning.image_spec.ImageError: it is not a picture, damaged, or larger than it may be.
        """
        assert self.image_spec is not None, "it takes pictures"
        return prepared(self.image_spec, data, max_pixels, max_side)


def prepared(spec: ImageSpec, data: bytes, max_pixels: int, max_side: int | None = None) -> np.ndarray:
    """One encoded picture that a client sent, uint8 (C, H, W).

    Raises:
        deeplightning.image_spec.ImageError: it is not a picture, damaged, too large, or has more than `MAX_PIECES`.
    """
    source = data if len(data) <= SMALL_BYTES else _Pieces(data)
    try:
        return np.ascontiguousarray(spec.decode(source, max_pixels, max_side).transpose(2, 0, 1))
    finally:
        if number := caught_messages():
            leave_out(number)


class _Pieces(io.BytesIO):
    """A picture that can be read `MAX_PIECES` times."""

    def __init__(self, data: bytes):
        super().__init__(data)
        self._left = MAX_PIECES

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ImageError("The image has too many pieces, tiles or remarks; save it again.", 400)
        return super().read(size)


_NAMES = RunFolder(".")  # only the names of its files are used: a bundle may have been copied to anywhere
_MODELS = {
    "fp32": _NAMES.bundle_model.name,
    "int8": _NAMES.bundle_int8.name,
    "fp16": _NAMES.bundle_fp16.name,
}
_FOR_OTHERS = {_NAMES.bundle_torchscript.name, _NAMES.bundle_pt2.name}  # no server opens them
_DTYPES: dict[str, type] = {"image": np.uint8, "text": np.int64, "table": np.float32, "array": np.float32}
_SPECS = {"image": "image", "text": "text", "table": "row", "array": "row"}
_TEXT_FILES = ("vocabulary.txt", "tokenizer.json")
_KEYS = {"format", "task", "input", "labels", "files", "run", "golden", "digest"}
_ORIGIN = {"id", "name", "folder_name", "checkpoint", "weights", "picture_size", "created", "versions"}
_FILE = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_AGAIN = "write it again with `deeplightning export RUN`"


def _expect(holds: bool, fault: str, folder: Path) -> None:
    if not holds:
        raise BundleError(f"The bundle {folder} {fault}.")


def places(path: Path) -> tuple[Path, ...]:
    """Where a bundle may be: in `path` itself, in the run folder `path`, or in the MLflow model `path`."""
    return path, RunFolder(path).bundle, path / "artifacts" / RunFolder(path).bundle.name


def _find(path: Path) -> Path:
    for folder in places(path):
        if (folder / _NAMES.bundle_card.name).is_file():
            return folder
    if not path.is_dir():
        raise BundleError(f"There is no folder {path}; give a run folder (the path a training ends with) or a bundle.")
    raise BundleError(
        f"There is no bundle in {path} ({_NAMES.bundle_card.name} is missing); `deeplightning export RUN` writes one."
    )


def _read_card(folder: Path) -> Card:
    """What bundle.json says, all of it as it was written at export; which values make sense is not looked at."""
    file = folder / _NAMES.bundle_card.name
    try:
        with _opened(folder, file.name) as stream:
            text = stream.read(MAX_CARD_BYTES + 1)
        _expect(len(text) <= MAX_CARD_BYTES, f"has a {file.name} of more than {MAX_CARD_BYTES:,} bytes", folder)
        card: dict[str, object] = json.loads(text)
        _expect(isinstance(card, dict), f"has no JSON object in {file.name}; {_AGAIN}", folder)
        found = card.get("format")
        _expect(
            found == BUNDLE_FORMAT, f"has format {found!r:.40}; this server reads {BUNDLE_FORMAT}: {_AGAIN}", folder
        )
        sealed = card_digest(card)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file} is not JSON ({error}); {_AGAIN}.") from error
    _expect(card.get("digest") == sealed, f"is damaged: {file.name} was changed since its export; {_AGAIN}", folder)
    keys = set(card) - {"int8", "output"}
    _expect(keys == _KEYS, f"has other keys in {file.name} than it may ({', '.join(sorted(keys ^ _KEYS))})", folder)
    figures = card.get("int8", {})
    _expect(
        isinstance(figures, dict) and all(isinstance(value, int | float) for value in figures.values()),
        "has figures of int8 that are no numbers",
        folder,
    )
    return cast("Card", card)


def _are_names(labels: object) -> bool:
    return (
        isinstance(labels, list)
        and bool(labels)
        and all(isinstance(label, str) for label in labels)
        and len(set(labels)) == len(labels)
    )


def _are_details(output: object, targets: int, kind: Kind) -> bool:
    """Whether a card says of its answers what their kind may have: the interval of a regression; each label's
    threshold."""
    if kind.gives == "multilabel":
        return (
            isinstance(output, dict)
            and output.keys() == {"thresholds"}
            and isinstance(output["thresholds"], list)
            and len(output["thresholds"]) == targets
            and all(_is_number(number) and 0 <= number <= 1 for number in output["thresholds"])
        )
    if output == {}:
        return True
    if not isinstance(output, dict) or output.keys() != {"interval", "half_widths"}:
        return False
    numbers = output["half_widths"]
    return (
        isinstance(numbers, list)
        and len(numbers) == targets
        and all(_is_number(number) and number >= 0 for number in numbers)
        and _is_number(output["interval"])
        and 0 < output["interval"] < 1
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_origin(run: object) -> bool:
    """Whether `run` is a few texts by name; `versions` may be several."""
    if not isinstance(run, dict) or not run.keys() <= _ORIGIN:
        return False
    versions = run.get("versions", {})
    texts = [value for key, value in run.items() if key != "versions"]
    return isinstance(versions, dict) and all(
        text is None or isinstance(text, str) for text in [*texts, *versions.values()]
    )


def _check_files(folder: Path, digests: object, precision: str) -> None:
    """Every file that is needed is here, in the folder itself, and is what was exported. The model of another precision
    is not needed, nor one in a format of torch."""
    listed = digests if isinstance(digests, dict) else {}
    needed = {_NAMES.bundle_model.name, _NAMES.bundle_weights.name}
    _expect(needed <= set(listed), f"does not list the digests of {' and '.join(sorted(needed))}", folder)
    model = _MODELS[precision]
    _expect(
        model in listed,
        f"has no {model}: with serve.precision {precision} in the run's config, `deeplightning serve RUN` writes it; "
        "--precision fp32 does without",
        folder,
    )
    for name, digest in listed.items():
        _expect(bool(_FILE.fullmatch(name)), f"lists {name!r:.80}, which is no file name", folder)
        if name in _FOR_OTHERS or (name in _MODELS.values() and name != model):
            continue
        with _opened(folder, name) as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        _expect(found == digest, f"is damaged: {name} is not the file that was exported (its SHA-256 differs)", folder)


def _opened(folder: Path, name: str) -> BufferedReader:
    """A file of the bundle, for reading: a real one, and not a link to somewhere else."""
    try:
        file = (folder / name).resolve()
        _expect(file.is_relative_to(folder.resolve()), f"has in {name} a link out of its folder", folder)
        _expect(file.is_file() or not file.exists(), f"has in {name} something that is no file", folder)
        return file.open("rb")
    except (OSError, RuntimeError) as error:  # Python 3.11 raises the latter for links that lead to each other
        reason = getattr(error, "strerror", None) or first_line(error)
        raise BundleError(f"The bundle {folder} has no readable {name} ({reason}).") from error


def _text_spec(folder: Path, card: Card) -> "TextSpec":
    """How texts are prepared, by a file of the bundle that is as it was exported."""
    from deeplightning.text_spec import TextSpec

    values = card["input"]
    name = values.get("file") if isinstance(values, dict) else None
    _expect(
        name in _TEXT_FILES and name in card["files"],
        f"does not say which of its files has the tokens ({' or '.join(_TEXT_FILES)})",
        folder,
    )
    try:
        with _opened(folder, str(name)) as stream:
            content = stream.read(MAX_TOKENIZER_BYTES + 1)
        _expect(len(content) <= MAX_TOKENIZER_BYTES, f"has a {name} of more than {MAX_TOKENIZER_BYTES:,} bytes", folder)
        return TextSpec.from_dict(values, content.decode())
    except ImportError as error:
        raise BundleError(
            f"The bundle {folder} has a tokenizer of Hugging Face's, which needs a package that is not installed here "
            f"({error}): pip install tokenizers"
        ) from error
    except ValueError as error:
        raise BundleError(f"The bundle {folder} describes its input wrongly: {error}.") from error


def _text_samples(folder: Path, golden: object, spec: "TextSpec") -> np.ndarray:
    """The golden samples, int64 (N, L), prepared as any text is."""
    texts = golden.get("texts") if isinstance(golden, dict) else None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise BundleError(f"The bundle {folder} has no golden samples.")
    try:
        return spec.stack([spec.prepare(text) for text in texts])
    except ValueError as error:
        raise BundleError(f"A golden sample of the bundle {folder} is damaged ({error}).") from error


def _spec(folder: Path, card: Card, kind: Kind) -> Any:
    """How inputs are prepared."""
    if kind.takes == "text":
        return _text_spec(folder, card)
    try:
        return ImageSpec.from_dict(card["input"]) if kind.takes == "image" else row_spec(kind.takes, card["input"])
    except ValueError as error:
        raise BundleError(f"The bundle {folder} describes its input wrongly: {error}.") from error


def _shape(spec: Any, kind: Kind) -> tuple[int, ...]:
    """Of one prepared input; of a text the most that the buffers of a GPU have room for."""
    if kind.takes == "text":
        return (spec.limit or TEXT_TOKENS,)
    return (spec.channels, spec.height, spec.width) if kind.takes == "image" else spec.shape


def _input(folder: Path, golden: Any, kind: Kind, spec: Any) -> tuple[np.ndarray, list[Any]]:
    """The golden samples as the model takes them, and as clients send them."""
    if kind.takes == "image":
        return _samples(folder, golden, spec), golden["pictures"]
    if kind.takes == "text":
        return _text_samples(folder, golden, spec), golden["texts"]
    return _row_samples(folder, golden, spec, kind)


def _row_samples(
    folder: Path, golden: object, spec: "TableSpec | ArraySpec", kind: Kind
) -> tuple[np.ndarray, list[Any]]:
    """The golden samples, float32 (N, …), prepared as any are, and as clients send them."""
    given = golden.get("rows" if kind.takes == "table" else "arrays") if isinstance(golden, dict) else None
    if not isinstance(given, list) or not given:
        raise BundleError(f"The bundle {folder} has no golden samples.")
    try:
        if kind.takes == "table":
            if not all(isinstance(row, dict) for row in given):
                raise ValueError("a row is no object")
            return spec.stack([spec.prepare(row) for row in given]), given
        from deeplightning.array_spec import read_npy

        arrays: list[Any] = [read_npy(base64.b64decode(one, validate=True)) for one in given]
        return spec.stack([spec.prepare(array) for array in arrays]), [
            array.tolist() for array in arrays[:MOST_EXAMPLES]
        ]
    except (TypeError, ValueError) as error:  # binascii.Error is of the latter kind
        raise BundleError(f"A golden sample of the bundle {folder} is damaged ({error}).") from error


def _load(
    folder: Path,
    precision: str,
    kind: Kind,
    dtype: type,
    shape: tuple[int, ...],
    num_labels: int,
    device: Device,
    tensorrt: dict[str, str] | None = None,
) -> onnxruntime.InferenceSession:
    """The model, which ONNX Runtime keeps from reading files outside its own folder; of inputs of a dtype and shape."""
    try:
        session = open_session(folder / _MODELS[precision], device, tensorrt)
    except DeviceError:
        raise
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        raise BundleError(
            f"ONNX Runtime does not take the model of the bundle {folder}: {first_line(error)}"
        ) from error
    inputs = [(node.name, node.type, node.shape[1:]) for node in session.get_inputs()]
    outputs = [(node.name, node.type, node.shape[1:]) for node in session.get_outputs()]
    sides: list[int | str] = ["length"] if kind.takes == "text" else list(shape)
    wanted = [(kind.input, f"tensor({_TYPES[np.dtype(dtype).name]})", sides)]
    _expect(inputs == wanted, f"has a model with the inputs {inputs}; bundle.json says {wanted}", folder)
    _expect(
        [output[:2] for output in outputs] == [(kind.output, "tensor(float)")],
        f"has a model with the outputs {outputs}, not just float {kind.output}",
        folder,
    )
    found = outputs[0][2]
    if kind.has_labels:
        wanted_answer = list(kind.answer(num_labels, shape))
        _expect(found == wanted_answer, f"has {num_labels} labels, and its model gives {found} {kind.output}", folder)
    else:
        _expect(found == sides, f"has a model that gives pictures of {found}, not of {sides}", folder)
    return session


_TYPES = {"uint8": "uint8", "int64": "int64", "float32": "float"}
"""What ONNX calls a dtype of numpy's."""


def _bound(
    device: Device, session: onnxruntime.InferenceSession, shape: tuple[int, ...], dtype: type, max_batch: int
) -> Bound | None:
    """The model of a GPU with buffers for `max_batch` inputs of a shape and dtype; None on the CPU."""
    if not device.on_gpu:
        return None
    row = math.prod(session.get_outputs()[0].shape[1:])
    item = math.prod(shape) * np.dtype(dtype).itemsize
    return bound_to(device, session, max_batch * item, max_batch * row * np.dtype(np.float32).itemsize)


def _samples(folder: Path, golden: object, spec: ImageSpec) -> np.ndarray:
    """The golden samples, uint8 (N, C, H, W), decoded as any picture is."""
    pictures = golden.get("pictures") if isinstance(golden, dict) else None
    if not isinstance(pictures, list) or not pictures:
        raise BundleError(f"The bundle {folder} has no golden samples.")
    samples = []
    for number, png in enumerate(pictures):
        try:
            samples.append(prepared(spec, base64.b64decode(png, validate=True), spec.height * spec.width))
        except (TypeError, ValueError) as error:  # ImageError and binascii.Error are of the latter kind
            raise BundleError(f"Golden sample {number} of the bundle {folder} is damaged ({error}).") from error
    return np.stack(samples)


def _replay(bundle: Bundle, golden: dict[str, Any]) -> None:
    """The golden samples get the answers they got at export: decoding, model, runtime and device are as they were, or
    as near as `TOLERANCES` allows."""
    known = "fp32" if bundle.precision == "fp16" else bundle.precision
    given = KINDS[bundle.task].compared(_answers(bundle))
    _expect(
        isinstance(given, np.ndarray) and given.ndim > 1 and len(given) == len(bundle.samples),
        f"answers {len(bundle.samples)} golden samples with {getattr(given, 'shape', type(given).__name__)}",
        bundle.folder,
    )
    try:
        wanted = np.frombuffer(base64.b64decode(golden[known], validate=True), "<f4").reshape(given.shape)
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"The golden answers of the bundle {bundle.folder} are damaged ({error}).") from error
    differences = np.abs(given - wanted).max(axis=tuple(range(1, given.ndim)))  # (N,)
    worst, allowed = int(differences.argmax()), TOLERANCES[bundle.precision]  # argmax finds a nan first
    if bundle.device.on_gpu:
        allowed = max(allowed, GPU_TOLERANCE)
    allowed *= max(1.0, float(np.abs(given).max()))
    remedy = "serve it with serve.precision=fp32" if bundle.precision == "fp16" else _AGAIN
    _expect(
        bool(differences[worst] <= allowed),
        f"answers golden sample {worst} otherwise than when it was exported: {KINDS[bundle.task].output} differ by "
        f"{differences[worst]:.3g}, allowed are {allowed:g}; {remedy}",
        bundle.folder,
    )


def _answers(bundle: Bundle) -> np.ndarray:
    """To all golden samples; one by one where a GPU has no memory for them together."""
    try:
        try:
            return bundle.predict(bundle.samples)
        except MemoryError:
            return np.concatenate([bundle.predict(sample[None]) for sample in bundle.samples])
    except MemoryError as error:
        raise DeviceError(
            f"{bundle.device} ({bundle.device.name}) has too little memory for the bundle {bundle.folder}: "
            f"{bundle.device.free / 1e9:.1f} GB were free at the start ({first_line(error)}); end what else uses it, "
            "or use serve.device=cpu"
        ) from error
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        raise BundleError(
            f"The model of the bundle {bundle.folder} does not answer its golden samples: {first_line(error)}; "
            f"{_AGAIN}."
        ) from error


def _prove(folder: Path, card: Card) -> None:
    """The golden answers are of this model with these labels, task and input; a bundle of before does not say."""
    found = card["golden"].get("digest")
    if found is None:
        log_event(
            "the bundle was made before its labels, task and input were covered by the golden answers' digest; whether "
            "they were changed since is not known",
            bundle=str(folder),
            remedy=_AGAIN,
        )
        return
    _expect(
        found == golden_digest(card),
        f"has other labels, another task, input, origin or model than its golden answers were given with; {_AGAIN}",
        folder,
    )


def _return_memory() -> None:
    """Have glibc give back what the model was made from: of a resnet18 95 of 141 MB (ONNX Runtime 1.31, November 2026),
    which forked workers would carry along."""
    with contextlib.suppress(AttributeError, OSError):  # other systems, other allocators
        ctypes.CDLL(None).malloc_trim(0)
