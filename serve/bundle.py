"""Open a bundle: check its files against their digests, and the model against the answers it gave at export.

Nothing is unpickled, nothing that a bundle names is imported, and no file outside its folder is read.
`deeplightning.export.bundle` writes bundles.
Letters: N samples, C channels, H height, W width, L tokens, K classes or targets.
"""

import base64
import contextlib
import ctypes
import hashlib
import json
import re
from dataclasses import dataclass
from io import BufferedReader
from os import PathLike
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from deeplightning.image_spec import ImageSpec
from deeplightning.kinds import KINDS, Kind, row_spec
from deeplightning.runfolder import BUNDLE_FORMAT, Card, RunFolder, card_digest, golden_digest
from deeplightning.words import InputError, first_line
from serve.answers import DEFAULT_TOP_K
from serve.device import CPU, Device, DeviceError
from serve.model import Model, prepare_picture
from serve.outputs import OUTPUTS
from serve.private import is_out_of_memory, onnxruntime, refused_values
from serve.session import open_session

TOLERANCES = {"fp32": 1e-4, "int8": 0.05, "fp16": 0.02}
"""Maximum difference between the answer to a golden sample and that at export, possibly on another machine, by
precision; relative to the largest answer, or to 1 if that is larger. If a machine rounds a sum differently before it
becomes int8, a probability may change by hundredths; if sums overflow, by more. A bundle has no fp16 answers: the GPU's
are compared with those of fp32."""

GPU_TOLERANCE = 1e-3
"""The same for fp32 on a GPU, whose kernels add in another order and use faster exponentials."""

MAX_TOKENIZER_BYTES = 64_000_000
"""Maximum size of a tokenizer.json; the largest known has 35 MB (November 2026)."""

MAX_EXAMPLES = 8
"""Maximum number of golden samples that clients can see."""

MAX_CARD_BYTES = 32_000_000
"""Maximum size of bundle.json, which contains samples of 2 MB together, or a single larger one."""


class BundleError(Exception):
    """Raised if a bundle is missing, damaged or of an unknown kind; the message is one sentence."""

    exit_code = 4


@dataclass(frozen=True, kw_only=True)
class Bundle(Model):
    """A bundle that is loaded and verified; safe to share between threads and with forked processes. Its samples are
    the golden ones.

    Attributes:
        session: ONNX Runtime session, one thread per call.
    """

    session: onnxruntime.InferenceSession

    @classmethod
    def open(cls, path: str | PathLike[str], precision: str = "fp32", device: Device = CPU) -> Self:
        """Read the bundle in `path` (a bundle, a run folder or an MLflow model), and replay its golden samples on
        `device`.

        Args:
            path: a folder.
            precision: which of the bundle's models to load.
            device: device of the model. CUDA does not survive a fork, so a process that opens a bundle on a GPU must
                serve it itself.

        Raises:
            BundleError: it is missing, incomplete, changed since its export, unknown, or answers differently now.
            DeviceError: the GPU cannot be used.
        """
        try:
            folder = _find_bundle(Path(path).expanduser().absolute())
        except (OSError, RuntimeError, ValueError) as error:  # an unknown home directory, an invalid name
            raise BundleError(f"There is no folder {str(path)!r:.200} ({first_line(error)}).") from error
        card = _read_card(folder)
        task, labels, run, output = card["task"], card["labels"], card["run"], card.get("output", {})
        _expect(
            isinstance(task, str) and task in KINDS, f"is for the task {task!r:.80}; known: {', '.join(KINDS)}", folder
        )
        kind = KINDS[task]
        names = labels if isinstance(labels, list) and all(isinstance(label, str) for label in labels) else []
        _expect(
            0 < len(names) == len(set(names)) if kind.labelled else labels == [],
            "has labels that do not fit its task, which needs a list of different texts, or none for pictures",
            folder,
        )
        _expect(isinstance(run, dict), "does not say which run it comes from", folder)
        _check_files(folder, card["files"], precision)
        spec = _input_spec(folder, card, kind)
        shape: tuple[int, ...] = ()  # the length of a text is free
        if kind.takes != "text":
            shape = (spec.channels, spec.height, spec.width) if kind.takes == "image" else spec.shape
        session = _load_session(folder, precision, kind, shape, len(labels), device)
        samples, examples = _golden_inputs(folder, card["golden"], kind, spec)
        bundle = cls(
            folder=folder,
            task=task,
            spec=spec,
            labels=labels,
            run=run,
            precision=precision,
            samples=samples,
            output=output,
            examples=examples,
            device=device,
            session=session,
        )
        answers = _golden_answers(bundle)
        _check_answers(bundle, card["golden"], answers)
        _check_encoding(bundle, answers[0])
        _expect(
            card["golden"].get("digest") == golden_digest(card),
            f"has other labels, another task, input, origin or model than its golden answers were given with; {_RETRY}",
            folder,
        )
        _return_memory()
        return bundle

    @classmethod
    def open_on(cls, device: Device, path: str | PathLike[str], precision: str) -> Self:
        """Open a bundle. On the CPU, to which `auto` may fall back, load fp32 instead of fp16, which is slower."""
        return cls.open(path, "fp32" if precision == "fp16" and not device.on_gpu else precision, device)

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        kind = KINDS[self.task]
        try:
            rows: np.ndarray = self.session.run([kind.output], {kind.input: inputs})[0]
            return rows
        except Exception as error:  # onnxruntime's exceptions have no common class of their own
            if self.device.on_gpu and is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            if reason := refused_values(error):
                raise InputError(f"The network does not take these values: {reason}.") from error
            raise


_NAMES = RunFolder(".")  # only for the file names: a bundle may have been copied anywhere
_MODEL_FILES = {"fp32": _NAMES.bundle_model.name, "int8": _NAMES.bundle_int8.name, "fp16": _NAMES.bundle_fp16.name}
_DTYPES = {"image": "uint8", "text": "int64", "table": "float", "array": "float"}  # as ONNX names them
_TEXT_FILES = ("vocabulary.txt", "tokenizer.json")
_CARD_KEYS = {"format", "task", "input", "labels", "files", "run", "golden", "digest"}
_FILE_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_RETRY = "write it again with `deeplightning export RUN`"


def _expect(condition: bool, fault: str, folder: Path) -> None:
    if not condition:
        raise BundleError(f"The bundle {folder} {fault}.")


def bundle_folders(path: Path) -> tuple[Path, ...]:
    """Return the folders in which a bundle may be: `path` itself, and those in a run folder or an MLflow model."""
    return path, RunFolder(path).bundle, path / "artifacts" / RunFolder(path).bundle.name


def _find_bundle(path: Path) -> Path:
    for folder in bundle_folders(path):
        if (folder / _NAMES.bundle_card.name).is_file():
            return folder
    if not path.is_dir():
        raise BundleError(f"There is no folder {path}; give a run folder (the path a training ends with) or a bundle.")
    raise BundleError(
        f"There is no bundle in {path} ({_NAMES.bundle_card.name} is missing); `deeplightning export RUN` writes one."
    )


def _read_card(folder: Path) -> Card:
    """Read bundle.json, and check that it is unchanged since its export. Most values are checked later."""
    file = folder / _NAMES.bundle_card.name
    try:
        card: dict[str, object] = json.loads(_read_file(folder, file.name, MAX_CARD_BYTES))
        _expect(isinstance(card, dict), f"has no JSON object in {file.name}; {_RETRY}", folder)
        form = card.get("format")
        _expect(form == BUNDLE_FORMAT, f"has format {form!r:.40}; this server reads {BUNDLE_FORMAT}: {_RETRY}", folder)
        expected = card_digest(card)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file} is not JSON ({error}); {_RETRY}.") from error
    _expect(card.get("digest") == expected, f"is damaged: {file.name} was changed since its export; {_RETRY}", folder)
    keys = set(card) - {"int8", "output"}
    _expect(keys == _CARD_KEYS, f"has wrong keys in {file.name} ({', '.join(sorted(keys ^ _CARD_KEYS))})", folder)
    return cast("Card", card)


def _check_files(folder: Path, digests: object, precision: str) -> None:
    """Check the digests of all files except models of other precisions."""
    listed = digests if isinstance(digests, dict) else {}
    needed = {_NAMES.bundle_model.name, _NAMES.bundle_weights.name}
    _expect(needed <= set(listed), f"does not list the digests of {' and '.join(sorted(needed))}", folder)
    model = _MODEL_FILES[precision]
    _expect(
        model in listed,
        f"has no {model}: with serve.precision {precision} in the run's config, `deeplightning serve RUN` writes it; "
        "--precision fp32 does not need it",
        folder,
    )
    for name, digest in listed.items():
        _expect(bool(_FILE_NAME.fullmatch(name)), f"lists {name!r:.80}, which is not a file name", folder)
        if name in _MODEL_FILES.values() and name != model:
            continue  # of another precision
        with _open_file(folder, name) as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        _expect(found == digest, f"is damaged: {name} is not the file that was exported (its SHA-256 differs)", folder)


def _open_file(folder: Path, name: str) -> BufferedReader:
    """Open a regular file of the bundle for reading; reject links out of its folder."""
    try:
        file = (folder / name).resolve()
        _expect(file.is_relative_to(folder.resolve()), f"has a link out of its folder: {name}", folder)
        _expect(file.is_file() or not file.exists(), f"has a {name} that is not a regular file", folder)
        return file.open("rb")
    except (OSError, RuntimeError) as error:  # Python 3.11 raises the latter for circular links
        reason = getattr(error, "strerror", None) or first_line(error)
        raise BundleError(f"The bundle {folder} has no readable {name} ({reason}).") from error


def _read_file(folder: Path, name: str, max_bytes: int) -> bytes:
    """Return the content of a file of the bundle, at most `max_bytes` bytes."""
    with _open_file(folder, name) as stream:
        content = stream.read(max_bytes + 1)
    _expect(len(content) <= max_bytes, f"has a {name} of more than {max_bytes:,} bytes", folder)
    return content


def _input_spec(folder: Path, card: Card, kind: Kind) -> Any:
    """Return the spec that prepares inputs; that of texts is read from the vocabulary or tokenizer."""
    values = card["input"]
    try:
        if kind.takes == "image":
            return ImageSpec.from_dict(values)
        if kind.takes != "text":
            return row_spec(kind.takes, values)
        from deeplightning.text_spec import TextSpec

        name = values.get("file") if isinstance(values, dict) else None
        _expect(
            name in _TEXT_FILES and name in card["files"],
            f"does not say which of its files has the tokens ({' or '.join(_TEXT_FILES)})",
            folder,
        )
        return TextSpec.from_dict(values, _read_file(folder, str(name), MAX_TOKENIZER_BYTES).decode())
    except ImportError as error:
        raise BundleError(
            f"The bundle {folder} has a Hugging Face tokenizer, which needs a package that is not installed here "
            f"({error}): pip install tokenizers"
        ) from error
    except ValueError as error:
        raise BundleError(f"The bundle {folder} describes its input wrongly: {error}.") from error


def _golden_inputs(folder: Path, golden: object, kind: Kind, spec: Any) -> tuple[np.ndarray, list[Any]]:
    """Return the golden samples prepared like a client's, (N, …), and some as clients send them."""
    given = golden.get(kind.golden) if isinstance(golden, dict) else None
    if not isinstance(given, list) or not given:
        raise BundleError(f"The bundle {folder} has no golden samples.")
    number, rows, examples = 0, list[np.ndarray](), list[Any]()
    try:
        for number, sample in enumerate(given):
            example: Any = sample
            if kind.takes == "image":
                rows.append(prepare_picture(spec, base64.b64decode(sample, validate=True), spec.height * spec.width))
            elif kind.takes == "array":
                from deeplightning.array_spec import read_npy

                array = read_npy(base64.b64decode(sample, validate=True))
                rows.append(spec.prepare(array))
                example = (array + 0).tolist() if number < MAX_EXAMPLES else None  # numbers, also of bools
            elif isinstance(sample, dict if kind.takes == "table" else str):
                rows.append(spec.prepare(sample))
            else:
                raise TypeError(f"it is of type {type(sample).__name__}")
            examples += [example] * (number < MAX_EXAMPLES)
        return np.stack(rows) if kind.takes == "image" else spec.stack(rows), examples
    except (TypeError, ValueError) as error:  # ImageError, TextError, TableError and binascii.Error are ValueErrors
        raise BundleError(f"Golden sample {number} of the bundle {folder} is damaged ({error}).") from error


def _load_session(
    folder: Path, precision: str, kind: Kind, shape: tuple[int, ...], num_labels: int, device: Device
) -> onnxruntime.InferenceSession:
    """Load the model, and check its inputs and outputs. ONNX Runtime keeps it from reading files outside its folder."""
    try:
        session = open_session(folder / _MODEL_FILES[precision], device)
    except DeviceError:
        raise
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        raise BundleError(f"ONNX Runtime rejects the model of the bundle {folder}: {first_line(error)}") from error
    inputs = [(node.name, node.type, node.shape[1:]) for node in session.get_inputs()]
    outputs = [(node.name, node.type, node.shape[1:]) for node in session.get_outputs()]
    sides: list[int | str] = ["length"] if kind.takes == "text" else list(shape)
    expected = [(kind.input, f"tensor({_DTYPES[kind.takes]})", sides)]
    _expect(inputs == expected, f"has a model with the inputs {inputs}; bundle.json says {expected}", folder)
    _expect(
        [output[:2] for output in outputs] == [(kind.output, "tensor(float)")],
        f"has a model with the outputs {outputs}, not just float {kind.output}",
        folder,
    )
    found, answer = outputs[0][2], list(kind.answer(num_labels, shape))
    _expect(found == answer, f"has {num_labels} labels, and its model gives {found} {kind.output}", folder)
    return session


def _check_answers(bundle: Bundle, golden: dict[str, Any], answers: np.ndarray) -> None:
    """Check that the golden samples get the same answers as at export, within `TOLERANCES`. This covers decoding,
    model, runtime and device."""
    reference = "fp32" if bundle.precision == "fp16" else bundle.precision
    given = KINDS[bundle.task].compared(answers)
    _expect(
        isinstance(given, np.ndarray) and given.ndim > 1 and len(given) == len(bundle.samples),
        f"answers {len(bundle.samples)} golden samples with {getattr(given, 'shape', type(given).__name__)}",
        bundle.folder,
    )
    try:
        expected = np.frombuffer(base64.b64decode(golden[reference], validate=True), "<f4").reshape(given.shape)
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"The golden answers of the bundle {bundle.folder} are damaged ({error}).") from error
    differences = np.abs(given - expected).max(axis=tuple(range(1, given.ndim)))  # (N,)
    worst, allowed = int(differences.argmax()), TOLERANCES[bundle.precision]  # argmax returns a nan first
    if bundle.device.on_gpu:
        allowed = max(allowed, GPU_TOLERANCE)
    allowed *= max(1.0, float(np.abs(given).max()))
    remedy = "serve it with serve.precision=fp32" if bundle.precision == "fp16" else _RETRY
    _expect(
        bool(differences[worst] <= allowed),
        f"answers golden sample {worst} differently than at export: {KINDS[bundle.task].output} differ by "
        f"{differences[worst]:.3g}; the limit is {allowed:g}; {remedy}",
        bundle.folder,
    )


def _check_encoding(bundle: Bundle, answer: np.ndarray) -> None:
    """Check that an answer, (…), can be encoded with the card's labels and half widths or thresholds."""
    try:
        OUTPUTS[KINDS[bundle.task].gives].encoder(bundle.labels, bundle.output)([answer], DEFAULT_TOP_K, "")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise BundleError(f"The bundle {bundle.folder} describes its answers wrongly ({error!r:.200}).") from error


def _golden_answers(bundle: Bundle) -> np.ndarray:
    """Return the answers to all golden samples; one by one if a GPU has too little memory for all at once."""
    try:
        try:
            return bundle.predict(bundle.samples)
        except MemoryError:
            return np.concatenate([bundle.predict(sample[None]) for sample in bundle.samples])
    except MemoryError as error:
        raise DeviceError(
            f"{bundle.device} ({bundle.device.name}) has too little memory for the bundle {bundle.folder}: "
            f"{bundle.device.free / 1e9:.1f} GB were free at the start ({first_line(error)}); stop other programs "
            "that use it, or use serve.device=cpu"
        ) from error
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        raise BundleError(
            f"The model of the bundle {bundle.folder} does not answer its golden samples: {first_line(error)}; "
            f"{_RETRY}."
        ) from error


def _return_memory() -> None:
    """Make glibc return the memory that loading took: 95 of 141 MB for a resnet18 (ONNX Runtime 1.31, November 2026),
    which every forked worker would keep."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
