"""Class folders, with or without `train`, `val` and `test` above them, shown with signals; pictures use the same
code."""

import shutil

import numpy as np
import pytest
from modules import data_config

from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.signal_folder import SignalFolder


def make(root, *names):
    """Write files with a signal each of two channels, the second of which is constant."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(root / name, np.array([[number, number + 1.5, 3], [0.1, 0.1, 0.1]]))


def signals(root):
    module = SignalFolder(data_config(root, seed=1))
    module.setup()
    return module


DIVIDED = [f"{split}/{name}/{n}.npy" for split in ("train", "val") for name in ("cat", "dog") for n in range(10)]


def test_sets_have_folders_of_their_own(tmp_path):
    """Files below `val` validate. Subfolders of a class are read; hidden files and other endings are ignored."""
    make(tmp_path, *DIVIDED, "train/cat/deep/x.npy", "train/.hidden/1.npy", "train/dog/.2.npy")
    (tmp_path / "train" / "dog" / "notes.txt").write_text("")
    module = signals(tmp_path)
    assert module.class_names == ["cat", "dog"]
    assert module.dataset("train").labels.bincount().tolist() == [11, 10]
    assert module.dataset("val").labels.bincount().tolist() == [10, 10]


@pytest.mark.parametrize(("train", "val"), [("Train", "valid"), ("training", "Validation"), ("TRAIN", "val")])
def test_sets_may_have_other_names(tmp_path, train, val):
    """Folders such as `Train` and `valid` are splits, not classes."""
    make(tmp_path, *(name.replace("train", train).replace("val", val) for name in DIVIDED))
    module = signals(tmp_path)
    assert module.class_names == ["cat", "dog"]
    assert module.dataset("val").labels.bincount().tolist() == [10, 10]


def test_a_class_may_be_called_train(tmp_path):
    """A folder `train` that contains files is a class, even if it also has subfolders."""
    make(tmp_path, *(f"{name}/{n}.npy" for name in ("train", "car") for n in range(10)), "train/old/1.npy")
    assert signals(tmp_path).class_names == ["car", "train"]


def test_an_address_is_refused():
    """An address as `data.root` is one error, which says what to do."""
    with pytest.raises(DataConfigError, match=r"data\.root: .* is an address\. Copy the data to this machine first"):
        signals("s3://bucket/signals")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda root: shutil.rmtree(root / "val" / "dog"), r"val must have the same classes as .* they differ in dog"),
        (lambda root: (root / "val" / "emu").mkdir(), r"same classes .* they differ in emu"),
        (lambda root: (root / "train" / "emu").mkdir(), r"train/emu holds no signal \(\.npy, \.csv, \.wav\)"),
        (lambda root: (root / "train" / "\udcffcat").mkdir(), r"the folder '\\udcffcat' is not UTF-8. Rename it"),
        (lambda root: shutil.rmtree(root), "is not a folder. Set data.root to the one that holds the signals"),
    ],
)
def test_an_unusable_folder_is_named(tmp_path, change, words):
    """The error has the path and exit code 3."""
    make(tmp_path / "root", *DIVIDED)
    change(tmp_path / "root")
    with pytest.raises(DataError, match=words) as error:
        signals(tmp_path / "root")
    assert error.value.exit_code == 3


def test_other_files_are_counted(tmp_path, caplog):
    """A log line counts ignored files by ending, so that nobody trains on a part of the data unknowingly; hidden files
    are not counted."""
    make(tmp_path, *DIVIDED)
    for name in ("a.npz", "b.npz", "README", ".hidden"):
        (tmp_path / "train" / "cat" / name).touch()
    signals(tmp_path)
    assert f"Files ignored in {tmp_path / 'train'}, by ending: .npz (2), no ending (1)" in caplog.text


def test_mean_and_deviation_of_each_channel(tmp_path):
    """They are computed from the training signals only; a constant channel has the deviation 1."""
    make(tmp_path, *DIVIDED)
    module = signals(tmp_path)
    train = np.stack([np.load(tmp_path / name) for name in DIVIDED if name.startswith("train")])
    np.testing.assert_allclose(module.array_spec.mean, train.mean((0, 2)), rtol=1e-12)
    assert module.array_spec.std == pytest.approx((train[:, 0].std(), 1.0), rel=1e-12)


def test_the_folder_that_each_ext4_disk_has_is_no_class(tmp_path):
    """`lost+found` is at the top of a mounted volume."""
    make(tmp_path, *(f"{name}/{n}.npy" for name in ("cat", "dog") for n in range(10)))
    (tmp_path / "lost+found").mkdir()
    assert signals(tmp_path).class_names == ["cat", "dog"]


def test_the_runs_of_a_project_inside_its_data_are_no_class(tmp_path):
    """After `init . --data .` the store and Python's cache are beside the classes."""
    make(tmp_path, *(f"{name}/{n}.npy" for name in ("cat", "dog") for n in range(10)))
    make(tmp_path, "mlruns/0/a/artifacts/x.npy", "__pycache__/x.npy")
    assert signals(tmp_path).class_names == ["cat", "dog"]
