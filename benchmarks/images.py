"""Load a folder of JPEGs for several epochs and runs: our data module beside torchvision's ImageFolder.

    .venv/bin/python benchmarks/images.py

draws 5,000 photos of 256 x 256 in five classes and loads them at 64 x 64, each way in fresh processes in turn. Prints a
Markdown table of CPU seconds (user and system, loader workers and threads included, imports not), and ends with 1 when
a second epoch or a second run of ours takes more than 0.15 of torchvision's epoch.

Each epoch ends in batches of 64 as float tensors on the scale 0 to 1. Ours are those of the sets for training,
validation and test, which are all the images together.
"""

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL
from PIL import Image

CLASSES, SIDE, QUALITY = 5, 256, 85
SIZE, BATCH = 64, 64
BOUND = 0.15
WAYS = {
    "ours, first run": "ours",
    "ours, second run": "ours",
    "torchvision": "theirs 0",
    "torchvision, 2 workers": "theirs 2",
    "ours without the cache, 2 workers": "ours 2",
}
"""Name, and whose loader with how many workers."""


def draw(folder: Path, count: int) -> None:
    """Return photos: pieces of scikit-learn's two at several scales, mirrored and with different brightness."""
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    random = np.random.RandomState(0)
    for number in range(count):
        photo = photos[number % 2]
        side = random.randint(160, 420)
        left, top = random.randint(photo.width - side + 1), random.randint(photo.height - side + 1)
        piece = photo.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
        pixels = np.asarray(piece)[:, :: random.choice([-1, 1])]
        light = random.uniform(0.6, 1.3, 3) + random.uniform(-0.2, 0.2) * np.linspace(-1, 1, SIDE)[:, None, None]
        place = folder / f"class {number % CLASSES}" / f"{number:05}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.clip(pixels * light, 0, 255).astype(np.uint8)).save(place, quality=QUALITY)


# ---- in a process of its own


def used() -> float:
    """Return the CPU seconds of this process and of those it waited for."""
    total = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in total)


def ours(root: str, workers: int) -> Iterable:
    from deeplightning.data.image_folder import ImageFolder

    data = {"root": root, "batch_size": BATCH, "num_splits": None, "fold": 0, "num_workers": workers, "loader": {}}
    params: dict[str, Any] = {}
    if workers:  # forked and ended like theirs, for the system to count them
        data["loader"] = {"multiprocessing_context": "fork", "persistent_workers": False}
        params = {"cache": False, "in_memory": False}
    module = ImageFolder(SimpleNamespace(seed=1, data=SimpleNamespace(**data)), image_size=SIZE, **params)
    module.setup()
    return [module.train_dataloader(), module.val_dataloader(), module.test_dataloader()]


def theirs(root: str, workers: int) -> Iterable:
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [transforms.Resize(SIZE), transforms.CenterCrop(SIZE), transforms.ToTensor()]
    images = ImageFolder(root, transforms.Compose(steps))
    return [DataLoader(images, batch_size=BATCH, shuffle=True, num_workers=workers)]


def epoch(loaders: Iterable) -> int:
    """Load every batch; return the number of images."""
    images = 0
    for loader in loaders:
        for batch in loader:
            image = batch["image"].float().div_(255) if isinstance(batch, dict) else batch[0]
            images += len(image)
    gc.collect()  # ends the workers, which count then
    return images


def measure(way: str, root: str) -> dict[str, float]:
    """Return the CPU seconds of the start with the first epoch, and of the second."""
    import torch
    import torchvision

    import deeplightning.data.image_folder

    del torchvision, deeplightning
    torch.set_num_threads(1)
    begun = used()
    whose, _, workers = way.partition(" ")
    loaders = {"ours": ours, "theirs": theirs}[whose](root, int(workers or 0))
    images = epoch(loaders)
    first = used()
    assert epoch(loaders) == images
    return {"first": first - begun, "second": used() - first, "images": images}


# ---- all of them


def in_process(way: str, root: Path, cache: Path) -> dict[str, float]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DEEPLIGHTNING_CACHE": str(cache)}
    env["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, __file__, "--measure", way, str(root)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{way} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--rounds", type=int, default=5, help="in which each way has its turn; default 5")
    words.add_argument("--images", type=int, default=5000, help="default 5000")
    words.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = words.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "images"
        draw(root, options.images)
        time.sleep(3)  # files are trusted by their times once those are two seconds old
        for number in range(options.rounds):
            for name, way in WAYS.items():
                found = in_process(way, root, Path(place) / f"cache {number}")
                assert found["images"] == options.images
                taken[name].append(found)
                print(f"round {number + 1}: {name} {found['first']:.2f} s", file=sys.stderr, flush=True)
    broken = report(taken)
    print("\n" + ("\n".join(f"- broken: {promise}" for promise in broken) or "All promises are kept."))
    sys.exit(1 if broken else 0)


def report(taken: dict[str, list[dict[str, float]]]) -> list[str]:
    """Print the table; return the promises that are not kept."""
    import torch
    import torchvision

    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}, Pillow {PIL.__version__}"
    print(f"Python {platform.python_version()}, {versions}\n")
    middle = {
        name: [statistics.median(one[part] for one in some) for part in ("first", "second")]
        for name, some in taken.items()
    }
    peer = middle["torchvision"]
    print("| CPU seconds | start and first epoch | to torchvision's | second epoch | to torchvision's |")
    print("|---|---:|---:|---:|---:|")
    for name, (first, second) in middle.items():
        print(f"| {name} | {first:.3f} | {first / peer[0]:.3f} | {second:.3f} | {second / peer[1]:.3f} |")
    shares = {"a second run": middle["ours, second run"][0] / peer[0]}
    shares["a second epoch"] = middle["ours, first run"][1] / peer[1]
    return [f"{what} takes {share:.3f}, not {BOUND}" for what, share in shares.items() if share > BOUND]


if __name__ == "__main__":
    main()
