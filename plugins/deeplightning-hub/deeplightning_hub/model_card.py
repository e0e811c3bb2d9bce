"""Write the model card of a run: Markdown with YAML front matter, in Hugging Face's format.

Config and metrics come from the run's files; no user code is imported. Secrets are concealed, and absolute paths are
reduced to their last part.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from deeplightning.config.secret_scan import REDACTED, conceal
from deeplightning.config.source import read
from deeplightning.config.tree import dump, plain
from deeplightning.config.trust import run_config
from deeplightning.faults import count
from deeplightning.kinds import KINDS
from deeplightning.runfolder import Card, RunFolder, read_object
from deeplightning.tracking.metrics_file import read_series
from deeplightning.words import printable, stage_of

PIPELINES = {
    "image_classification": "image-classification",
    "image_multilabel": "image-classification",
    "image_segmentation": "image-segmentation",
    "image_reconstruction": "image-to-image",
    "text_classification": "text-classification",
    "table_classification": "tabular-classification",
    "table_multilabel": "tabular-classification",
    "table_regression": "tabular-regression",
}
"""Hugging Face's names for kinds of task."""

_PACKAGES = (
    "deeplightning",
    "torch",
    "pytorch-lightning",
    "numpy",
    "onnx",
    "onnxruntime",
    "transformers",
    "tokenizers",
)
"""Packages whose versions a card lists."""

_ABSOLUTE_PATH = re.compile(r"(?:file:|sqlite:)/+.*|~?/(?!/).*|[A-Za-z]:[\\/].*", re.DOTALL)


def public_config(folder: RunFolder) -> str:
    """Return the config of a run as YAML that may be published.

    Secrets are concealed, absolute paths are reduced to their last part, and the tracking store's address is removed.

    Raises:
        ConfigError: it cannot be read.
    """
    tree = _without_paths(plain(read(run_config(folder)).root, written=True))
    params = (tree.get("logger") or {}).get("params") or {}
    params.pop("tracking_uri", None)
    text, _ = conceal(dump(tree), folder.config.name)
    return text


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    if isinstance(value, str) and "${" in value:  # not resolved: the run may be foreign
        return REDACTED
    if isinstance(value, str) and _ABSOLUTE_PATH.fullmatch(value):
        return re.split(r"[\\/]+", value.rstrip("\\/"))[-1]
    return value


def model_card(folder: RunFolder, card: Card, name: str, left_out: list[str]) -> str:
    """Return the text of README.md.

    Args:
        folder: the folder of a run that has a bundle.
        card: the bundle's `bundle.json`, as it is pushed.
        name: the name of the model.
        left_out: files of the bundle that are not pushed.
    """
    kind = card["task"]
    metrics = _metrics(folder)
    front: dict[str, Any] = {
        "license": "unknown",
        "library_name": "deeplightning",
        "tags": ["deeplightning", "onnx", "safetensors", kind.replace("_", "-")],
        "metrics": sorted({stage_of(metric)[1] for metric in metrics}),
    }
    if kind in PIPELINES:
        front["pipeline_tag"] = PIPELINES[kind]
    config = public_config(folder)
    tree = plain(read(run_config(folder)).root, written=True)
    network = _types(tree["model"].get("network")) or _types(tree["model"]["module"])
    data = _types((tree.get("data") or {}).get("module"))
    dataset = data.strip("`").rpartition(".")[2] or "own"
    if metrics:
        task = {"type": PIPELINES.get(kind, kind.replace("_", "-"))}
        values = [{"type": stage_of(m)[1], "name": m, "value": value} for m, value in metrics.items()]
        result = {"task": task, "dataset": {"name": dataset, "type": dataset.lower()}, "metrics": values}
        front["model-index"] = [{"name": name, "results": [result]}]
    parts = [
        f"---\n{dump(front)}---\n",
        f"# {name}\n",
        f"A network of the kind `{kind}`, trained with Deep Lightning {card['run']['versions']['deeplightning']}: "
        f"{network}{f' on {data}' if data else ''}. {_labels(card)}\n",
        "To be filled in: the licence in the front matter of this file.\n",
        "## Metrics\n",
        _table(("Metric", "Value"), [(f"`{m}`", f"{v:.6g}") for m, v in metrics.items()]) or "None recorded.\n",
        "## Use\n",
        _use(card),
        "## Limits\n",
        "To be filled in: what the data are and whom they leave out, which inputs are out of scope, what a wrong "
        "prediction costs, and who has checked the model for what.\n",
        "## Files\n",
        _files(card, left_out),
        "## Data\n",
        _data(folder),
        "## Environment\n",
        _environment(folder),
        "## Config\n",
        f"```yaml\n{config}```\n",
    ]
    return printable("\n".join(parts), "\n")


def _types(part: Any) -> str:
    """Return the class of a target, or the classes of several by name, as Markdown code; "" if there is none."""
    targets = [part] if part and "type" in part else (part or {}).values()
    return ", ".join(f"`{target['type']}`" for target in targets)


def _metrics(folder: RunFolder) -> dict[str, float]:
    """Return validation and test metrics; those from validation during training are of the best, else the last step."""
    found: dict[str, float] = {}
    best = read_object(folder.best_score)
    try:
        series = read_series(folder.metrics)
    except ValueError:
        series = {}
    monitored = series.get(str(best.get("metric")), [])
    at = next((step for step, value in monitored if value == best.get("value")), -1)  # best.json has a later step
    for name, points in sorted(series.items()):
        if stage_of(name)[0] == "val" and points:
            found[name] = dict(points).get(at, points[-1][1])
    for stage in ("validate", "test"):
        found |= {name: float(value) for name, value in read_object(folder.results(stage)).items()}
    return {name: value for name, value in found.items() if value == value and abs(value) != float("inf")}


def _labels(card: Card) -> str:
    labels = card.get("labels") or []
    if not labels:
        return ""
    first = ", ".join(f"`{printable(label)}`" for label in labels[:20])
    return f"Labels ({len(labels)}): {first}{', …' if len(labels) > 20 else ''}."


def _use(card: Card) -> str:
    kind = KINDS[card["task"]]
    sample = {"image": "a picture", "text": "a text", "table": "a row", "array": "an array"}[kind.takes]
    return f"""\
With Deep Lightning, where `DIR` is a copy of this folder (`hf download USER/NAME --local-dir DIR`):

```bash
deeplightning serve DIR        # an HTTP server; `deeplightning ask FILE` sends it a file
```

```python
import deeplightning

deeplightning.load_run("DIR").predict([...])  # {sample} for each prediction
```

Without it, with onnxruntime alone; `input` in `bundle/bundle.json` describes how {sample} is prepared:

```python
import numpy
import onnxruntime

session = onnxruntime.InferenceSession("bundle/model.onnx")
given = session.get_inputs()[0]  # `{kind.input}`; dimensions that are names may have any size
kinds = {{"tensor(uint8)": "uint8", "tensor(int64)": "int64", "tensor(float)": "float32"}}
inputs = numpy.zeros([n if isinstance(n, int) else 2 for n in given.shape], kinds[given.type])
(answers,) = session.run(None, {{given.name: inputs}})  # `{kind.output}`, a row for each input
```
"""


def _files(card: Card, left_out: list[str]) -> str:
    golden = next(len(value) for value in card["golden"].values() if isinstance(value, list))
    rows = [("`cfg.yaml`", "the config of the run; secrets and paths are left out")]
    rows += [
        ("`bundle/bundle.json`", f"inputs, labels, digests, and {count(golden, 'sample')} of the data to verify it")
    ]
    rows += [(f"`bundle/{name}`", f"SHA-256 `{digest}`") for name, digest in card["files"].items()]
    note = f"\nNot included (pickled data): {', '.join(f'`{name}`' for name in left_out)}.\n" if left_out else ""
    return _table(("File", "Content"), rows) + note


def _data(folder: RunFolder) -> str:
    files = read_object(folder.data).get("files")
    if not isinstance(files, dict) or not files:
        return "The run read no files.\n"
    digest = hashlib.sha256("".join(sorted(f"{of[1]}\n" for of in files.values())).encode()).hexdigest()
    size = sum(of[0] for of in files.values())
    return f"{count(len(files), 'file')}, {size:,} bytes. SHA-256 of their sorted SHA-256 digests: `{digest}`.\n"


def _environment(folder: RunFolder) -> str:
    found = read_object(folder.environment)
    packages = found.get("packages") or {}
    gpus = [gpu.get("name", "a GPU") if isinstance(gpu, dict) else str(gpu) for gpu in found.get("gpus") or []]
    rows = [("Python", str((found.get("python") or {}).get("version", "unknown")))]
    rows += [(name, str(packages[name])) for name in _PACKAGES if name in packages]
    rows += [("GPUs", ", ".join(gpus) or "none")]
    return _table(("Component", "Version"), rows)


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    return "\n".join(printable(f"| {a} | {b} |") for a, b in [head, ("---", "---"), *rows]) + "\n"
