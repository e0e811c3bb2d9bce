"""A run's bundle becomes an MLflow model, which `mlflow models serve`, `mlflow.pyfunc.load_model` and registries take.

It holds no pickle: the bundle as it is, and as source what reads one (`deeplightning.tracking.pyfunc`, `serve.bundle`,
`deeplightning.image`, `deeplightning.runfolder`). Nothing of it needs torch.
"""

import json
import logging
import shutil
import tempfile
import warnings
from importlib.metadata import requires
from pathlib import Path

from deeplightning.faults import SetupError
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.store import quiet_mlflow

SOURCES = (
    *(f"serve/{name}.py" for name in ("bundle", "session", "device", "cuda", "log", "private")),
    *(f"deeplightning/{name}.py" for name in ("image", "kinds", "runfolder", "version", "words")),
)

PACKAGES = ("mlflow", "numpy", "onnxruntime", "pillow")
"""What these files import; MLflow brings pandas with it."""

_ROOT = Path(__file__).parents[2]

# MLflow puts the folder of these sources first on the path. What it has none of is found in the installed packages.
_EXTEND = '\n__path__ = __import__("pkgutil").extend_path(__path__, __name__)\n'


def write_model(folder: RunFolder) -> Path:
    """Writes the MLflow model of a run's bundle into the run's folder, in the place of a former one.

    Raises:
        SetupError: the folder cannot be written.
    """
    quiet_mlflow()
    for name in ("mlflow.pyfunc", "mlflow.utils.environment"):  # it says what it does, and misses pip's version
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory(dir=folder.path, prefix=".model-") as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow 3.17 warns of its own type hints
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
    pictures = card["task"] == "image_reconstruction"
    answers = [("string", "image")] if pictures else [("long", "class"), ("string", "label"), ("double", "probability")]
    save_model(
        place / "model",
        python_model=str(Path(__file__).with_name("pyfunc.py")),
        artifacts={"bundle": str(folder.bundle)},
        code_paths=[str(package) for package in _sources(place / "code")],
        signature=ModelSignature(
            inputs=Schema([ColSpec(AnyType(), "image")]), outputs=Schema([ColSpec(*answer) for answer in answers])
        ),
        input_example=pd.DataFrame({"image": card["golden"]["pictures"][:1]}),
        pip_requirements=requirements(),
    )


def requirements() -> list[str]:
    """What the model needs, with the floors that Deep Lightning itself has."""
    ours = [text.partition(";")[0].strip() for text in requires("deeplightning") or [] if "extra ==" not in text]
    return [text for text in ours if text.lower().startswith(PACKAGES)]


def _sources(place: Path) -> list[Path]:
    """The packages of which the model has a part, each in a folder under `place`."""
    for name in SOURCES:
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (target.parent / "__init__.py").write_text((_ROOT / name).with_name("__init__.py").read_text() + _EXTEND)
        shutil.copyfile(_ROOT / name, target)
    return sorted(place.iterdir())
