"""A bundle is opened: every byte checked against its digest, its model against the answers it gave at export.

Nothing is unpickled and nothing is imported that a bundle names. `deeplightning.export` writes what is read here.
Letters: N images, C channels, H height, W width, K classes.
"""

import base64
import binascii
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# From 1.29 on, importing onnxruntime starts a thread that reports to its makers and keeps a file in the user's home; a
# forked server worker cannot end it and hangs at exit.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import onnxruntime

from deeplightning.image import ImageError, ImageSpec
from deeplightning.runfolder import RunFolder

FORMAT = 1
TASKS = ("image_classification",)
TOLERANCE = 1e-4
"""How far a golden sample's probabilities may be from those at export, possibly on another machine."""

MAX_CARD_BYTES = 64_000_000
"""bundle.json carries up to 16 samples as PNG, some 11 MB together; more than this is none of ours."""


class BundleError(Exception):
    """A bundle is missing, damaged, or of a kind that is not known here; the message is one sentence for people."""

    exit_code = 4


@dataclass(frozen=True)
class Bundle:
    """A model that is loaded, checked and ready; safe to share between threads.

    Attributes:
        folder: where it was read from.
        task: what it does, one of `TASKS`.
        image_spec: how a picture is prepared for it.
        labels: the K class names, in the order of the probabilities.
        run: where it comes from, as `bundle.json` says (`id`, `folder_name`, `created`, `versions`).
        session: ONNX Runtime with the model, one thread per call.
    """

    folder: Path
    task: str
    image_spec: ImageSpec
    labels: list[str]
    run: dict[str, Any]
    session: onnxruntime.InferenceSession

    @classmethod
    def open(cls, path: str | Path) -> "Bundle":
        """Read the bundle in `path`, or in the run folder `path`, and replay its golden samples.

        Raises:
            BundleError: it is missing, incomplete, changed since its export, unknown, or answers otherwise than it did.
        """
        folder = _find(Path(path).expanduser().absolute())
        card = _read_card(folder / _NAMES.bundle_card.name)
        _expect(card.get("format") == FORMAT, f"has format {card.get('format')!r}; this server reads {FORMAT}", folder)
        _expect(card.get("task") in TASKS, f"is for the task {card.get('task')!r}; known: {', '.join(TASKS)}", folder)
        labels: Any = card.get("labels")
        run: Any = card.get("run")
        _expect(_are_names(labels), "has labels that are not a list of different texts", folder)
        _expect(isinstance(run, dict), "does not say which run it comes from", folder)
        try:
            spec = ImageSpec.from_dict(card.get("input"))  # type: ignore[arg-type] # it refuses what is no mapping
        except ValueError as error:
            raise BundleError(f"The bundle {folder} describes its input wrongly: {error}.") from error
        _check_files(folder, card.get("files"))
        session = _load(folder, spec, len(labels))
        bundle = cls(folder, card["task"], spec, labels, run, session)
        _replay(bundle, card.get("golden"))
        return bundle

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Probabilities, float32 (N, K), of prepared images, uint8 (N, C, H, W)."""
        return self.session.run(["probabilities"], {"images": images})[0]

    def prepare(self, data: bytes, max_pixels: int) -> np.ndarray:
        """One encoded picture as the model wants it, uint8 (C, H, W).

        Raises:
            ImageError: it is not a picture, damaged, or has more than `max_pixels`.
        """
        return np.ascontiguousarray(self.image_spec.decode(data, max_pixels=max_pixels).transpose(2, 0, 1))


_NAMES = RunFolder(".")  # only the names of its files are used: a bundle may have been copied to anywhere


def _expect(holds: bool, fault: str, folder: Path) -> None:
    if not holds:
        raise BundleError(f"The bundle {folder} {fault}.")


def _find(path: Path) -> Path:
    for folder in (path, RunFolder(path).bundle):
        if (folder / _NAMES.bundle_card.name).is_file():
            return folder
    if not path.is_dir():
        raise BundleError(f"There is no folder {path}; give a run folder (the path a training ends with) or a bundle.")
    raise BundleError(
        f"There is no bundle in {path} ({_NAMES.bundle_card.name} is missing); `deeplightning export RUN` writes one."
    )


def _read_card(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_CARD_BYTES + 1)
        card = json.loads(text) if len(text) <= MAX_CARD_BYTES else None
    except OSError as error:
        raise BundleError(f"{file} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file} is not JSON ({error}); export the bundle again.") from error
    if not isinstance(card, dict):
        raise BundleError(f"{file} is not the JSON object that a bundle is described by; export the bundle again.")
    return card


def _are_names(labels: Any) -> bool:
    return (
        isinstance(labels, list)
        and bool(labels)
        and all(isinstance(label, str) for label in labels)
        and len(set(labels)) == len(labels)
    )


def _check_files(folder: Path, digests: Any) -> None:
    """Every listed file is here, in the folder itself, and is what was exported."""
    listed = digests if isinstance(digests, dict) else {}
    needed = {_NAMES.bundle_model.name, _NAMES.bundle_weights.name}
    _expect(needed <= set(listed), f"does not list the digests of {' and '.join(sorted(needed))}", folder)
    for name, digest in listed.items():
        _expect(name == Path(name).name and name not in ("", ".."), f"lists {name!r}, which is no file name", folder)
        try:
            with (folder / name).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise BundleError(f"The bundle {folder} has no readable {name} ({error.strerror}).") from error
        _expect(found == digest, f"is damaged: {name} is not the file that was exported (its SHA-256 differs)", folder)


def _load(folder: Path, spec: ImageSpec, num_classes: int) -> onnxruntime.InferenceSession:
    """The model, which ONNX Runtime keeps from reading files outside its own folder."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # requests run beside one another instead
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # what goes wrong is raised as well
    try:
        session = onnxruntime.InferenceSession(
            folder / _NAMES.bundle_model.name, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        reason = str(error).splitlines()[0]
        raise BundleError(f"ONNX Runtime does not take the model of the bundle {folder}: {reason}") from error
    inputs = [(node.name, node.type, node.shape[1:]) for node in session.get_inputs()]
    outputs = [(node.name, node.type, node.shape[1:]) for node in session.get_outputs()]
    wanted = [("images", "tensor(uint8)", [spec.channels, spec.height, spec.width])]
    _expect(inputs == wanted, f"has a model with the inputs {inputs}; bundle.json says {wanted}", folder)
    _expect(
        [output[:2] for output in outputs] == [("probabilities", "tensor(float)")],
        f"has a model with the outputs {outputs}, not just float probabilities",
        folder,
    )
    _expect(
        outputs[0][2] == [num_classes],
        f"has {num_classes} labels, and its model gives {outputs[0][2]} probabilities",
        folder,
    )
    return session


def _replay(bundle: Bundle, golden: Any) -> None:
    """The golden samples get the answers they got at export: decoding, model and runtime are as they were."""
    _expect(isinstance(golden, list) and bool(golden), "has no golden samples", bundle.folder)
    spec = bundle.image_spec
    for number, sample in enumerate(golden):
        try:
            png = base64.b64decode(sample["png"], validate=True)
            wanted = np.array(sample["probabilities"], dtype=np.float64)  # (K,)
            pixels = bundle.prepare(png, spec.height * spec.width)
        except (KeyError, TypeError, ValueError, binascii.Error, ImageError) as error:
            raise BundleError(f"Golden sample {number} of the bundle {bundle.folder} is damaged ({error}).") from error
        _expect(wanted.shape == (len(bundle.labels),), f"has a golden sample of shape {wanted.shape}", bundle.folder)
        difference = float(np.abs(bundle.predict(pixels[None])[0] - wanted).max())
        _expect(
            difference <= TOLERANCE,  # nan is refused as well
            f"answers golden sample {number} otherwise than when it was exported: "
            f"probabilities differ by {difference:.3g}, allowed are {TOLERANCE:g}",
            bundle.folder,
        )
