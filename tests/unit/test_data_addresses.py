"""`data.root` as an address: its files are copied once, again where they changed, and never in part."""

import io
import os
import zipfile
from pathlib import Path

import fsspec
import pytest

from deeplightning.data import remote_files
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.remote_files import folder_of

TINY = Path(__file__).parents[2] / "configs" / "digits_ddp.yaml"
ROOT = "memory://bucket/my data"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """A store with three files, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    remote_files._copied.cache_clear()
    system = fsspec.filesystem("memory")
    for name, content in {"a.csv": "x,y\n", "b.csv": "1,2\n", "deeper/c.csv": "3\n"}.items():
        system.pipe_file(f"/bucket/my data/{name}", content.encode())
    yield system
    remote_files._copied.cache_clear()
    system.rm("/bucket", recursive=True)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def next_process():
    remote_files._copied.cache_clear()


def test_a_path_is_a_path(tmp_path, monkeypatch):
    """Nothing is copied."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder_of("~/data") == tmp_path / "data"
    assert folder_of("data") == Path.cwd() / "data"


def test_all_files_or_those_that_are_named(store, monkeypatch):
    """The second time nothing is read but what the store tells of them."""
    folder = folder_of(ROOT)
    assert names(folder) == ["a.csv", "b.csv", "deeper/c.csv"]
    assert (folder / "deeper" / "c.csv").read_text() == "3\n"
    few = folder_of(ROOT, ["b.csv"])
    assert names(few) == ["b.csv"]
    assert few != folder
    next_process()
    monkeypatch.setattr(type(store), "get", lambda *args: pytest.fail("it copies again"))
    assert folder_of(ROOT) == folder
    assert folder_of(ROOT, ["b.csv"]) == few


def test_an_archive_in_a_store(store):
    """One that leads out of its folder is refused."""
    for name, inside in {"good": "in/a.csv", "bad": "../a.csv"}.items():
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr(inside, "1\n")
        store.pipe_file(f"/bucket/{name}.zip", content.getvalue())
    assert names(folder_of("zip::memory://bucket/good.zip")) == ["in/a.csv"]
    with pytest.raises(DataError):
        folder_of("zip::memory://bucket/bad.zip")
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("../a.csv"))


def test_a_changed_file_is_copied_again(store):
    """Into another folder: a run may read the former one."""
    before = folder_of(ROOT)
    store.pipe_file("/bucket/my data/b.csv", b"1,3\n")  # of the same size
    assert folder_of(ROOT) == before  # one process sees one state
    next_process()
    after = folder_of(ROOT)
    assert after != before
    assert (before / "b.csv").read_text() == "1,2\n"
    assert (after / "b.csv").read_text() == "1,3\n"


def test_a_copy_that_fails_leaves_nothing(store, monkeypatch):
    """The next one is complete."""
    get = type(store).get

    def breaks(self, paths, targets):
        get(self, paths[:1], targets[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(store), "get", breaks)
    with pytest.raises(DataError, match=r"my data cannot be copied to .*a cache.*: No space left on device"):
        folder_of(ROOT)
    left = Path(os.environ["XDG_CACHE_HOME"]).rglob("*")
    assert {path.suffix for path in left if path.is_file()} <= {".lock"}


def test_what_a_killed_process_left_is_not_used(store):
    """The data are copied again."""
    folder = folder_of(ROOT)
    (folder.parent / "index").unlink()
    (folder / "a.csv").write_text("half")
    (folder / "other.csv").write_text("half")
    next_process()
    assert folder_of(ROOT) == folder
    assert names(folder) == ["a.csv", "b.csv", "deeper/c.csv"]
    assert (folder / "a.csv").read_text() == "x,y\n"


@pytest.mark.parametrize(
    ("root", "files", "error", "words"),
    [
        ("memory://bucket/none", [], DataError, "there are no files below memory://bucket/none"),
        (ROOT, ["none.csv"], DataError, "there is no such file: /bucket/my data/none.csv"),
        (ROOT, ["../secret"], DataConfigError, "../secret is not inside data.root"),
        (ROOT, ["/etc/passwd"], DataConfigError, "is not inside data.root"),
        ("nosuch://bucket", [], DataConfigError, "Protocol not known"),
        ("ftp://me:s3cret@host/x", [], DataConfigError, "data.root has a password"),
    ],
)
def test_what_cannot_be_copied_is_one_note(root, files, error, words):
    """Without a password."""
    with pytest.raises(error) as caught:
        folder_of(root, files)
    assert words in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_missing_library_is_named_with_its_command(monkeypatch):
    """As fsspec names it."""

    def missing(root):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(DataError, match="s3://bucket/x needs a library that is not installed: pip install s3fs"):
        folder_of("s3://bucket/x?signature=s3cret")
