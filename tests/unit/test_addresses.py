"""Configs by address: fetched once, kept with their digest, refused where that is safer, and no place for code."""

import hashlib
import http.server
import threading
from pathlib import Path

import pytest

from deeplightning.address import shown
from deeplightning.checks.examine import examine
from deeplightning.config import addresses
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.faults import CheckpointError, ConfigError, SetupError

FILES = {
    "/a/cfg.yaml": "_base_: [base.yaml, ../c.yaml]\nseed: 3\n",
    "/a/base.yaml": "seed: 1\ntrain: {num_epochs: 5}\n",
    "/c.yaml": "train: {max_steps: 9}\n",
    "/wrong.yaml": "seed: 1\ntrain: {num_epoch: 2}\n",
    "/round.yaml": "_base_: round.yaml\n",
    "/long.yaml": "# " + "x" * addresses.MAX_BYTES,
    "/home.yaml": "_base_: ~/secret.yaml\n",
    "/root.yaml": "_base_: /c.yaml\n",
    "/locked.yaml": 401,
    "/broken.yaml": 503,
    "/away.yaml": "http://example.com/a.yaml",
}


class Web:
    """A server on the loopback interface; `asked` are the paths of its requests."""

    def __init__(self) -> None:
        web = self
        self.files, self.asked = dict(FILES), []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                web.asked.append(self.path)
                found = web.files.get(self.path.partition("?")[0], 404)
                is_elsewhere = isinstance(found, str) and found.startswith("http:")
                self.send_response(found if isinstance(found, int) else 302 if is_elsewhere else 200)
                if is_elsewhere:
                    self.send_header("Location", found)
                self.end_headers()
                self.wfile.write(found.encode() if isinstance(found, str) else b"")

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def web(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    monkeypatch.setattr(addresses, "_fetched", {})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = Web()
    yield found
    if found._thread.is_alive():
        found.close()


def note(*words):
    """The one note about a config that is wrong."""
    with pytest.raises(ConfigError) as caught:
        read(*words)
    (fault,) = caught.value.faults
    return str(fault)


@pytest.mark.parametrize("kind", [str, Path])
def test_files_are_fetched_and_laid_over_each_other(web, kind):
    """Names in a config are relative to its address. Each file is asked for once, and recorded with its digest.
    A place is an address with line and column."""
    source = read(kind(f"{web.url}/a/cfg.yaml?signature=s3cret"), ["train.num_epochs=7"])
    assert plain(source.root) == {"seed": 3, "train": {"num_epochs": 7, "max_steps": 9}}
    assert sorted(web.asked) == ["/a/base.yaml", "/a/cfg.yaml?signature=s3cret", "/c.yaml"]
    paths = ("/a/cfg.yaml", "/a/base.yaml", "/c.yaml")
    digests = {f"{web.url}{path}": hashlib.sha256(FILES[path].encode()).hexdigest() for path in paths}
    assert source.origins == digests
    (fault,) = [fault for fault in examine(f"{web.url}/wrong.yaml").faults if fault.key == "train.num_epoch"]
    assert fault.place == f"{web.url}/wrong.yaml:2:9"
    assert {notice.text for notice in source.notices} == {f"config: {a}, SHA-256 {d}" for a, d in digests.items()}
    assert "s3cret" not in str([source.root, source.notices, source.origins])
    for path in Path("../a cache").rglob("*"):
        assert path.is_dir() or "s3cret" not in path.read_text()


def test_a_fetched_config_has_no_folder_for_code(web):
    """Names of a local file that builds on it come from the folder of that file alone."""
    assert read(f"{web.url}/a/cfg.yaml").folders == []
    assert plain(read(f"{web.url}/root.yaml").root) == {"train": {"max_steps": 9}}  # `/` is that of the server
    Path("own.yaml").write_text(f"_base_: {web.url}/c.yaml\n")
    assert read("own.yaml").folders == [Path.cwd()]


def test_one_command_reads_the_same_bytes_and_the_next_the_new_ones(web, monkeypatch):
    """A config that changes while a command reads it makes no mixture."""
    assert plain(read(f"{web.url}/c.yaml").root) == {"train": {"max_steps": 9}}
    web.files["/c.yaml"] = "train: {max_steps: 10}\n"
    assert plain(read(f"{web.url}/c.yaml").root) == {"train": {"max_steps": 9}}
    monkeypatch.setattr(addresses, "FRESH", 0.0)
    assert plain(read(f"{web.url}/c.yaml").root) == {"train": {"max_steps": 10}}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/none.yaml", "there is no such config here for you (404"),
        ("/long.yaml", "a config has at most 1000 kB"),
        ("/locked.yaml", "there is no such config here for you (401"),
        ("/away.yaml", "without TLS others can change a config on its way"),
        ("/round.yaml", "these files build on each other in a circle"),
        ("/home.yaml", "there is no such config here for you (404"),
    ],
)
def test_what_is_no_config_is_refused(web, path, words):
    """With the address as the place. A config by address names no file of this machine."""
    Path("~").mkdir()
    Path("~/secret.yaml").write_text("seed: 1\n")
    assert words in note(f"{web.url}{path}")
    assert web.url in note(f"{web.url}{path}")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://example.com/a.yaml", "use https://, or download it and name the file"),
        ("https://me:s3cret@example.com/a.yaml", "a user name or a password in an address"),
        ("ftps+x://example.com/a.yaml", "Protocol not known"),
        ("runs:/a/b", "the config of a run is runs:/ID"),
    ],
)
def test_addresses_that_are_refused_unasked(web, address, words):
    """Nothing is sent."""
    text = note(address)
    assert words in text
    assert "s3cret" not in text
    Path("own.yaml").write_text(f"_base_: {address}\n")
    assert note("own.yaml").startswith("own.yaml:1:1: _base_: ")


def test_an_address_that_does_not_answer_is_an_error(web, monkeypatch):
    """The former copy is not used unasked: it may be of another day."""
    with pytest.raises(SetupError, match=r"the config cannot be fetched \(Service Unavailable|503"):
        read(f"{web.url}/broken.yaml")
    read(f"{web.url}/c.yaml")
    web.close()
    monkeypatch.setattr(addresses, "FRESH", 0.0)
    with pytest.raises(SetupError, match=r"the config cannot be fetched .*; former copies are in /.*configs"):
        read(f"{web.url}/c.yaml")


def test_a_copy_that_was_changed_is_fetched_again(web, monkeypatch):
    """The cache holds what the address gave."""
    monkeypatch.setattr(addresses, "FRESH", 0.0)
    path = addresses.fetch(f"{web.url}/c.yaml")
    path.write_text("train: {max_steps: 666}\n")
    assert addresses.fetch(f"{web.url}/c.yaml") == path
    assert path.read_text() == FILES["/c.yaml"]


def test_stores_are_read_by_fsspec(web, monkeypatch):
    """Its library for an address may be missing."""
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://bucket/a/cfg.yaml", "w") as file:
        file.write("_base_: b.yaml\nseed: 4\n")
    with fsspec.open("memory://bucket/a/b.yaml", "w") as file:
        file.write("train: {num_epochs: 2}\n")
    assert plain(read("memory://bucket/a/cfg.yaml").root) == {"seed": 4, "train": {"num_epochs": 2}}
    assert "memory://bucket/none.yaml: there is no such config" in note("memory://bucket/none.yaml")

    def missing(*args):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "open", missing)
    with pytest.raises(SetupError, match=r"s3://bucket/a\.yaml: a library .* is missing: Install s3fs"):
        read("s3://bucket/a.yaml")


def test_a_run_that_is_not_there(web, monkeypatch):
    """The tracking store is looked into, and not made."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(CheckpointError, match="There is no tracking store"):
        read("runs:/abc")
    assert list(Path.cwd().iterdir()) == []


def test_a_full_disk_is_named(web, monkeypatch):
    """With the folder of the cache."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(addresses, "write_whole", full)
    with pytest.raises(SetupError, match=r"a cache/deeplightning/configs: .* cannot be kept here: .*No space left"):
        read(f"{web.url}/c.yaml")


@pytest.mark.parametrize("written", ["file:///a/b.yaml", Path("file:///a/b.yaml")])
def test_a_file_by_its_address_has_three_slashes(written):
    """Of which a path keeps one."""
    assert shown(written) == "file:///a/b.yaml"
