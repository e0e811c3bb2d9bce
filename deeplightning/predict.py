"""Image files and a run become a table: what its network sees in each, computed with the checkpoint itself."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import torch

from deeplightning.config.fault import CheckpointError, SetupError
from deeplightning.image import ImageError
from deeplightning.runfolder import RunFolder
from deeplightning.trained import trained_task

BATCH = 32


def predict_files(folder: RunFolder, images: Sequence[Path], out: TextIO, allow: Sequence[str] = ()) -> None:
    """Writes a CSV row per image file, in order: path, predicted_class, predicted_label, predicted_probability.

    Args:
        allow: modules that the config of a foreign run may name.

    Raises:
        SetupError: a file is missing or no image; every such file is named.
        CheckpointError: the run has no weights that can be used, or does not say what it sees in pictures.
    """
    task, cfg, _ = trained_task(folder, allow, "predict")
    if (kind := getattr(task, "kind", type(task).__name__)) != "image_classification":
        raise CheckpointError(
            f"{folder.path}: this run is of {kind}, and only image_classification answers to image files with a table. "
            "Leave them out for the run's test set, or serve the run with `bash deploy.sh`"
        )
    spec, names = task.image_spec, task.class_names
    model = task.inference_model()
    faults, pixels = [], []
    for path in images:
        try:
            pixels.append(torch.from_numpy(spec.decode(path, max_pixels=cfg.serve.max_pixels)).permute(2, 0, 1))
        except (ImageError, OSError) as error:
            faults.append(f"{path}: {error}")
    if faults:
        raise SetupError("\n".join(faults))
    writer = csv.writer(out)
    writer.writerow(["path", "predicted_class", "predicted_label", "predicted_probability"])
    for start in range(0, len(pixels), BATCH):
        with torch.inference_mode():
            probability, predicted = model(torch.stack(pixels[start : start + BATCH])).max(1)
        for path, number, p in zip(images[start:], predicted.tolist(), probability.tolist(), strict=False):
            writer.writerow([path, number, names[number], p])
