"""The cache of decoded images decodes each file once, never returns stale pixels, and a run works without it."""

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import shutil
import time
from pathlib import Path

import numpy as np
import PIL
import pytest
import torch
from modules import data_config
from PIL import Image

from deeplightning.data import cache as cache_module
from deeplightning.data import cache_files, datasets
from deeplightning.data.cache_files import cache_folder
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.datasets import InMemory, OnDemand, Samples
from deeplightning.data.image_folder import ImageFolder
from deeplightning.data.images import ImageData
from deeplightning.image_spec import ImageSpec

COUNT = 36  # images in `root`
ROW = 3 * 8 * 8  # bytes of one, prepared


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of the cache."""
    monkeypatch.setenv("DEEPLIGHTNING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path):
    """Pictures of noise in three classes."""
    for number in range(COUNT):
        draw(tmp_path / "root" / "abc"[number % 3] / f"{number:03}.bmp", number)
    return tmp_path / "root"


def draw(path: Path, number: int) -> None:
    pixels = np.random.RandomState(number).randint(0, 256, (20, 24, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def decoded(monkeypatch):
    """Every decoded file, or its number of bytes, in order."""
    calls = []
    decode = ImageSpec.decode

    def counted(self, data, *args):
        calls.append(len(data) if isinstance(data, bytes) else data)
        return decode(self, data, *args)

    monkeypatch.setattr(ImageSpec, "decode", counted)
    return calls


def ready(root: Path, stage=None, **params) -> ImageFolder:
    module = ImageFolder(data_config(root, seed=1, batch_size=8), **({"image_size": 8} | params))
    module.setup(stage)
    return module


def pictures(module: ImageData) -> dict[str, tuple[int, bytes]]:
    """Return the label and pixels of each path, as the loaders give them."""
    found = {}
    for split in ("train", "val", "test"):
        items = module.dataset(split).samples.items
        for batch in getattr(module, f"{split}_dataloader")():
            for image, label, index in zip(batch["image"], batch["label"], batch["index"], strict=True):
                found[items[index]] = (label.item(), image.numpy().tobytes())
    return found


def right(root: Path, **params) -> dict[str, tuple[int, bytes]]:
    """Return the same from files that are decoded without a cache."""
    return pictures(ready(root, in_memory=True, cache=False, **params))


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def folders(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_dir()}


def only(cache: Path) -> Path:
    """Return the only folder in the cache."""
    (name,) = folders(cache)
    return cache / name


def test_decoded_once(root, cache, decoded):
    """The first start decodes each file once, a later one none; cached pictures equal decoded ones."""
    first = ready(root)
    assert len(decoded) == COUNT
    again = ready(root)
    assert len(decoded) == COUNT
    assert pictures(first) == pictures(again) == right(root)
    assert files_in(only(cache)) == ["index", "pixels"]
    assert (only(cache) / "pixels").stat().st_size == COUNT * ROW


def test_another_seed_or_fold_decodes_nothing(root, decoded):
    """All splits share the cached rows."""
    ready(root, "test")
    assert len(decoded) == COUNT
    for seed, folds in itertools.product((2, 3), (None, 4)):
        module = ImageFolder(data_config(root, seed, batch_size=8, num_splits=folds), image_size=8)
        module.setup()
        assert pictures(module) == right(root)
    assert len(decoded) == COUNT + 4 * COUNT  # those of `right`


def in_place(path: Path) -> None:
    """Change the content of a file, not its size, and restore its times."""
    status = path.stat()
    with Image.open(path) as image:
        pixels = 255 - np.asarray(image)
    Image.fromarray(pixels).save(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def by_another(path: Path) -> None:
    """Replace a file by another of the same size and times."""
    beside = path.with_name(".beside.bmp")
    shutil.copy2(path, beside)
    in_place(beside)
    beside.replace(path)


@pytest.mark.parametrize("change", [in_place, by_another])
def test_another_content_is_decoded(root, decoded, change):
    """A changed file is decoded again, even if its size and modification time are the same."""
    before = pictures(ready(root))
    path = root / "b" / "001.bmp"
    status = path.stat()
    change(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    decoded.clear()
    after = pictures(ready(root))
    assert len(decoded) == COUNT
    assert [path for path in after if after[path] != before[path]] == [str(path)]
    assert after == right(root)


def test_a_damaged_or_missing_file_is_named(root):
    """As without a cache, the error has the path and exit code 3."""
    (root / "a" / "009.bmp").write_bytes(b"no image")
    (root / "b" / "001.bmp").write_bytes(b"")
    with pytest.raises(DataError, match=r"root/\w/\d+\.bmp: cannot be used as an image\.") as error:
        ready(root)
    assert error.value.exit_code == 3
    (root / "c" / "gone.bmp").symlink_to(root / "nowhere")
    with pytest.raises(DataError, match=r"c/gone\.bmp: cannot be used as an image\. \[Errno 2\] No such file"):
        ready(root)


SPEC = {"height": 8, "width": 8, "mode": "RGB", "resize": "crop"}


@pytest.mark.parametrize(
    "change", [{"width": 9}, {"mode": "L"}, {"resize": "pad"}, {"max_pixels": 9}, "Pillow", "decoder", "code"]
)
def test_another_rule_has_another_folder(tmp_path, monkeypatch, change):
    """The folder's name depends on everything that determines the pixels; mean and deviation do not."""

    def rule(max_pixels=10, **spec):
        return cache_module.rule_of(ImageSpec(**(SPEC | spec)), max_pixels)

    before = rule()
    assert before == rule(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    if change == "Pillow":
        monkeypatch.setattr(PIL, "__version__", "99.0")
    elif change == "decoder":
        monkeypatch.setattr(cache_module.features, "version", lambda name: "0")
    elif change == "code":
        (tmp_path / "image_spec.py").write_text("# another rule\n")
        monkeypatch.setattr(cache_module.image_spec, "__file__", str(tmp_path / "image_spec.py"))
    assert before != rule(**(change if isinstance(change, dict) else {}))


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 4
    path.write_bytes(data)


def shorten(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def swap(path: Path, record: np.dtype) -> None:
    """Exchange two words of the first picture."""
    content = np.frombuffer(bytearray(path.read_bytes()), record)
    content[0][[3, 8]] = content[0][[8, 3]]
    path.write_bytes(content.tobytes())


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("pixels", lambda path: flip(path, 0.6)),
        ("pixels", lambda path: path.write_bytes(bytes(path.stat().st_size))),
        ("pixels", lambda path: shorten(path, 10 * ROW)),
        ("pixels", lambda path: path.unlink()),
        ("pixels", lambda path: path.write_bytes(path.read_bytes() + b"more")),
        ("pixels", lambda path: swap(path, np.dtype(("<u8", ROW // 8)))),
        ("index", lambda path: flip(path, 0.5)),
        ("index", lambda path: shorten(path, 5)),
        ("index", lambda path: shorten(path, 4 * 20)),
        ("index", lambda path: path.write_bytes(b"")),
        ("index", lambda path: path.unlink()),
    ],
)
def test_damage(root, cache, name, damage):
    """A cache file that is truncated, altered or deleted is rebuilt once; a process that has mapped the old file is not
    affected."""
    wanted = pictures(ready(root))
    running = ready(root) if name != "pixels" else None
    damage(only(cache) / name)
    assert pictures(ready(root)) == wanted
    assert running is None or pictures(running) == wanted
    before = files_in(cache)
    assert pictures(ready(root)) == wanted
    assert before == files_in(cache)


@pytest.mark.parametrize("how", ["of another user", "group", "everybody", "link"])
def test_what_another_user_could_have_written_is_not_used(root, cache, how, monkeypatch, caplog, decoded):
    """A folder that others can write to is neither read nor changed: a warning names it, and the images are decoded,
    those of a copy too."""
    expected = pictures(ready(root))
    folder = only(cache)
    if how == "of another user":  # only root can change an owner, so the test fakes it
        lstat = Path.lstat

        def faked(path):
            status = lstat(path)
            return os.stat_result((*status[:4], os.geteuid() + 1, *status[5:])) if path == folder else status

        monkeypatch.setattr(Path, "lstat", faked)
    elif how == "link":
        folder.rename(cache.parent / "moved")
        folder.symlink_to(cache.parent / "moved")
    else:
        folder.chmod(0o720 if how == "group" else 0o702)
    held = {path: path.read_bytes() for path in folder.iterdir()}
    decoded.clear()
    caplog.clear()
    assert pictures(ready(root)) == expected
    assert f"Decoded images are not cached in {cache}: {folder} is not used: others may write into it" in caplog.text
    assert {path: path.read_bytes() for path in folder.iterdir()} == held
    copied = shutil.copytree(root, root.with_name("copied"))
    assert set(pictures(ready(copied)).values()) == set(expected.values())
    assert len(decoded) == 2 * COUNT


def test_check_sums_of_large_sets(root, cache, monkeypatch, caplog):
    """In a set above the limit, evenly spaced rows are verified, with the first and the last."""
    wanted = pictures(ready(root))
    monkeypatch.setattr(cache_module, "CHECKSUM_BYTES", 5 * ROW)
    for place, is_noticed in ((0, True), (1, True), (5.5 / COUNT, False)):
        ready(root)  # rebuilds the cache
        caplog.clear()
        flip(only(cache) / "pixels", place)
        found = pictures(ready(root))
        assert ("is damaged and is rebuilt" in caplog.text) is is_noticed
        assert (found == wanted) is is_noticed


@pytest.fixture
def in_chunks(monkeypatch):
    """Decode four pictures at a time, in one thread."""
    monkeypatch.setattr(cache_module, "_CHUNK_BYTES", 4 * ROW)
    monkeypatch.setattr(datasets, "threads", lambda: 1)


def forked(work, count: int) -> list[int]:
    """Return the exit codes of processes that do the work at the same time."""
    children = []
    for number in range(count):
        if (child := os.fork()) == 0:
            code = 99
            with contextlib.suppress(BaseException):
                code = work(number)
            os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_interrupted(root, decoded, monkeypatch, in_chunks):
    """Ctrl-C ends the decoding, and the next start decodes all images again."""
    decode = ImageSpec.decode

    def interrupted(self, data, *args):
        if len(decoded) == 20:
            raise KeyboardInterrupt
        return decode(self, data, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ImageSpec, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ready(root)
    module = ready(root)
    assert len(decoded) == 20 + COUNT
    assert pictures(module) == right(root)


def test_killed(root, cache, decoded, monkeypatch):
    """The incomplete files of a killed process are ignored and removed."""

    def dies(data, file, content):
        data.with_name("index.new").write_bytes(content[:100])
        os._exit(9)

    def work(number):
        monkeypatch.setattr(cache_files, "write_index", dies)
        ready(root)

    assert forked(work, 1) == [9]
    module = ready(root)
    assert len(decoded) == COUNT
    assert pictures(module) == right(root)
    assert files_in(only(cache)) == ["index", "pixels"]


def test_a_full_disk(root, cache, monkeypatch, caplog):
    """A full disk is reported once, leaves no incomplete files, and the set is kept in memory."""

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        module = ready(root)
    assert caplog.messages == [f"Decoded images are not cached in {cache}: No space left on device."]
    assert pictures(module) == right(root)
    assert isinstance(module.dataset("train"), InMemory)
    assert module.in_memory is True
    assert folders(cache) == set()
    assert pictures(ready(root)) == right(root)


def test_processes_at_once(root, decoded, in_chunks):
    """If four processes start together, one of them decodes each image, and all have the same pictures."""
    wanted = right(root)
    decoded.clear()

    def work(number):
        return 98 if pictures(ready(root)) != wanted else len(decoded)

    codes = forked(work, 4)
    assert max(codes) < 98
    assert sum(codes) == COUNT
    decoded.clear()
    assert pictures(ready(root)) == wanted
    assert decoded[COUNT:] == []


def per_row(size: int) -> int:
    return 3 * size * size + 4  # and its checksum


def test_the_longest_unused_is_removed(root, cache, monkeypatch, caplog):
    """Above the size limit the least recently used folder is removed, unless a process uses it."""
    made = {}
    for size in (8, 9, 10):
        before = folders(cache) if cache.exists() else set()
        made[size] = ready(root, image_size=size), *(folders(cache) - before)
    for age, size in enumerate((9, 10, 8)):
        os.utime(cache / made[size][1] / "pixels", (time.time() - 100 + age,) * 2)
    names = {size: name for size, (_, name) in made.items()}
    used = made[9][0]
    del made
    limit = COUNT * (per_row(8) + per_row(9) + per_row(11)) + 1000
    monkeypatch.setenv("DEEPLIGHTNING_CACHE_LIMIT", str(limit / 2**30))
    with caplog.at_level(logging.INFO):
        ready(root, image_size=11)
    remaining = folders(cache)
    assert {names[8], names[9]} < remaining  # the oldest is in use
    assert names[10] not in remaining
    assert "least recently used" in caplog.text
    assert pictures(used) == right(root, image_size=9)
    monkeypatch.setenv("DEEPLIGHTNING_CACHE_LIMIT", str(COUNT * per_row(12) / 2**30))
    module = ready(root, image_size=12)
    assert isinstance(module.dataset("train"), InMemory)
    assert module.dataset("train").rows is None
    assert "allow beside the folders in use" in caplog.messages[-1]


def test_a_set_that_is_too_large(root, cache, monkeypatch, caplog):
    """A set above the size limit is decoded batch by batch, as without a cache, and one log line says why."""
    monkeypatch.setenv("DEEPLIGHTNING_CACHE_LIMIT", "0.000001")
    module = ready(root, in_memory=False)
    assert isinstance(module.dataset("train"), OnDemand)
    assert len(caplog.messages) == 1
    assert "36 images take 6.57e-06 GiB, more than DEEPLIGHTNING_CACHE_LIMIT (1e-06 GiB)" in caplog.text
    assert pictures(module) == right(root)
    assert folders(cache) == set()
    for value in ("much", "-1", "nan"):
        monkeypatch.setenv("DEEPLIGHTNING_CACHE_LIMIT", value)
        with pytest.raises(DataConfigError, match=f"DEEPLIGHTNING_CACHE_LIMIT must be a number of GiB, not '{value}'"):
            ready(root, in_memory=False)


def test_deleted_while_in_use(root, cache, decoded):
    """If the cache is deleted during a run, the run continues, and the next start decodes again."""
    module = ready(root)
    shutil.rmtree(cache)
    assert pictures(module) == right(root)
    decoded.clear()
    ready(root)
    assert len(decoded) == COUNT


def test_what_else_is_in_the_folder_is_left_alone(root, cache, monkeypatch):
    """A cache folder may contain unrelated files, which are never removed."""
    others = [cache / "holidays" / "pixels", cache / "holidays" / "rows", cache / "holidays" / "lock", cache / "notes"]
    (cache / "holidays").mkdir(parents=True)
    for path in others:
        path.write_bytes(b"x" * 100)
    ready(root)
    monkeypatch.setenv("DEEPLIGHTNING_CACHE_LIMIT", str(COUNT * per_row(9) / 2**30))
    ready(root, image_size=9)
    assert len(folders(cache)) == 2
    assert all(path.read_bytes() == b"x" * 100 for path in others)


class Own(ImageData):
    """A user's data module that gives paths, without `data.root`."""

    def __init__(self, cfg, folder, **options):
        super().__init__(cfg, ImageSpec(8, 8), **options)
        self.folder = folder
        self.class_names = ["a"]

    def read(self):
        paths = [str(path) for path in sorted(self.folder.rglob("*.bmp"))]
        return {"all": Samples(paths, np.zeros(len(paths), dtype=np.int64))}


def test_own_data(root, cache, decoded):
    """A user's subclass that gives paths uses the cache, unless `cache=False`."""
    for _ in range(2):
        module = Own(data_config(batch_size=8), root)
        module.setup()
        assert len(decoded) == COUNT
    without = Own(data_config(batch_size=8), root, cache=False)
    without.setup()
    assert pictures(module) == pictures(without)


@pytest.mark.parametrize(
    ("param", "variable", "expected"),
    [
        (True, None, "xdg/deeplightning/images"),
        (True, "", "xdg/deeplightning/images"),
        (True, "named", "named"),
        (True, "off", None),
        ("given", "off", "given"),
        ("~/given", None, "home/given"),
        (False, "named", None),
    ],
)
def test_the_folder_of_the_cache(tmp_path, monkeypatch, param, variable, expected):
    """The param takes precedence over DEEPLIGHTNING_CACHE, which takes precedence over the user's cache folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DEEPLIGHTNING_CACHE")
    if variable is not None:
        monkeypatch.setenv("DEEPLIGHTNING_CACHE", variable)
    assert cache_folder(param) == (expected and tmp_path / expected)


def test_the_home_of_a_user(tmp_path, monkeypatch):
    """Without XDG_CACHE_HOME the cache is in ~/.cache; a user without a home directory has none."""
    for name in ("DEEPLIGHTNING_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(True) == tmp_path / ".cache" / "deeplightning" / "images"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # so pathlib finds no home
    assert cache_folder(True) is None


def test_a_gpu(root, monkeypatch):
    """Batches for a GPU are pinned unless the config says otherwise; `in_memory: device` builds them on the GPU, here
    torch's "meta" device, which has shapes and no values."""
    assert ready(root, in_memory="device").train_dataloader().dataset.large["image"].device.type == "cpu"
    module = ready(root)
    assert module.train_dataloader().pin_memory is False
    monkeypatch.setattr(ImageData, "_gpu", lambda self: torch.device("meta"))
    assert module.train_dataloader().pin_memory is True
    module = ImageFolder(data_config(root, seed=1, batch_size=8, loader={"pin_memory": False}), image_size=8)
    module.setup()
    assert module.train_dataloader().pin_memory is False
    module = ready(root, in_memory="device")
    loader = module.train_dataloader()
    assert loader.pin_memory is False
    batch = next(iter(loader))
    assert {values.device.type for values in batch.values()} == {"meta"}
    assert [tuple(batch[name].shape) for name in ("image", "label", "index")] == [(8, 3, 8, 8), (8,), (8,)]
    assert module.dataset("val").large["image"].device.type == "cpu"


def test_caches_on_nfs_are_written_and_removed(root, cache, monkeypatch, caplog):
    """NFS 4 shares a lock only on a file that is open for reading, and excludes only on one open for writing."""

    def flock(file, operation, lock=fcntl.flock):
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        lacks = (fcntl.LOCK_SH, os.O_WRONLY), (fcntl.LOCK_EX, os.O_RDONLY)
        if any(operation & kind and mode == wrong for kind, wrong in lacks):
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    wanted, module = right(root), ready(root)
    first = only(cache).name
    assert pictures(module) == wanted
    del module
    monkeypatch.setenv("DEEPLIGHTNING_CACHE_LIMIT", str((COUNT * per_row(9) + 1000) / 2**30))
    ready(root, image_size=9)
    assert only(cache).name != first
    assert "not cached" not in caplog.text
