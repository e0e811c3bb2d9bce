"""Images that cannot be decoded end a run with an error, or are skipped and counted, alike on every process."""

import json
import logging
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deeplightning.config.examine import load_config
from deeplightning.data.data_errors import DataError
from deeplightning.data.image_folder import ImageFolder
from deeplightning.run.assemble import init_module

BAD = ["cat/05.png", "dog/02.png", "dog/11.png"]
SKIP = "data.module.params.on_bad_image=skip"


@pytest.fixture
def root(tmp_path):
    """Two classes of 20 images, of which three cannot be decoded: truncated, empty, and not an image."""
    random = np.random.RandomState(0)
    for name in ("cat", "dog"):
        (tmp_path / "root" / name).mkdir(parents=True)
        for number in range(20):
            pixels = random.randint(0, 256, (12, 12), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "root" / name / f"{number:02}.png")
    first, second, third = (tmp_path / "root" / name for name in BAD)
    first.write_bytes(first.read_bytes()[:100])
    second.write_bytes(b"")
    third.write_text("no picture")
    return tmp_path / "root"


@pytest.fixture
def settings(root):
    """Overrides that make the tiny config train on these images."""
    folder = "deeplightning.data.image_folder.ImageFolder"
    module = f"data.module={{type: {folder}, params: {{image_size: 8, mode: L, cache: false}}}}"
    sizes = ["data.batch_size=4", "model.network.params.num_classes=2", "train.num_epochs=1"]
    return ["~data.module", module, f"data.root='{root}'", *sizes]


def module(tiny: Path, settings: list[str]) -> ImageFolder:
    """Return the data module, set up, with `on_bad_image: skip`."""
    made = init_module(load_config(tiny, [*settings, SKIP]), "data")
    made.setup()
    return made


def test_a_broken_file_ends_a_run_unless_it_is_skipped(tiny, settings, root, command, tmp_path):
    """By default a run ends with exit code 3 and names the first broken file; with `on_bad_image: skip` it succeeds,
    and one warning counts all broken files and names each with the reason."""
    refused = command("train", tiny, *settings, cwd=tmp_path, code=3)
    assert refused.err.count("error: ") == 1
    assert f"{root}/" in refused.err
    assert "cannot be used as an image" in refused.err
    trained = command("train", tiny, *settings, SKIP, cwd=tmp_path, code=0)
    (warning,) = [line for line in (trained.out + trained.err).splitlines() if "Skipped" in line]
    assert "Skipped 3 of 40 images" in warning
    assert [name for name in BAD if f"{root / name} (" not in warning] == []
    assert "it may be damaged or cut off" in warning


def test_the_other_images_are_divided_as_usual(tiny, settings, root, caplog):
    """Each valid image is in exactly one set; the sets are the same as without broken files, which give no warning."""
    data = module(tiny, settings)
    sets = [data.dataset(split) for split in ("train", "val", "test")]
    paths = sorted(path for dataset in sets for path in dataset.samples.items)
    assert paths == [path for path in sorted(map(str, root.rglob("*.png"))) if not path.endswith(tuple(BAD))]
    for dataset in sets:
        assert [Path(path).parent.name == "dog" for path in dataset.samples.items] == dataset.labels.tolist()
    for name in BAD:
        (root / name).unlink()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again = module(tiny, settings)
    assert [again.dataset(s).samples.items for s in ("train", "val", "test")] == [s.samples.items for s in sets]
    assert caplog.text == ""


def test_a_class_without_a_valid_image_is_named(tiny, settings, root):
    """A class whose images are all broken, or whose folder is empty, is an error with exit code 3."""
    for path in (root / "dog").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"no image of the class dog in .* can be decoded") as error:
        module(tiny, settings)
    assert error.value.exit_code == 3
    for path in (root / "dog").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"dog holds no image"):
        module(tiny, settings)


def sets_of_each_process() -> None:
    """Run in each process of a job: one file fails in the second process only, and each process records its sets."""
    from deeplightning.run.train import launch

    path, folder, *settings = sys.argv[1:]
    rank = os.environ["LOCAL_RANK"]
    setup, decoding_error = ImageFolder.setup, ImageFolder._decoding_error

    def record(self, stage=None):
        setup(self, stage)
        found = {split: list(self.dataset(split).samples.items) for split in ("train", "val", "test")}
        Path(folder, f"sets-{rank}.json").write_text(json.dumps(found))

    def fail(self, file):
        return "a disk error" if rank == "1" and file.endswith("cat/00.png") else decoding_error(self, file)

    ImageFolder.setup, ImageFolder._decoding_error = record, fail
    launch(load_config(path, [*settings, "engine.processes=2", SKIP]))


def test_every_process_skips_the_same_files(tiny, settings, command, tmp_path):
    """Rank 0 finds the broken files for all ranks: their sets are equal although one file fails on rank 1 only."""
    job = {"ranks": 2, "main": "test_bad_images:sets_of_each_process", "code": 0}
    command(tiny, tmp_path, *settings, cwd=tmp_path, **job)
    first, second = (json.loads((tmp_path / f"sets-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert sum(map(len, first.values())) == 37
