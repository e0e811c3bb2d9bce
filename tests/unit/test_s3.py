"""Data in S3, with an S3 server on this machine: what it answers becomes files, and what it refuses becomes
one note."""

import logging
import socket

import pytest
from PIL import Image

from deeplightning.data import remote_files
from deeplightning.data.data_errors import DataError
from deeplightning.data.remote_files import folder_of

pytest.importorskip("s3fs", reason="an S3 needs s3fs: pip install s3fs 'moto[server]'")
moto = pytest.importorskip("moto.server", reason="an S3 on this machine needs moto: pip install 'moto[server]'")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the server's and the client's own
KEYS = {"AWS_ACCESS_KEY_ID": "ada", "AWS_SECRET_ACCESS_KEY": "s3cr3t-Tq8Rw2Lk7", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def server():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    made = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def bucket(server, tmp_path, monkeypatch):
    """`bucket(name, content)` puts an object; nothing of another test or of this user is left."""
    import boto3
    import s3fs

    host, port = server.get_host_and_port()
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    client = boto3.client("s3")
    client.create_bucket(Bucket="store")
    forget()
    yield lambda name, content: client.put_object(Bucket="store", Key=name, Body=content)
    for of in client.list_objects_v2(Bucket="store").get("Contents", []):
        client.delete_object(Bucket="store", Key=of["Key"])
    s3fs.S3FileSystem.clear_instance_cache()
    forget()


def forget():
    """As another process, which has asked for nothing yet."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    remote_files._copied.cache_clear()


def test_a_folder_of_pictures_and_a_table(bucket, tmp_path):
    """All objects below the folder, with their bytes; of a table the named one alone."""
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "one.png")
        bucket(f"data/pictures/cat {number % 2}/{number}.png", (tmp_path / "one.png").read_bytes())
    for name in ("", "cat 0/", "empty/"):
        bucket(f"data/pictures/{name}", b"")  # as the console of S3 makes a folder
    bucket("data/orders.csv", b"x,y\n1,2\n")
    folder = folder_of("s3://store/data/pictures")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"cat 0/0.png", "cat 1/1.png", "cat 0/2.png"}
    assert Image.open(folder / "cat 0" / "2.png").getpixel((0, 0)) == (2, 0, 0)
    table = folder_of("s3://store/data", ["orders.csv"])
    assert [path.name for path in table.iterdir()] == ["orders.csv"]


def test_objects_that_are_not_there(bucket):
    """A wrong bucket and a wrong name: one note each, with the address."""
    bucket("data/orders.csv", b"x\n")
    for root, files, words in (
        ("s3://nobody/data", [], "s3://nobody/data: there is no such file: The specified bucket does not exist"),
        ("s3://store/none", [], "there are no files below s3://store/none"),
        ("s3://store/data", ["none.csv"], "s3://store/data: there is no such file: store/data/none.csv"),
    ):
        with pytest.raises(DataError, match=words):
            folder_of(root, files)


def test_a_store_without_credentials(bucket, monkeypatch):
    """One note; exit code 3."""
    for name in KEYS:
        monkeypatch.delenv(name)
    with pytest.raises(DataError, match="credentials") as caught:
        folder_of("s3://store/data/cfg.yaml")
    assert caught.value.exit_code == 3


def test_a_server_that_does_not_answer(bucket, monkeypatch):
    """One note, exit code 3, without the key."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(DataError, match="does not answer") as caught:
            folder_of("s3://store/data/cfg.yaml")
        assert (caught.value.exit_code, KEYS["AWS_SECRET_ACCESS_KEY"] in str(caught.value)) == (3, False)
