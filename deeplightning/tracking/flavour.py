"""Write a run's bundle as an MLflow model, for `mlflow models serve`, `mlflow.pyfunc.load_model` and registries.

It contains no pickle: only the unchanged bundle and the source code that reads it and predicts (`SOURCES`,
`deeplightning.tracking.pyfunc`). It does not need torch.
"""

import base64
import io
import json
import logging
import re
import shutil
import tempfile
import warnings
from importlib.metadata import requires
from pathlib import Path

import numpy as np

from deeplightning.faults import SetupError
from deeplightning.kinds import KINDS
from deeplightning.runfolder import Card, RunFolder
from deeplightning.tracking.store import quiet_mlflow
from serve.outputs import OUTPUTS

_SERVE = ("answers", "bundle", "cuda", "device", "limits", "model", "outputs", "private", "schemas", "session")
_SPECS = [f"{kind}_spec" for kind in ("array", "image", "table", "text")]
_OURS = (*_SPECS, "kinds", "runfolder", "table_format", "version", "words")
SOURCES = (*(f"serve/{name}.py" for name in _SERVE), *(f"deeplightning/{name}.py" for name in _OURS))

PACKAGES = ("mlflow", "numpy", "onnxruntime", "pillow")
"""Packages that these files import; MLflow depends on pandas. Text models also need `tokenizers`."""

_ROOT = Path(__file__).parents[2]

# MLflow puts the folder of these sources first on the path. Other modules are found in the installed packages.
_EXTEND = '\n__path__ = __import__("pkgutil").extend_path(__path__, __name__)\n'


def write_model(folder: RunFolder) -> Path:
    """Write the MLflow model of a run's bundle to the run folder, replacing a former one.

    Raises:
        SetupError: the folder cannot be written.
    """
    quiet_mlflow()
    for name in ("mlflow.pyfunc", "mlflow.utils.environment"):  # they log each step, and warn about pip
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory(dir=folder.path, prefix=".model-") as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow 3.17 warns about its own type hints
            _save(folder, Path(place))
            shutil.rmtree(folder.model, ignore_errors=True)
            (Path(place) / "model").rename(folder.model)
    except OSError as error:
        raise SetupError(f"The MLflow model {folder.model} cannot be written: {error}") from error
    return folder.model


def _save(folder: RunFolder, place: Path) -> None:
    import pandas as pd
    from mlflow.models import ModelSignature
    from mlflow.pyfunc import save_model
    from mlflow.types.schema import AnyType, ColSpec, Schema

    card = json.loads(folder.bundle_card.read_text(encoding="utf-8"))
    kind, example = KINDS[card["task"]], _example(card)
    save_model(
        place / "model",
        python_model=str(Path(__file__).with_name("pyfunc.py")),
        artifacts={"bundle": str(folder.bundle)},
        code_paths=[str(package) for package in _sources(place / "code")],
        signature=ModelSignature(
            inputs=Schema([ColSpec("string" if kind.takes == "text" else AnyType(), name) for name in example]),
            outputs=Schema([ColSpec(of or AnyType(), name) for name, of in OUTPUTS[kind.gives].columns]),
        ),
        input_example=pd.DataFrame([example]),
        pip_requirements=requirements(kind.takes),
    )


def _example(card: Card) -> dict[str, object]:
    """Return the first golden sample of a bundle as a row of the model's input."""
    golden = card["golden"]
    if "rows" in golden:
        names = [column["name"] for column in card["input"]["columns"]]
        return {name: golden["rows"][0][name] for name in names}
    if "arrays" in golden:
        file = io.BytesIO(base64.b64decode(golden["arrays"][0]))
        return {"array": np.load(file, allow_pickle=False).tolist()}
    return {"text": golden["texts"][0]} if "texts" in golden else {"image": golden["pictures"][0]}


def requirements(takes: str = "image") -> list[str]:
    """Return the requirements of the model, with the version bounds of Deep Lightning.

    Args:
        takes: input of the model, one of `deeplightning.kinds.INPUTS`.
    """
    names = {*PACKAGES, "tokenizers"} if takes == "text" else {*PACKAGES}
    ours = [text.partition(";")[0].strip() for text in requires("deeplightning") or []]
    return [text for text in ours if re.split(r"[^\w-]", text)[0].lower() in names]


def _sources(place: Path) -> list[Path]:
    """Copy the modules that the model needs, in their packages, to the folder `place`; return the packages."""
    for name in SOURCES:
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (target.parent / "__init__.py").write_text((_ROOT / name).with_name("__init__.py").read_text() + _EXTEND)
        shutil.copyfile(_ROOT / name, target)
    return sorted(place.iterdir())
