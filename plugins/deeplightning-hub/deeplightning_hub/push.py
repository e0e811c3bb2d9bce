"""Publish a run: bundle, config and model card to Hugging Face or into a folder, its MLflow model to the registry.

Files with pickled data, secrets and paths of this machine are never published.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from deeplightning.config.trust import refuse_links
from deeplightning.faults import CheckpointError, ConfigError, SetupError
from deeplightning.runfolder import RunFolder, read_object
from deeplightning_hub.model_card import model_card, public_config

ADDRESS_FORMS = "hf://USER/NAME or mlflow://NAME"
SAFE_EXTENSIONS = (".onnx", ".data", ".safetensors", ".json", ".txt")
"""Extensions of a bundle's files that contain no pickled data, unlike a pt2 file."""

README, PUSH_RECORD = "README.md", ".push.json"
"""README: the model card. PUSH_RECORD: names and SHA-256 of the files that a push wrote."""

_NAME = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"


def parse(address: str) -> tuple[str, str]:
    """Return the kind of an address, `hf` or `mlflow`, and the name in it.

    Raises:
        ConfigError: the address has another form.
    """
    kind, _, name = address.partition("://")
    form = {"hf": rf"{_NAME}/{_NAME}", "mlflow": r"[\w](?:[\w. -]{0,254}[\w])?"}.get(kind)
    if form is None or not re.fullmatch(form, name) or ".." in name or "--" in name:
        raise ConfigError(f"{address!r} is not an address to push to. Write {ADDRESS_FORMS}")
    return kind, name


def write(folder: RunFolder, name: str, to: Path) -> list[str]:
    """Write the files of a run that may be published.

    If README.md was edited since the previous push, it is kept, and the new one is written as `README.new.md`.

    Args:
        name: the name of the model, for its card.
        to: a folder that is empty or missing, or contains a previous push.

    Returns:
        The files of the bundle that are left out, since they contain pickled data.

    Raises:
        CheckpointError: the run has no bundle, or a damaged one, or its files do not match its card.
        SetupError: the folder contains something else, or cannot be written.
    """
    if not folder.bundle_card.is_file():
        raise CheckpointError(f"{folder.path}: the run has no bundle to push. Make one: deeplightning export RUN")
    refuse_links(folder)
    from deeplightning.export.bundle import card_of  # imports ONNX

    card = card_of(folder)
    left_out = [file for file in card["files"] if not file.endswith(SAFE_EXTENSIONS)]
    for file, digest in card["files"].items():  # so that no other file of this machine is published instead
        if file != Path(file).name or _digest(folder.bundle / file) != digest:
            raise CheckpointError(
                f"{folder.bundle / file} is not the file that {folder.bundle_card.name} describes. "
                "Make the bundle again: deeplightning export RUN"
            )
    text = folder.bundle_card.read_text(encoding="utf-8")
    if left_out:
        from deeplightning.export.bundle import card_text

        card["files"] = {file: digest for file, digest in card["files"].items() if file not in left_out}
        text = card_text(card)
    try:
        before = _previous_files(to)
        contents = {"bundle/bundle.json": text, "cfg.yaml": public_config(folder)}
        contents[README] = model_card(folder, card, name, left_out)
        if (to / README).is_file() and before.get(README) not in (None, _digest(to / README)):
            contents["README.new.md"] = contents.pop(README)
        (to / "bundle").mkdir(parents=True, exist_ok=True)
        for file in before:
            if file != README:
                (to / file).unlink(missing_ok=True)
        for file in card["files"]:  # large, so it may fail: a card without its record would count as edited
            shutil.copyfile(folder.bundle / file, to / "bundle" / file)
        for file, content in contents.items():
            (to / file).write_text(content, encoding="utf-8")
        written = [*contents, *(f"bundle/{file}" for file in card["files"])]
        record = {README: before.get(README)} | {file: _digest(to / file) for file in written}
        (to / PUSH_RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{to}: the files of the run cannot be written: {error}") from error
    return left_out


def _previous_files(to: Path) -> dict[str, str | None]:
    """Return the names and digests of the files of a previous push, or {} if the folder is empty or missing.

    Raises:
        SetupError: the folder contains something else.
    """
    if not to.is_dir():
        return {}
    names: dict[str, str | None] = {name: str(digest) for name, digest in read_object(to / PUSH_RECORD).items()}
    if not names and any(to.iterdir()):
        raise SetupError(f"{to} is not empty and contains no previous push. Name another folder with --to")
    if any(not re.fullmatch(r"(?:bundle/)?\w[\w.-]*", name) for name in names):
        raise SetupError(f"{to / PUSH_RECORD} lists files that no push writes. Name another folder with --to")
    return names


def _digest(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---- Hugging Face


def upload(folder: RunFolder, repository: str) -> tuple[str, list[str]]:
    """Upload a run to Hugging Face; a new repository is private.

    Returns:
        The address of the repository, and the files that `write` leaves out.

    Raises:
        SetupError: there is no token, or the server refuses the upload.
        CheckpointError: as for `write`.
    """
    alternative = "or write the files into a folder: --to DIR"
    if not (token := os.environ.get("HF_TOKEN")):
        raise SetupError(f"HF_TOKEN is not set. Set it to a token that may write to {repository}, {alternative}")
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY"):
        os.environ.setdefault(name, "1")
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as temporary:
        left_out = write(folder, repository.partition("/")[2], Path(temporary))
        (Path(temporary) / PUSH_RECORD).unlink()
        try:
            api = HfApi(token=token)
            address = str(api.create_repo(repository, private=True, exist_ok=True))
            if any(file.rfilename == README for file in api.model_info(repository).siblings or ()):  # perhaps filled in
                Path(temporary, README).rename(Path(temporary, "README.new.md"))
            api.upload_folder(repo_id=repository, folder_path=temporary, commit_message="Push of a Deep Lightning run")
        except Exception as error:  # the client raises its own errors, httpx's and the system's
            reason = " ".join(str(error).replace(token, "***").split())[:300]
            raise SetupError(f"Upload to {repository} failed: {reason}. Check HF_TOKEN, {alternative}") from error
    return address, left_out


# ---- MLflow


def register(run: str, name: str) -> str:
    """Register the MLflow model of a run in the registry of its tracking store.

    If the run has no MLflow model, one is made from its bundle; this requires that its files are on this machine.

    Returns:
        `models:/NAME/VERSION`.

    Raises:
        CheckpointError: the run has no bundle.
        SetupError: the store of the run is unknown, or cannot be written.
    """
    from deeplightning.reproduce.past import past_run

    past = past_run(run)
    folder, store = past.folder, past.store
    if store is None or past.run_id is None:
        raise SetupError(
            f"{folder.path}: no known tracking store has this run, so there is no registry for it. "
            "Set MLFLOW_TRACKING_URI, or write the files into a folder: --to DIR"
        )
    from deeplightning.tracking.flavour import write_model
    from deeplightning.tracking.mlflow_store import attach
    from deeplightning.tracking.store import explain

    if not folder.model.is_dir():
        if not folder.bundle_card.is_file():
            raise CheckpointError(f"{folder.path}: the run has no bundle to push. Make one: deeplightning export RUN")
        if store.is_remote:
            raise SetupError(
                f"{folder.path}: the run has no MLflow model on {store.shown}. Train it with logger.log_model=true"
            )
        write_model(folder)
    uri = attach(store)
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        client: Any = MlflowClient(uri)
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = client.create_model_version(name, f"runs:/{past.run_id}/{folder.model.name}", past.run_id)
    except Exception as error:  # MLflow, SQLite and the network raise their own errors
        raise explain(error, store) from error
    return f"models:/{name}/{version.version}"
