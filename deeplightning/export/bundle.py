"""Export a trained task as a verified bundle: a folder with `model.onnx`, `weights.safetensors` and `bundle.json`.

Serving a bundle needs neither our code nor the user's: the graph takes uint8 pixels, the tokens of texts, or prepared
numbers of rows and arrays, and returns probabilities, numbers or pictures; `bundle.json` has the rest (see `export`).
Letters: N samples, C channels, H height, W width, L tokens of the longest text, K classes or targets.
"""

import base64
import contextlib
import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # otherwise the import starts a telemetry thread (since 1.29)

import numpy as np
import onnxruntime
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from deeplightning.array_spec import ArraySpec
from deeplightning.faults import CheckpointError, SetupError
from deeplightning.image_spec import ImageSpec
from deeplightning.kinds import KINDS, Kind, labels_of, row_spec
from deeplightning.private.messages import ErrorText, matches
from deeplightning.runfolder import BUNDLE_FORMAT, Card, RunFolder, card_digest, golden_digest
from deeplightning.table_spec import TableSpec
from deeplightning.text_spec import TextSpec
from deeplightning.words import first_line

TOLERANCE = 1e-4
"""Maximum difference between an answer of ONNX Runtime and the task's, relative to the largest answer, or to 1 if that
is larger. It allows for float32 sums in another order."""

MAX_GOLDEN = 16
MAX_GOLDEN_BYTES = 2_000_000
"""Maximum number of golden samples, and maximum size of their PNGs and answers together; the first sample is always
kept. A server reads them at each start."""

LARGE_WEIGHTS_BYTES = 2**28
"""Size above which the weights are stored in a file beside the graph: writing a single file takes three copies of them
in memory, and an ONNX file cannot contain more than 2 GB."""

BATCH = 16
BATCH_SIZES = (1, 3, BATCH)
"""Batch sizes that an exported graph is tested with, besides the one it was traced with."""

EXTRA_TOKENS = 5
"""Padding added beyond the longest text in a test that padding changes no answer."""


class NotExpressible(CheckpointError):
    """Raised if ONNX cannot express the network; torch can still run it."""


class Exportable(Protocol):
    """Interface of a task that can be exported."""

    @property
    def kind(self) -> str:
        """A name in `deeplightning.kinds.KINDS`."""

    image_spec: ImageSpec
    """Required if the inputs are pictures."""
    text_spec: TextSpec
    """Required if the inputs are texts; read after `inference_model`."""
    row_spec: TableSpec | ArraySpec
    """Required if the inputs are rows of a table or arrays."""
    class_names: list[str]
    """A name for each number of an answer; required unless the answers are pictures."""

    def inference_model(self) -> nn.Module:
        """Return the model to export, on the CPU and in eval mode. It maps uint8 (N, C, H, W), tokens int64 (N, L), or
        prepared rows or arrays float32 (N, …) to probabilities or numbers, float32 (N, K); for `image_segmentation` to
        probabilities float32 (N, K, H, W); for `image_reconstruction` to pictures of the same size, float32
        (N, C, H, W) from 0 to 1. A task may also have `answer_details() -> dict`, stored under `output` on the card."""


def export(task: Exportable, folder: RunFolder, samples: np.ndarray, run: dict[str, object]) -> Path:
    """Write `folder.bundle`; on failure, leave a previous bundle as it was.

    `bundle.json` contains `format` (2), `task`, `input` (the spec's `to_dict()`), `labels` (one per class or target, in
    order; empty for pictures), `output` (if the task has `answer_details`), `files` (name to SHA-256), `run`, `golden`,
    and `digest`, that of all the rest (`deeplightning.runfolder.card_digest`). `golden` contains samples: under
    `pictures`, each a PNG (base64) that decodes to exactly the model's input; under `texts`; under `rows`, each an
    object; or under `arrays`, each a .npy file (base64). `golden.fp32` contains ONNX Runtime's answers to them: float32
    (N, K) or (N, C, H, W), little-endian, base64; for segmentation every s-th pixel (`Kind.compared`). The vocabulary
    or tokenizer of texts is another file, which `input` names.

    Args:
        task: a trained task. Its inference model is not changed.
        folder: the run's folder, which exists.
        samples: real images as the data module prepares them, uint8 (N, C, H, W); texts, an array of str (N,); rows of
            a table, each a JSON object, an array of str (N,); or arrays before they are prepared, (N, …). N ≥ 1. All
            are compared; the first 16 are kept.
        run: origin of the model, of JSON types: `id`, `name`, `folder_name`, `created`, `versions`.

    Returns:
        the bundle's folder.

    Raises:
        CheckpointError: the network cannot be exported, or ONNX Runtime's answers differ from its own.
        SetupError: the folder cannot be written.
    """
    if task.kind not in KINDS:
        raise CheckpointError(f"Only {', '.join(KINDS)} can be exported; this task is {task.kind!r}.")
    kind, model = KINDS[task.kind], task.inference_model()
    spec: Any = getattr(task, kind.spec)
    given, rows = _prepare_samples(kind, spec, samples)
    free = {0: torch.export.Dim("batch", min=1)}  # torch.export would treat a dimension of 1 as a constant
    tests, longer = [rows], max(map(len, rows)) + EXTRA_TOKENS
    if kind.takes == "text":
        expected = _torch_answers(model, [row[None] for row in rows])  # each text alone, so without padding
        longer = min(longer, spec.limit or longer)
        tests += [[np.pad(row, (0, longer - len(row)), constant_values=spec.padding) for row in rows]]
        example = spec.stack([rows[0], rows[-1], [spec.padding] * 2])[:2]
        free[1] = torch.export.Dim("length", min=1, max=spec.limit)
    else:
        expected = _torch_answers(model, [np.stack(rows[at : at + BATCH]) for at in range(0, len(rows), BATCH)])
        example = np.resize(np.stack(rows[:2]), (2, *rows[0].shape))
    labels = labels_of(task)
    details: dict[str, object] = getattr(task, "answer_details", dict)()
    _check_answers(expected, kind, labels, rows[0].shape)
    graph = _trace(model, example, kind.input, free, kind.output)
    stack = spec.stack if kind.takes == "text" else np.stack

    content = {"task": task.kind, "input": spec.to_dict(), "labels": labels} | ({"output": details} if details else {})
    try:
        with replacement_for(folder.bundle) as new:
            file, weights = new / folder.bundle_model.name, new / folder.bundle_weights.name
            is_large = sum(weight.nbytes for weight in model.state_dict().values()) > LARGE_WEIGHTS_BYTES
            graph.save(file, external_data=is_large or None)
            save_model(model, str(weights))
            weights.chmod(file.stat().st_mode)  # it is created private
            if kind.takes == "text":
                (new / spec.file).write_bytes(spec.content.encode())
            answers = kind.compared(_verified_answers(file, tests, stack, expected))
            kept = _limit_samples(given, answers)
            golden = {kind.golden: kept, "fp32": packed(answers[: len(kept)])}
            files = {one.name: digest_of(one) for one in sorted(new.iterdir())}
            card = {"format": BUNDLE_FORMAT, **content, "files": files, "run": run, "golden": golden}
            (new / folder.bundle_card.name).write_text(card_text(cast("Card", card)), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise SetupError(f"The bundle {folder.bundle} cannot be written: {error}.") from error
    return folder.bundle


def _prepare_samples(kind: Kind, spec: Any, samples: np.ndarray) -> tuple[Iterable[object], list[np.ndarray]]:
    """Return the samples as clients send them, of JSON types, and as the model takes them; raise CheckpointError if
    there are none, or one cannot be used."""
    if kind.takes == "image":
        shape = (spec.channels, spec.height, spec.width)
        if samples.dtype != np.uint8 or samples.shape[1:] != shape or not len(samples):
            raise CheckpointError(
                "Export compares the network with its ONNX form on samples of uint8 "
                f"(N, {spec.channels}, {spec.height}, {spec.width}), N ≥ 1; got {samples.dtype} {samples.shape}."
            )
        return map(_png, samples), list(samples)
    if not len(samples):
        raise CheckpointError("Export compares the network with its ONNX form on samples, but there are none.")
    readers: dict[str, Callable[[Any], Any]] = {"table": json.loads, "text": str, "array": np.asarray}
    given = [readers[kind.takes](sample) for sample in samples]
    try:
        rows = [spec.prepare(one) for one in given]
    except ValueError as error:
        raise CheckpointError(f"A sample cannot be used to verify the export: {error}") from error
    return map(_npy, given) if kind.takes == "array" else given, rows


def _npy(values: np.ndarray) -> str:
    """Return an array as a .npy file in base64."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(values), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _check_answers(expected: np.ndarray, kind: Kind, labels: list[str], shape: tuple[int, ...]) -> None:
    """Check the network's answers to inputs of a shape; raise CheckpointError if they are not finite, do not match the
    labels, or are not pictures of the inputs' shape."""
    if not kind.labelled and expected.shape[1:] != shape:
        given = (len(expected), *shape)
        raise CheckpointError(f"The network maps pictures of {given} to {expected.shape}; the shapes must be equal.")
    if kind.labelled and expected.shape[1:] != kind.answer(len(labels), shape):
        found = " x ".join(map(str, expected.shape[1:]))
        raise CheckpointError(
            f"The network gives {found} {kind.output}, and the data has {len(labels)} {kind.labelled}. "
            f"Set the network's number of {kind.labelled} to the data's, and train again."
        )
    if not np.isfinite(expected).all():
        raise CheckpointError(f"The network's {kind.output} are not finite: weights are damaged, or training diverged.")
    if not kind.labelled and not (expected.min() >= 0 and expected.max() <= 1):
        raise CheckpointError(
            f"The network's pictures range from {expected.min():.3g} to {expected.max():.3g}, not from 0 to 1; "
            "end inference_model() with a sigmoid or a clamp."
        )


def card_text(card: Card) -> str:
    """Return the text of `bundle.json` with new digests: of the golden answers, then of the whole card."""
    card = {**card, "golden": {**card["golden"], "digest": golden_digest(card)}}
    return json.dumps({**card, "digest": card_digest(card)}, indent=1, ensure_ascii=False)


def _torch_answers(model: nn.Module, batches: Sequence[np.ndarray]) -> np.ndarray:
    """Return the model's answers, float32 (N, K) or (N, C, H, W)."""
    with torch.inference_mode():
        answers = [model(torch.from_numpy(part.copy())) for part in batches]
    return torch.cat(answers).numpy()


def _trace(
    model: nn.Module, example: np.ndarray, name: str, free: dict[int, Any], output: str
) -> torch.onnx.ONNXProgram:
    """Return the model as an ONNX graph with the input `name`, whose dimensions `free` may have any size.

    `torch.export` runs first, as a separate step: it refuses a forward pass that depends on its values or on the batch
    size, while the TorchScript exporter silently records one path. It costs more CPU seconds (torch 2.15, one thread,
    2026): 2.3 at first use and 0.5 later for a small CNN instead of 0.06; 2.5 for resnet18 instead of 0.4.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # torch prints the partial graph if it fails
            traced = program_of(model, torch.from_numpy(example), free)
            graph = torch.onnx.export(
                traced, input_names=[name], output_names=[output], dynamic_shapes=(free,), verbose=False
            )
    except Exception as error:  # whatever torch raises, the network cannot be exported
        where = f" (in layer {layer})" if (layer := _failing_layer(model, error)) else ""
        raise NotExpressible(f"The network cannot be exported to ONNX{where}: {reason(error)}") from error
    assert graph is not None, "torch.onnx.export returns a program, unless it gets a file"
    ClearMetadataAndDocStringPass()(graph.model)  # torch records source lines with this machine's paths
    return graph


def program_of(model: nn.Module, example: torch.Tensor, free: dict[int, Any]) -> torch.export.ExportedProgram:
    """Return the model as a `torch.export` program, whose input may have any size in the dimensions `free`.

    By default torch runs the forward pass, where `len(x)` fixes the batch size. If that fails, it reads the bytecode,
    which supports `len(x)` and numpy, and less of other code.
    """
    try:
        return torch.export.export(model, (example,), dynamic_shapes=(free,))
    except Exception:  # whatever torch raises; the first error is the clearer one
        with contextlib.suppress(Exception):
            return torch.export.export(model, (example,), dynamic_shapes=(free,), strict=True)
        raise


def _failing_layer(model: nn.Module, error: BaseException) -> str | None:
    """Return the dotted name of the innermost layer whose forward pass raised `error`, or None."""
    names = {layer: name for name, layer in model.named_modules()}
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((names[one] for one in reversed(running) if isinstance(one, nn.Module) and names.get(one)), None)


def reason(error: BaseException) -> str:
    """Return the first line of the root cause of `error`."""
    while error.__cause__ is not None:
        error = error.__cause__
    if matches(error, ErrorText.BATCH_SIZE_IS_FIXED):
        return "it works for one batch size only; write x.flatten(1), say, not x.reshape(256, -1)."
    return first_line(error)


def _verified_answers(
    file: Path, tests: Sequence[list[np.ndarray]], stack: Callable[[list[np.ndarray]], np.ndarray], expected: np.ndarray
) -> np.ndarray:
    """Return ONNX Runtime's answers to samples, float32, after comparing them with `expected` at several batch sizes.
    `tests`: the prepared samples and, for texts, the same with more padding; `stack` makes a batch. Raise
    CheckpointError if they differ by more than `TOLERANCE`, NotExpressible if ONNX Runtime rejects the graph."""
    number, answers, worst = len(expected), np.empty_like(expected), 0.0
    batches = [np.arange(size) % number for size in BATCH_SIZES]
    batches += [np.arange(start, min(start + BATCH, number)) for start in range(0, number, BATCH)]
    try:
        session = session_of(file)
        for inputs in reversed(tests):  # the answers to return come last
            for chosen in batches:
                given = answers_of(session, stack([inputs[n] for n in chosen]))
                worst = float(np.maximum(worst, np.abs(given - expected[chosen]).max()))
                answers[chosen] = given
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        raise NotExpressible(f"ONNX Runtime rejects the exported network: {reason(error)}") from error
    allowed = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    if not worst <= allowed:  # so that nan is refused as well
        remedy = "a network must not draw random numbers or mix the inputs of a batch in eval mode"
        if len(tests) > 1:
            remedy = "a network of texts must not see the padding"
        raise CheckpointError(
            f"The exported network and the checkpoint give different answers: {session.get_outputs()[0].name} differ "
            f"by up to {worst:.3g}; the limit is {allowed:g}; {remedy}. No bundle was written."
        )
    return answers


def session_of(file: Path) -> onnxruntime.InferenceSession:
    """Return a session of ONNX Runtime with a bundle's model: one thread, no log."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised as well
    if file.with_name(f"{file.name}.data").exists():  # memory-mapped: avoid a second copy of large weights
        options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def answers_of(session: onnxruntime.InferenceSession, batch: np.ndarray) -> np.ndarray:
    """Return a model's answers to a batch of prepared samples, (N, …)."""
    return session.run(None, {session.get_inputs()[0].name: batch})[0]


def _png(pixels: np.ndarray) -> str:
    """Return a picture, uint8 (C, H, W), as a PNG in base64."""
    png = io.BytesIO()
    Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(png, "PNG")
    return base64.b64encode(png.getvalue()).decode()


def _limit_samples(samples: Iterable[object], answers: np.ndarray) -> list[object]:
    """Return as many of the first samples, of JSON types, as fit into a card with their answers."""
    kept, size = list[object](), 0
    for sample, answer in zip(samples, answers[:MAX_GOLDEN], strict=False):
        size += (len(sample) * 3 // 4 if isinstance(sample, str) else len(json.dumps(sample))) + answer.nbytes
        if kept and size > MAX_GOLDEN_BYTES:
            break
        kept.append(sample)
    return kept


def packed(answers: np.ndarray) -> str:
    """Return answers as little-endian float32 in base64."""
    return base64.b64encode(answers.astype("<f4").tobytes()).decode()


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def replacement_for(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target` that replaces it when the block succeeds, and is removed otherwise."""
    new = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    old = new.with_name(f"{new.name}.old")
    try:
        new.mkdir()
        yield new
        for path in (*new.iterdir(), new):
            _sync(path)
        while True:
            with contextlib.suppress(FileNotFoundError):  # there is no bundle, or another export moved it
                target.rename(old)
            try:
                new.rename(target)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                shutil.rmtree(old, ignore_errors=True)  # another export was faster: replace its bundle
        _sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)  # so that the next lines do not restore it
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flush `path`, a file or a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- further models


def card_of(folder: RunFolder) -> Card:
    """Return the content of `bundle.json`, after checking its digests."""
    remedy = "write it again with `deeplightning export RUN`"
    try:
        card = json.loads(folder.bundle_card.read_bytes())
        intact = card["format"] == BUNDLE_FORMAT and card["digest"] == card_digest(card)
        intact = intact and card["files"][folder.bundle_model.name] == digest_of(folder.bundle_model)
        intact = intact and card["golden"]["digest"] == golden_digest(card)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"The bundle {folder.bundle} cannot be read ({error}); {remedy}.") from error
    if not intact:
        raise CheckpointError(f"The bundle {folder.bundle} is damaged, or has another format; {remedy}.")
    return card


@contextlib.contextmanager
def added_file(folder: RunFolder, card: Card, name: str) -> Iterator[Path]:
    """Yield the path of a new file, which becomes the file `name` of the bundle when the block succeeds. The block may
    change the card.

    Raises:
        SetupError: the folder cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary) / name
            yield file
            if card_of(folder)["files"] != card["files"]:
                raise OSError("it was changed meanwhile; run the command again")
            card["files"][name] = digest_of(file)
            with replacement_for(folder.bundle) as new:
                for other in card["files"].keys() - {name}:
                    shutil.copy2(folder.bundle / other, new / other)
                shutil.copyfile(file, new / name)
                (new / folder.bundle_card.name).write_text(card_text(card), encoding="utf-8")
    except OSError as error:
        raise SetupError(f"The bundle {folder.bundle} cannot be written: {error}.") from error


def golden_inputs(folder: RunFolder, card: Card) -> dict[str, np.ndarray]:
    """Return the golden samples as the model takes them, by the name of its input."""
    kind, golden, values = KINDS[card["task"]], card["golden"], card["input"]
    if kind.takes == "image":
        pictures = ImageSpec.from_dict(values)
        decoded = [pictures.decode(base64.b64decode(png)) for png in golden["pictures"]]
        return {kind.input: np.stack(decoded).transpose(0, 3, 1, 2).copy()}
    if kind.takes == "text":
        texts = TextSpec.from_dict(values, (folder.bundle / values["file"]).read_text(encoding="utf-8"))
        return {kind.input: texts.stack([texts.prepare(text) for text in golden["texts"]])}
    rows, given = row_spec(kind.takes, values), golden[kind.input]
    inputs: Any = given if kind.takes == "table" else map(base64.b64decode, given)
    return {kind.input: rows.stack([rows.prepare(one) for one in inputs])}
