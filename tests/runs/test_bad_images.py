"""Files that cannot be decoded: an error that names one, or left out and counted, the same on every process."""

import json
import logging
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


@pytest.fixture
def root(tmp_path):
    """Two classes of 20 pictures, of which three cannot be decoded: cut off, empty, and of another kind."""
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
    """What makes a run of the tiny config learn from them."""
    folder = "deeplightning.data.image_folder.ImageFolder"
    module = f"data.module={{type: {folder}, params: {{image_size: 8, mode: L, cache: false}}}}"
    sizes = ["data.batch_size=4", "model.network.params.num_classes=2", "train.num_epochs=1"]
    return ["~data.module", module, f"data.root='{root}'", *sizes]


def module(tiny: Path, settings: list[str]) -> ImageFolder:
    """Return the data module, set up, that leaves broken files out."""
    made = init_module(load_config(tiny, [*settings, SKIP]), "data")
    made.setup()
    return made


SKIP = "data.module.params.on_bad_image=skip"


def test_a_broken_file_ends_a_run_unless_it_is_skipped(tiny, settings, root, command, tmp_path):
    """By default the first broken file is named, exit 3; with `on_bad_image: skip` the run ends well, and one warning
    counts all of them and names each with what is wrong."""
    refused = command("train", tiny, *settings, cwd=tmp_path, code=3)
    assert refused.err.count("error: ") == 1
    assert f"{root}/" in refused.err
    assert "cannot be used as an image" in refused.err
    trained = command("train", tiny, *settings, SKIP, cwd=tmp_path, code=0)
    told = [line for line in (trained.out + trained.err).splitlines() if "Skipped" in line]
    assert len(told) == 1
    assert "Skipped 3 of 40 images" in told[0]
    assert [name for name in BAD if f"{root / name} (" not in told[0]] == []
    assert "it may be damaged or cut off" in told[0]


def test_the_others_are_divided_as_ever(tiny, settings, root, caplog):
    """All that can be decoded is in one of the sets, once; nothing is skipped or said where nothing is broken."""
    data = module(tiny, settings)
    sets = [data.dataset(split) for split in ("train", "val", "test")]
    paths = sorted(path for dataset in sets for path in dataset.samples.items)
    whole = sorted(str(path) for path in root.rglob("*.png"))
    assert paths == [path for path in whole if not path.endswith(tuple(BAD))]
    for dataset in sets:
        assert [Path(path).parent.name == "dog" for path in dataset.samples.items] == dataset.labels.tolist()
    for name in BAD:
        (root / name).unlink()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again = module(tiny, settings)
    assert [again.dataset(s).samples.items for s in ("train", "val", "test")] == [s.samples.items for s in sets]
    assert caplog.text == ""


def test_a_class_without_a_whole_picture_is_named(tiny, settings, root):
    """Where nothing is left of a class, or its folder was empty, the class is named, exit 3."""
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
    """Called in each process of a job: a file breaks for the second process alone, and each notes its sets."""
    import os

    from deeplightning.run.train import launch

    path, folder, *settings = sys.argv[1:]
    rank = os.environ["LOCAL_RANK"]
    setup = ImageFolder.setup

    def noted(self, stage=None):
        setup(self, stage)
        found = {split: list(self.dataset(split).samples.items) for split in ("train", "val", "test")}
        Path(folder, f"sets-{rank}.json").write_text(json.dumps(found))

    decode = ImageFolder._decoding_error

    def stumbles(self, file):
        return "the disk stumbles" if rank == "1" and file.endswith("cat/00.png") else decode(self, file)

    ImageFolder.setup, ImageFolder._decoding_error = noted, stumbles
    launch(load_config(path, [*settings, "engine.processes=2", SKIP]))


def test_every_process_leaves_out_the_same(tiny, settings, command, tmp_path):
    """The first process looks, the others are told: their sets are equal though a disk stumbles for one of them."""
    job = {"ranks": 2, "main": "test_bad_images:sets_of_each_process", "code": 0}
    command(tiny, tmp_path, *settings, cwd=tmp_path, **job)
    first, second = (json.loads((tmp_path / f"sets-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert sum(map(len, first.values())) == 37
