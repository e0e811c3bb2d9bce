"""Pictures in tar shards are indexed in one pass, read shard by shard, once per epoch, and resumed bit-identically."""

import functools
import io
import itertools
import json
import logging
import pickle
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import PIL
import pytest
from conftest import digest
from modules import data_config, on_rank
from PIL import Image
from sklearn.datasets import load_digits

from deeplightning.data.data_errors import DataConfigError, DataError

module = pytest.importorskip("deeplightning_shards.tar_files")
parts = pytest.importorskip("deeplightning_shards.data")
expand, ShardBatches, Shards = module.expand, parts.ShardBatches, parts.Shards

SAMPLES_PER_SHARD = 25


def encoded(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def write(path, members):
    """Write a tar file with these names and contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return path


def digits(numbers):
    """Yield the members of digits; every third label is in JSON."""
    pictures, labels = load_digits(return_X_y=True)
    for n in numbers:
        yield f"{n:05}.png", encoded((pictures[n].reshape(8, 8) * 15).astype(np.uint8))
        label = json.dumps({"label": int(labels[n])}) if n % 3 == 0 else f"{labels[n]}\n"
        yield (f"{n:05}.json" if n % 3 == 0 else f"{n:05}.cls"), label.encode()


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """Eight training shards of digits, and one each for validation and test."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(8):
        write(folder / f"train-{shard:03}.tar", digits(range(shard * 25, (shard + 1) * 25)))
    write(folder / "val.tar", digits(range(200, 220)))
    write(folder / "test.tar", digits(range(220, 240)))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("a user")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


TRAIN = "train-{000..007}.tar"


def ready(root, train=TRAIN, *, workers=0, batch=8, seed=1, stage=None, **params):
    cfg = data_config(root, seed, batch_size=batch, num_workers=workers)
    found = Shards(cfg, train, **({"image_size": 8, "mode": "L"} | params))
    found.setup(stage)
    return found


def samples(batches):
    """Return index, label and pixels of each sample, in order."""
    return [
        (index, label, image.numpy().tobytes())
        for batch in batches
        for index, label, image in zip(batch["index"].tolist(), batch["label"].tolist(), batch["image"], strict=True)
    ]


# ---- finding shards


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{8..11}.tar", ["a-8.tar", "a-9.tar", "a-10.tar", "a-11.tar"]),
        ("{a,b}/{00..01}.tar", ["a/00.tar", "a/01.tar", "b/00.tar", "b/01.tar"]),
    ],
)
def test_a_pattern_stands_for_names(pattern, names):
    """Ranges keep leading zeros, and several braces give all combinations."""
    assert expand(pattern) == names


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"train": "train-{000..009}.tar"}, r"no shard train-008.tar \(data.module.params.train; 8 of its 10 names"),
        ({"train": "x-*.tar"}, r"no shard x-\*.tar .* It has test.tar, train-000.tar, train-001.tar …"),
        ({"validation": "valid.tar"}, r"no shard valid.tar \(data.module.params.validation"),
        ({"validation": "train-000.tar"}, "train-000.tar is in both train and val: a shard belongs to one set"),
        ({"train": "train-{5..2}.tar"}, "data.module.params.train: {5..2} runs backwards"),
        ({"train": "train-{0..9999999}.tar"}, "is more than 1,000,000 names"),
        ({"train": "train-000.tar.gz"}, "must end in .tar: shards are plain tar files"),
        ({"train": "../train-000.tar"}, "is not inside data.root"),
        ({"train": []}, "must be the name of a shard, a pattern or a list"),
        ({"train": ["val.tar", "val.tar"]}, "val.tar is named twice"),
        ({"train": ["train-*.tar", "train-000.tar"]}, "train-000.tar is named twice"),
        ({"window": 0}, "window must be a number of at least 1, not 0"),
        ({"on_bad_sample": "ignore"}, "on_bad_sample must be error or skip, not 'ignore'"),
        ({"class_names": ["a", "a"]}, "class_names must be different names"),
        ({"class_names": ["nought", "one"]}, "its label '2' is not a class; the classes are nought, one"),
    ],
)
def test_what_is_typed_wrong_is_named(params, words, tars):
    """Patterns without a match, overlapping sets and impossible values end with an error that has the key or the
    available shards."""
    with pytest.raises((DataConfigError, DataError), match=words):
        ready(tars, **params)


def test_samples_are_those_of_the_archives(tars):
    """Pixels and labels of all sets, in data order, equal those in the shards; classes are sorted by number."""
    found = ready(tars, validation="val.tar", test="test.tar")
    pictures, labels = load_digits(return_X_y=True)
    assert found.class_names == [str(n) for n in range(10)]
    for split, first, last in (("train", 0, 200), ("val", 200, 220), ("test", 220, 240)):
        batch = found.dataset(split)[np.arange(last - first)]
        np.testing.assert_array_equal(batch["label"], labels[first:last])
        np.testing.assert_array_equal(batch["image"].numpy().reshape(-1, 64), (pictures[first:last] * 15).astype("u1"))
    names = ready(tars, class_names=[f"digit {n}" for n in range(10)])
    assert names.class_names[3] == "digit 3"
    assert sum(map(len, (names.dataset(split) for split in ("train", "val", "test")))) == 200


# ---- order


@pytest.mark.slow
def test_each_sample_once_an_epoch_in_an_order_of_seed_and_epoch(tars):
    """The order is the same with loader workers; samples within a window come from few shards."""
    one, other = ready(tars, validation="val.tar", window=50), ready(tars, validation="val.tar", window=50, workers=1)
    first = samples(one.train_dataloader())
    assert first == samples(other.train_dataloader())
    assert sorted(index for index, *_ in first) == [*range(200)]
    sampler = one.train_dataloader().sampler
    sampler.set_epoch(1)
    second = np.concatenate([*sampler.arrays()])
    assert sorted(second) == [*range(200)]
    assert second.tolist() != [index for index, *_ in first]
    assert all(len({*(second[at : at + 50] // SAMPLES_PER_SHARD)}) <= 2 for at in range(0, 200, 50))
    assert samples(ready(tars, validation="val.tar", window=50, seed=2).train_dataloader()) != first


@pytest.mark.parametrize("world", [1, 2, 3, 16, 300])
def test_processes_have_parts_of_their_own(world, tars):
    """Each sample occurs once over all processes, all have the same number of batches, and each reads only the shards
    of its part, also with more processes than shards or samples."""
    dataset = ready(tars, validation="val.tar").dataset("train")
    parts = []
    for rank in range(world):
        sampler = ShardBatches(dataset, 4, 50, num_replicas=world, rank=rank, seed=1)
        batches = [*sampler.arrays()]
        assert len(batches) == len(sampler)
        parts.append(np.concatenate(batches))
        assert len({*(parts[-1][parts[-1] >= 0] // SAMPLES_PER_SHARD)}) <= -(-8 // world) + 1
    together = np.concatenate(parts)
    assert sorted(together[together >= 0]) == [*range(200)]


def test_fewer_shards_than_processes(tars, caplog):
    """A warning has both numbers, and the run trains."""
    found = on_rank(ready(tars, "train-000.tar", validation="val.tar", test="test.tar"), world=2)
    assert len(samples(found.train_dataloader())) == 13
    assert "There are 1 training shards for 2 processes" in caplog.text


# ---- damaged shards


def good(n):
    return [(f"{n}.png", encoded(np.full((8, 8), n, np.uint8))), (f"{n}.cls", b"cat")]


@pytest.mark.parametrize(
    ("member", "words"),
    [
        ([("b.png", b"")], r"bad.tar, sample b: the label is missing: .cls or .json; it has .png"),
        ([("b.cls", b"cat")], "sample b: no pictures"),
        ([("b.png", b""), ("b.jpg", b""), ("b.cls", b"cat")], "sample b: 2 pictures"),
        ([("b.png", b""), ("b.cls", b" ")], "b.cls is empty"),
        ([("b.png", b""), ("b.json", b"{")], "b.json is not JSON"),
        ([("b.png", b""), ("b.json", b'{"class": 3}')], "b.json has no integer or text under 'label'"),
        ([("b.png", b""), ("b.json", b"[" * 100_000)], "b.json is not JSON"),
        ([("b.png", b""), ("b.cls", "B\u00e4r".encode("latin-1"))], "sample b: 'utf-8' codec can't decode"),
    ],
)
def test_an_incomplete_sample_is_an_error_or_skipped(member, words, tmp_path, caplog):
    """The error has shard and key, and exit code 3; a skipped sample is counted in a warning."""
    members = [pair for n in range(15) for pair in good(n)]
    write(tmp_path / "bad.tar", members[:8] + member + members[8:])
    with pytest.raises(DataError, match=words) as caught:
        ready(tmp_path, "bad.tar")
    assert caught.value.exit_code == 3
    with caplog.at_level(logging.WARNING):
        found = ready(tmp_path, "bad.tar", on_bad_sample="skip")
    assert "Skipped 1 unusable samples: bad.tar, sample b (" in caplog.text
    assert sum(len(found.dataset(split)) for split in ("train", "val", "test")) == 15


def test_a_picture_that_cannot_be_decoded(tmp_path, caplog):
    """The batch that contains it ends with an error that has shard, member and remedy; `skip` leaves it out."""
    members = [pair for n in range(15) for pair in good(n)]
    write(tmp_path / "bad.tar", [*members, ("b.png", b"no picture"), ("b.cls", b"cat")])
    found = ready(tmp_path, "bad.tar")
    loaders = itertools.chain(found.train_dataloader(), found.val_dataloader(), found.test_dataloader())
    with pytest.raises(DataError, match=r"bad.tar, member b.png: cannot be used as an image.*on_bad_sample=skip"):
        list(loaders)
    found = ready(tmp_path, "bad.tar", on_bad_sample="skip")
    assert sum(len(found.dataset(split)) for split in ("train", "val", "test")) == 15
    assert "bad.tar, sample b" in caplog.text


@pytest.mark.parametrize("ending", module.PICKLE_EXTENSIONS)
def test_pickles_are_refused(ending, tmp_path):
    """A member that requires pickle is an error even with `skip`."""
    write(tmp_path / "bad.tar", [*good(1), (f"1.meta.{ending.upper()}", pickle.dumps({"a": 1}))])
    with pytest.raises(DataError, match=rf"bad.tar, member 1.meta.{ending.upper()}: it needs pickle, which can run"):
        ready(tmp_path, "bad.tar", on_bad_sample="skip")


def flip_a_header(path):
    data = bytearray(path.read_bytes())
    data[512 * 6 : 512 * 6 + 100] = b"\xff" * 100
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(b"no tar" * 500), "cannot be read as a plain tar file"),
        (cut, "bad.tar"),
        (flip_a_header, "bad.tar is damaged: no member header at byte"),
        (lambda path: path.write_bytes(b"\0" * 10240), "contain no samples"),
    ],
    ids=["no tar", "cut", "header", "empty"],
)
def test_a_damaged_shard(damage, words, tmp_path):
    """A damaged shard is an error, and is never accepted as a shorter one."""
    damage(write(tmp_path / "bad.tar", [pair for n in range(15) for pair in good(n)]))
    with pytest.raises(DataError, match=words):
        ready(tmp_path, "bad.tar")


def test_headers_are_read_once(tars, monkeypatch):
    """A later start reads the index from the cache; a changed shard is indexed again."""
    read, index_of = [], module.index_of
    monkeypatch.setattr(module, "index_of", lambda *args: read.append(args[1].name) or index_of(*args))
    first, again = ready(tars, test="test.tar"), ready(tars, test="test.tar", seed=4)
    assert len(read) == 9
    assert len(first.dataset("test")) == len(again.dataset("test")) == 20
    (tars / "test.tar").touch()
    ready(tars, test="test.tar")
    assert read[9:] == ["test.tar"]


def test_shards_at_an_address(tars, cache, monkeypatch):
    """Remote shards are copied on demand into a folder of limited size, and give the same batches."""
    import fsspec

    store = fsspec.filesystem("memory")
    for path in tars.glob("*.tar"):
        store.pipe(f"/bucket/{path.name}", path.read_bytes())
    size = max(path.stat().st_size for path in tars.glob("*.tar"))
    monkeypatch.setenv("DEEPLIGHTNING_CACHE_LIMIT", str(3.5 * size / 2**30))
    found, wanted = ready("memory://bucket", validation="val.tar"), ready(tars, validation="val.tar")
    assert samples(found.train_dataloader()) == samples(wanted.train_dataloader())
    assert 1 <= len([*(cache / "deeplightning" / "shards" / "copies").glob("*.tar")]) <= 3
    with pytest.raises(DataError, match=r"memory://bucket has no shard valid\.tar"):
        ready("memory://bucket", validation="valid.tar")


@pytest.mark.parametrize(
    ("root", "error", "words"),
    [
        ("memory://none", DataError, "there are no files below memory://none"),
        ("nosuch://bucket", DataConfigError, "Protocol not known"),
        ("ftp://me:s3cret@host/x", DataConfigError, "data.root has a password"),
        ("s3://bucket/x?signature=s3cret", DataError, "s3://bucket/x needs a library that is not installed: pip insta"),
    ],
)
def test_an_address_that_cannot_be_read_is_one_note(root, error, words, monkeypatch):
    """The error contains no password or signature, and names a missing library."""
    from fsspec.core import url_to_fs

    def without_s3(root):
        if root.startswith("s3:"):
            raise ImportError("Install s3fs to access S3")
        return url_to_fs(root)

    monkeypatch.setattr("fsspec.core.url_to_fs", without_s3)
    with pytest.raises(error) as caught:
        ready(root)
    assert words in str(caught.value)
    assert "s3cret" not in str(caught.value)


# ---- runs


@pytest.fixture(scope="module")
def settings(tars, tmp_path_factory):
    """Overrides of the tiny config, and variables with the folder of the cache."""
    params = f"image_size: 8, mode: L, window: 60, train: '{TRAIN}', validation: val.tar, test: test.tar"
    words = [
        "~data.module",
        f"data.module={{type: Shards, params: {{{params}}}}}",
        f"data.root='{tars}'",
        "data.batch_size=16",
        "model.network.params={num_classes: auto, num_channels: auto, image_size: auto}",
    ]
    return words, {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("runs"))}


@pytest.fixture(scope="module")
def uninterrupted(train, settings):
    words, variables = settings
    return train(*words, "train.num_epochs=2", "train.export=true", "stages=[train,test]", **variables)


def test_a_run_that_stops_inside_an_epoch_resumes_bit_for_bit(uninterrupted, train, settings):
    """An epoch has 13 batches; a run that stops after 17 resumes to the weights of an uninterrupted one."""
    words, variables = settings
    words = [*words, "train.num_epochs=2", "train.export=true", "stages=[train,test]"]
    stopped = train(*words, "train.max_steps=17", **variables)
    resumed = train(*words, f"train.resume_ckpt='{stopped.folder}'", **variables)
    assert digest(resumed.folder / "last.ckpt") == digest(uninterrupted.folder / "last.ckpt")


def test_two_processes_resume_bit_for_bit(job, settings):
    """Each process resumes in its part of the shards."""
    words, variables = settings
    words = [*words, "train.num_epochs=2", "data.batch_size=8"]
    expected = job(*words, **variables)
    stopped = job(*words, "train.max_steps=17", **variables)
    resumed = job(*words, f"train.resume_ckpt='{stopped.folder}'", **variables)
    assert digest(resumed.folder / "last.ckpt") == digest(expected.folder / "last.ckpt")


def test_the_other_verbs_take_shards(command, tiny, settings, tars, tmp_path, uninterrupted):
    """`check`, its dry run, `stats` and `export` work with shards as with a folder of pictures."""
    words, variables = settings
    for verb in (["check"], ["check", "--dry-run"], ["stats"]):
        outcome = command(verb[0], tiny, *verb[1:], *words, cwd=tmp_path, **variables, code=0)
    assert "200" in outcome.out
    command("export", uninterrupted.folder, cwd=tmp_path, **variables, code=0)
    missing = command("train", tiny, *words, "data.module.params.test=tests.tar", cwd=tmp_path, **variables)
    assert (missing.code, "has no shard tests.tar" in missing.err) == (3, True), missing


def test_shards_at_a_web_server(tars, cache):
    """A listing of HTTP has no sizes; each shard is asked for its own."""
    pytest.importorskip("aiohttp")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tars.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = ready(f"http://127.0.0.1:{server.server_port}/{tars.name}", validation="val.tar")
        assert samples(found.train_dataloader()) == samples(ready(tars, validation="val.tar").train_dataloader())
        server.shutdown()


def test_another_decoder_decides_again_what_is_skipped(tmp_path, monkeypatch):
    """The index depends on Pillow if it lists what Pillow cannot decode."""
    write(tmp_path / "some.tar", [pair for n in range(15) for pair in good(n)])
    calls, index_of = [], module.index_of
    monkeypatch.setattr(module, "index_of", lambda *given: calls.append(1) or index_of(*given))
    for version, wanted in ((PIL.__version__, 1), (PIL.__version__, 1), ("99.0", 2)):
        monkeypatch.setattr(PIL, "__version__", version)
        ready(tmp_path, "some.tar", on_bad_sample="skip")
        assert len(calls) == wanted


def test_without_a_cache_the_headers_are_read_each_time(tars, tmp_path, monkeypatch):
    """A cache folder that cannot be made costs time, not the run."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(ready(tars, test="test.tar").dataset("test")) == 20


def test_a_sparse_picture_is_refused(tmp_path):
    """Its bytes are not consecutive, so its position and size would name others."""
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, more in (("b.bmp", {"GNU.sparse.map": "0,1", "GNU.sparse.size": "600"}), ("b.cls", {})):
            header = tarfile.TarInfo(name)
            header.size, header.pax_headers = 1, more
            archive.addfile(header, io.BytesIO(b"1"))
    with pytest.raises(DataError, match=r"sample b: b\.bmp is stored with holes"):
        ready(tmp_path, "a.tar")


def test_a_byte_order_mark_is_no_part_of_a_label(tmp_path):
    """A class has one name, however its label was saved."""
    marked = [("b.png", good(0)[0][1]), ("b.cls", good(0)[1][1].decode().encode("utf-8-sig"))]
    plain = [pair for n in range(15) for pair in good(n)]
    write(tmp_path / "plain.tar", plain)
    write(tmp_path / "marked.tar", plain + marked)
    assert ready(tmp_path, "marked.tar").class_names == ready(tmp_path, "plain.tar").class_names
