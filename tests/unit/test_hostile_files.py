"""Tampered bundles, checkpoints and claims of unsent metrics, one kind a line in `tests/hostile/*.jsonl`, are refused
soon, in one sentence and with exit code 4, and nothing in them is executed."""

import base64
import contextlib
import json
import os
import shutil
import sqlite3
import struct
import warnings
import zipfile
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hangs import limited
from onnx import helper

from deeplightning.config import own_runs
from deeplightning.engine.checkpoint_reading import load_weights, read_checkpoint
from deeplightning.faults import CheckpointError, SetupError
from deeplightning.runfolder import RunFolder, card_digest, golden_digest
from deeplightning.tracking import MLflowLogger
from deeplightning.tracking.claims import _machine, folder_of
from deeplightning.tracking.client import Client
from deeplightning.tracking.reader import open_reader
from deeplightning.tracking.store import locate
from deeplightning.tracking.unsent import SILENT_SECONDS, send_leftovers
from serve.bundle import Bundle, BundleError

HOSTILE = Path(__file__).parents[1] / "hostile"
SECONDS = 20  # of CPU time for one kind; the slowest takes 1 (November 2026)
pytestmark = pytest.mark.usefixtures("own_state")


def corpus(name: str) -> list[Any]:
    """Return the lines of a corpus as parameters (recipe, answer)."""
    lines = [json.loads(line) for line in (HOSTILE / name).read_text().splitlines()]
    return [pytest.param(line["recipe"], line["answer"], id=line["name"]) for line in lines]


BUNDLES, CHECKPOINTS, UNSENT = (corpus(f"{name}.jsonl") for name in ("bundles", "checkpoints", "unsent"))


def test_the_corpora_are_large_and_name_each_kind_once():
    """Each corpus has at least its promised number of kinds, each with a name of its own."""
    for kinds, least in ((BUNDLES, 100), (CHECKPOINTS, 60), (UNSENT, 20)):
        assert len({kind.id for kind in kinds}) == len(kinds) >= least


def at(tree: Any, path: str) -> tuple[Any, Any]:
    """Return the container that a dotted path leads to, and the key there; %2E and %2F are a dot and a slash in a key,
    #1 is a number as a key."""
    parts = path.split(".") if not path.startswith("files...") else ["files", path[6:]]
    *way, last = (part.replace("%2E", ".").replace("%2F", "/") for part in parts)

    def step(tree: Any, key: str) -> Any:
        return int(key.removeprefix("#")) if isinstance(tree, list) or key.startswith("#") else key

    for key in way:
        tree = tree[step(tree, key)]
    return tree, step(tree, last)


# Bundles


def graph(kind: str, value: Any = None) -> bytes:
    """Return a model with the inputs and outputs of the right one that computes something else."""
    inputs = [helper.make_tensor_value_info("images", 2, ["batch", 3, 8, 8])]
    name = value if kind == "output" else "probabilities"
    outputs = [helper.make_tensor_value_info(name, 1, None if kind == "pixels" else ["batch", 3])]
    axes = helper.make_tensor("axes", 7, [2], [2, 3])
    scale = helper.make_tensor("scale", 1, [], [32.0])
    constants = [axes, scale]
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=1),
        helper.make_node("ReduceMean", ["floats", "axes"], ["means"], keepdims=0),
        helper.make_node("Div", ["means", "scale"], ["logits"]),
    ]
    last = helper.make_node("Softmax", ["logits"], [name], axis=1)
    if kind == "constant":
        constants.append(helper.make_tensor("other", 1, [], [float(value)]))
        nodes.append(helper.make_node("Softmax", ["logits"], ["right"], axis=1))
        nodes.append(helper.make_node("Mul", ["right", "other"], ["less"]))
        last = helper.make_node("Add", ["less", "other"], [name])
    elif kind == "vast":  # the size depends on the input, so that it is unknown before the first answer
        constants += [helper.make_tensor("size", 7, [1], [value]), helper.make_tensor("none", 7, [1], [0])]
        nodes += [
            helper.make_node("Shape", ["images"], ["shape"]),
            helper.make_node("Gather", ["shape", "none"], ["batch"]),
            helper.make_node("Mul", ["batch", "none"], ["nothing"]),
            helper.make_node("Add", ["nothing", "size"], ["sizes"]),
            helper.make_node("ConstantOfShape", ["sizes"], ["zeros"]),
            helper.make_node("ReduceSum", ["zeros"], ["zero"], keepdims=0),
            helper.make_node("Softmax", ["logits"], ["right"], axis=1),
        ]
        last = helper.make_node("Add", ["right", "zero"], [name])
    elif kind == "endless":  # a loop without an end; not in the corpus, since only the server has a time limit
        kinds = [("round", 7, []), ("go", 9, []), ("carried", 1, None)]
        body = helper.make_graph(
            [helper.make_node("Identity", ["go"], ["still"]), helper.make_node("Identity", ["carried"], ["next"])],
            "body",
            [helper.make_tensor_value_info(*one) for one in kinds],
            [helper.make_tensor_value_info("still", 9, []), helper.make_tensor_value_info("next", 1, None)],
        )
        constants.append(helper.make_tensor("true", 9, [], [True]))
        nodes.append(helper.make_node("Softmax", ["logits"], ["right"], axis=1))
        last = helper.make_node("Loop", ["", "true", "right"], [name], body=body)
    elif kind == "gather":
        constants.append(helper.make_tensor("places", 7, [3], [0, 1, value]))
        nodes += [
            helper.make_node("Shape", ["images"], ["shape"]),
            helper.make_node("Gather", ["shape", "places"], ["sizes"]),
            helper.make_node("Cast", ["sizes"], ["float sizes"], to=1),
        ]
        last = helper.make_node("Add", ["logits", "float sizes"], [name])
    elif kind == "reshape":
        constants.append(helper.make_tensor("sizes", 7, [2], [value, 3]))
        last = helper.make_node("Reshape", ["logits", "sizes"], [name])
    elif kind == "first":
        constants += [helper.make_tensor("none", 7, [1], [0]), helper.make_tensor("one", 7, [1], [1])]
        nodes.append(helper.make_node("Softmax", ["logits"], ["right"], axis=1))
        last = helper.make_node("Slice", ["right", "none", "one", "none"], [name])
    elif kind in ("operator", "domain"):
        operator, domain = (value, "") if kind == "operator" else ("Softmax", value)
        last = helper.make_node(operator, ["logits"], [name], domain=domain)
    elif kind == "outside":  # reads a weight from a file outside the bundle, to leak it
        weight = helper.make_tensor("weight", 1, [1], bytes(4), raw=True)
        weight.ClearField("raw_data")
        weight.data_location = 1
        weight.external_data.add(key="location", value=value)
        constants.append(weight)
        last = helper.make_node("Add", ["logits", "weight"], [name])
    elif kind == "pixels":
        last = helper.make_node("Identity", ["floats"], [name])
    elif kind == "cycle":
        last = helper.make_node("Add", ["logits", name], [name])
    made = helper.make_graph([*nodes, last], "graph", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 20)] + ([helper.make_opsetid(value, 1)] if kind == "domain" else [])
    return onnx.helper.make_model(made, opset_imports=opsets, ir_version=10).SerializeToString()


def copied(bundle: Path, place: Path) -> Path:
    """Copy a bundle, and put a copy of its model beside it, and four bytes that a graph may try to read."""
    folder = Path(shutil.copytree(bundle, place / "bundle"))
    shutil.copy(folder / "model.onnx", place)
    (place / "secret").write_bytes(np.ones(1, np.float32).tobytes())
    return folder


def tamper_with_bundle(folder: Path, recipe: list[Any]) -> None:
    """Change a bundle by a recipe, then make the digests of files and card match."""
    file = folder / "bundle.json"
    card = json.loads(file.read_text())
    on_disk = []
    for word, *values in recipe:
        if word in ("link", "pipe", "folder"):
            on_disk.append((word, values))
        elif word in ("file", "cut", "graph"):
            name = "model.onnx" if word == "graph" else values[0]
            if word == "cut":
                data = (folder / name).read_bytes()[: (folder / name).stat().st_size // 2]
            else:
                data = values[1].encode() if word == "file" else graph(*values)
            (folder / name).write_bytes(data)
            card["files"][name] = sha256(data).hexdigest()
        elif word in ("answers", "shift"):
            given = np.frombuffer(base64.b64decode(card["golden"]["fp32"]), "<f4")
            given = given + np.float32(values[0]) if word == "shift" else np.full_like(given, float(values[0]))
            card["golden"]["fp32"] = base64.b64encode(given.astype("<f4").tobytes()).decode()
        elif word == "setkey":
            card[values[0]][values[1]] = values[2]
        else:
            container, key = at(card, values[0])
            if word == "set":
                container[key] = values[1]
            elif word == "delete":
                del container[key]
            elif word == "reverse":
                container[key].reverse()
            elif word == "upper":
                container[key] = container[key].upper()
            elif word == "repeat":
                container[key] = values[1] * values[2]
            elif word == "range":
                container[key] = [str(number) for number in range(values[1])]
            else:
                raise AssertionError(word)
    file.write_text(json.dumps({**card, "digest": card_digest(card)}))
    for word, (name, *target) in on_disk:
        (folder / name).unlink(missing_ok=True)
        if word == "link":
            (folder / name).symlink_to(target[0])
        elif word == "pipe":
            os.mkfifo(folder / name)
        else:
            (folder / name).mkdir()


@pytest.mark.parametrize(("recipe", "answer"), BUNDLES)
def test_a_bundle_that_was_tampered_with_is_refused(run_folder, tmp_path, capfd, recipe, answer):
    """Even with matching digests, it is refused in one sentence with folder and reason, and exit code 4; nothing is
    printed."""
    folder = copied(run_folder.bundle, tmp_path)
    tamper_with_bundle(folder, recipe)

    def is_refused():
        with pytest.raises(BundleError) as caught:
            Bundle.open(folder)
        assert answer in str(caught.value)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1000 + len(str(folder))
        assert caught.value.exit_code == 4

    limited(SECONDS, is_refused)
    assert capfd.readouterr() == ("", "")


def test_the_golden_digest_covers_what_the_answers_mean(run_folder):
    """The golden digest covers everything on the card but the digests and the models that may be added later."""
    card = json.loads(run_folder.bundle_card.read_text())
    assert card["golden"]["digest"] == golden_digest(card)
    for key in ("task", "labels", "input", "run"):
        assert golden_digest({**card, key: "other"}) != golden_digest(card)
    with_another = {**card, "files": {**card["files"], "model.fp16.onnx": "0"}}
    assert golden_digest(with_another) == golden_digest(card)


def test_an_unknown_home_is_a_missing_folder():
    """`~nobody` is a folder that does not exist, not an internal error."""
    with pytest.raises(BundleError, match="There is no folder '~no-such-user/run'"):
        Bundle.open("~no-such-user/run")


# Checkpoints


def value_of(value: Any) -> Any:
    """Return a value of a recipe; {"tensor": "zeros(2)"} is torch's."""
    if isinstance(value, dict) and value.keys() == {"tensor"}:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sparse and quantized tensors are deprecated
            return eval(f"torch.{value['tensor']}", {"torch": torch})
    return value


def right_checkpoint() -> dict[str, Any]:
    return {
        "state_dict": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2)},
        "epoch": 1,
        "global_step": 20,
        "config": {"data": {}, "model": {}, "train": {}},
        "run": {"id": "0" * 32},
        **{name: {} for name in ("loops", "callbacks", "engine", "versions")},
        **{name: [] for name in ("optimizer_states", "lr_schedulers", "points")},
    }


TOKEN = "0123abcd"


def in_pieces() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    content = right_checkpoint()
    values = content["state_dict"]["weight"].reshape(-1)
    key = "state_dict/weight"
    content["state_dict"]["weight"] = {"scattered": key, "shape": [2, 3], "dtype": "float32"}
    content["pieces"] = {"token": TOKEN, "processes": 2}
    return content, [{"pieces": {key: {"start": n, "values": values[n : n + 3].clone()}}} for n in (0, 3)]


def archived(path: Path, parts: dict[str, bytes], compress: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, data in parts.items():
            archive.writestr(f"archive/{name}", data)


class Again:
    """A compressor that deflates a chunk once, however often it is written."""

    def __init__(self, chunk: bytes):
        deflate = zlib.compressobj(wbits=-15)
        self.deflated = deflate.compress(chunk) + deflate.flush(zlib.Z_FULL_FLUSH)
        self.end = deflate.flush()

    def compress(self, data: bytes) -> bytes:
        return self.deflated

    def flush(self) -> bytes:
        return self.end


def tamper_with_archive(path: Path, kind: str) -> None:
    if kind in ("compressed", "bomb"):
        with zipfile.ZipFile(path) as source:
            parts = {name.partition("/")[2]: source.read(name) for name in source.namelist()}
        if kind == "compressed":
            archived(path, parts, zipfile.ZIP_DEFLATED)
            return
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in parts.items():
                archive.writestr(f"archive/{name}", data)
            with archive.open("archive/data/99", "w", force_zip64=True) as large:
                chunk = bytes(100_000_000)
                large._compressor = Again(chunk)  # deflating 2 GB would take ten seconds
                for _ in range(20):
                    large.write(chunk)
    elif kind == "encrypted":
        data = bytearray(path.read_bytes())
        for mark, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
            start = 0
            while (start := data.find(mark, start)) >= 0:
                data[start + offset] |= 1
                start += 4
        path.write_bytes(data)
    elif kind == "script":
        torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    elif kind == "empty":
        archived(path, {"version": b"3"})
    else:
        torch.save(right_checkpoint(), path, _use_new_zipfile_serialization=False)


def save_in_pieces(path: Path, content: dict[str, Any], shares: list[dict[str, Any]]) -> Path:
    """Save a checkpoint with its shards; return their folder."""
    torch.save(content, path)
    folder = path.with_suffix(".pieces")
    for rank, share in enumerate(shares):
        folder.mkdir(exist_ok=True)
        torch.save(share, folder / f"{TOKEN}-{rank}.pt")
    return folder


def tamper_with_checkpoint(path: Path, recipe: list[Any]) -> None:
    """Write a checkpoint, with shards if the recipe has them, changed by the recipe."""
    content, shares = right_checkpoint(), []
    after = []
    for word, *values in recipe:
        if word == "pieces":
            content, shares = in_pieces()
        elif word == "set":
            container, key = at(content, values[0])
            container[key] = value_of(values[1])
        elif word == "delete":
            container, key = at(content, values[0])
            del container[key]
        elif word == "numbered":
            content[values[0]] = dict(enumerate(content[values[0]].values()))
        elif word == "piece" and values[1] not in ("", "gone", "bytes"):
            container, key = at(shares[values[0]], values[1])
            container[key] = value_of(values[2])
        elif word == "cycle":
            content["loops"]["itself"] = content["loops"]
        else:
            after.append((word, values))
    folder = save_in_pieces(path, content, shares)
    for word, values in after:
        if word == "piece":
            rank, kind, given = values
            file = folder / f"{TOKEN}-{rank}.pt"
            if kind == "gone":
                file.unlink()
            elif kind == "bytes":
                file.write_bytes(given.encode())
            else:
                torch.save({}, file)
        elif word == "nested":
            deep = b"]" * values[0] + b"a" * (values[0] - 1)
            tampered_pickle(path, b"\x80\x02}(X\x0a\0\0\0state_dict}X\x04\0\0\0deep" + deep + b"u.")
        elif word == "bytes":
            path.write_bytes(values[0].encode())
        elif word == "cut":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        elif word == "flip":
            data = bytearray(path.read_bytes())
            data[data.index(torch.arange(6.0).numpy().tobytes()) + 9] ^= 1
            path.write_bytes(data)
        elif word in ("folder", "pipe", "link"):
            path.unlink()
            {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to(path.name)}[word]()
        elif word == "archive":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.jit is deprecated
                tamper_with_archive(path, values[0])
        elif word == "content":
            torch.save(value_of(values[0]), path)
        else:
            assert word == "pickle", word
            tampered_pickle(path, values[0].encode("latin-1"))


def tampered_pickle(path: Path, data: bytes) -> None:
    """Write a checkpoint with these opcodes and correct checksums."""
    archived(path, {"data.pkl": data, "byteorder": b"little", "version": b"3\n"})


@pytest.mark.parametrize(("recipe", "answer"), CHECKPOINTS)
def test_a_checkpoint_that_was_tampered_with_is_refused(tmp_path, capfd, monkeypatch, recipe, answer):
    """It is refused soon, in one sentence with file and reason, and exit code 4; nothing in it is executed."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "last.ckpt"
    tamper_with_checkpoint(path, recipe)
    capfd.readouterr()

    def is_refused():
        for whole in (True, False):
            with pytest.raises(CheckpointError) as caught:
                load_weights(torch.nn.Linear(3, 2), read_checkpoint(path, whole=whole), path)
            assert answer in str(caught.value)
            assert str(path.with_suffix("")) in str(caught.value)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 1000 + 3 * len(str(path))
            assert caught.value.exit_code == 4

    limited(SECONDS, is_refused)
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "pwned").exists()


def test_the_checkpoints_that_the_corpus_changes_are_right(tmp_path):
    """Unchanged, the checkpoints of the corpus can be read, in one file and in shards."""
    path = tmp_path / "last.ckpt"
    for recipe in ([], [["pieces"]]):
        tamper_with_checkpoint(path, recipe)
        module = torch.nn.Linear(3, 2)
        load_weights(module, read_checkpoint(path), path)
        assert torch.equal(module.weight, torch.arange(6.0).reshape(2, 3))


def test_values_in_many_places_are_put_together_once(tmp_path):
    """Nested lists that share their items and would unfold to 10**30 values are read at once, and stay shared."""
    path = tmp_path / "last.ckpt"
    content, shares = in_pieces()
    shared: list[Any] = [1]
    for _ in range(30):
        shared = [shared] * 10
    content["loops"]["shared"] = shared
    save_in_pieces(path, content, shares)

    def stay_shared():
        found = read_checkpoint(path)["loops"]["shared"]
        assert found[0] is found[9]

    limited(SECONDS, stay_shared)


# Claims of unsent metrics


def finished_run(folder: Path) -> str:
    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_metrics({"x": 1.0}, 0)
    logger.finalize("success")
    return logger.run_id


def write_claim(store: Path, name: str, metrics: Path, run: Any) -> Path:
    """Write the claim of a process of this machine that has ended; return its path."""
    folder = folder_of(locate(store))
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.deadbeef.unsent"
    claim = {"run": run, "metrics": str(metrics), "store": str(store)} | _machine()
    path.write_text(json.dumps(claim) + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store for all runs, since creating one takes a second."""
    return tmp_path_factory.mktemp("unsent") / "mlruns"


@pytest.mark.parametrize(("recipe", "answer"), UNSENT)
def test_a_tampered_claim_does_not_change_a_finished_run(store, tmp_path, recipe, answer):
    """`runs --sync` and the next run on the store report a tampered claim in one line or ignore it; the finished run
    does not change."""
    run_id = finished_run(store)
    (metrics,) = store.glob(f"*/{run_id}/artifacts/metrics.jsonl")
    head: Any = run_id
    appended = b""
    kind = "file"
    for line in recipe:
        if not isinstance(line, dict) or not {"raw", "head", "kind"} & line.keys():
            appended += json.dumps(line).encode() + b"\n"
        elif "raw" in line:
            appended += line["raw"].encode("latin-1") * line["times"] + b"\n"
        else:
            head, kind = line.get("head", head), line.get("kind", kind)
    metrics.write_bytes(metrics.read_bytes() + appended)
    path = write_claim(store, run_id, metrics, head)
    if kind == "writable":
        path.chmod(0o666)
    elif kind != "file":
        path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "elsewhere").write_text("precious")
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "sparse":
        path.touch(mode=0o600)
        os.truncate(path, 10**12)

    def is_one_line():
        reported = list(send_leftovers(locate(store), silent=SILENT_SECONDS))
        assert [answer in line for line in reported] == [True] * bool(answer)
        assert all("\n" not in line and "Traceback" not in line for line in reported)

    limited(SECONDS, is_one_line)
    found = open_reader(locate(store)).run(run_id)
    assert (found.status, found.tags.get("failure")) == ("FINISHED", None)
    if kind == "link":
        assert (tmp_path / "elsewhere").read_text() == "precious"


def test_a_claim_may_name_only_its_own_run(store, tmp_path):
    """A claim that names another run, or a file outside the store, is refused, and kept for inspection."""
    one, other = finished_run(store), finished_run(store)
    (metrics,) = store.glob(f"*/{one}/artifacts/metrics.jsonl")
    metrics.write_text('{"step":9,"time":1,"values":{"x":9.0}}\n{"tags":{"pwned":"yes"}}\n')
    outside = tmp_path / "metrics.jsonl"
    outside.write_bytes(metrics.read_bytes())
    for run, file in ((other, metrics), (one, outside)):
        path = write_claim(store, one, file, run)
        (line,) = send_leftovers(locate(store), silent=SILENT_SECONDS)
        assert "refused" in line
        assert path.with_suffix(".refused").is_file()
    reader = open_reader(locate(store))
    for run in (one, other):
        assert [point.step for point in Client(locate(store)).history(run, {"x"})] == [0]
    assert "pwned" not in reader.run(other).tags
    assert not (tmp_path / ".metrics.sent").exists()


def test_a_claim_beside_a_store_sends_files_of_own_runs_only(store, tmp_path, monkeypatch):
    """A claim may have been copied with a store that uploads to another person's server, so only files of this user's
    runs are sent."""
    sent = []
    monkeypatch.setattr(Client, "upload", lambda self, run_id, path, folder: sent.append(path))
    monkeypatch.setattr(own_runs, "_noted", set())
    run_id = finished_run(store)
    (metrics,) = store.glob(f"*/{run_id}/artifacts/metrics.jsonl")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.config.write_text("seed: 1\n")
    weights, link = folder.path / "last.ckpt", folder.path / "link"
    weights.write_text("weights")
    link.symlink_to("/etc/hostname")
    for source, own in ((weights, False), (weights, True), (link, True), (Path("/etc/hostname"), True)):
        if own:
            own_runs.note_own(folder.config)
        with metrics.open("a") as file:
            file.write(json.dumps({"artifact": [str(source), None]}) + "\n")
        write_claim(store, run_id, metrics, run_id)
        assert list(send_leftovers(locate(store), silent=SILENT_SECONDS)) == [f"{run_id}  1 point sent"]  # which exists
    assert set(sent) == {weights}


def test_a_journal_that_names_another_file_is_refused(tmp_path):
    """SQLite would delete the file that the end of a journal names; the store is refused instead."""
    precious, name = tmp_path / "precious", str(tmp_path / "precious").encode()
    precious.write_text("1")
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("CREATE TABLE runs (a)")
    magic = bytes.fromhex("d9d505f920a163d7")
    head = (magic + struct.pack(">5I", 0, 0, 2, 512, 4096)).ljust(512, b"\0")
    end = struct.pack(">I", 2**18 + 1) + name + struct.pack(">2I", len(name), sum(name)) + magic  # an ASCII path
    (tmp_path / "mlflow.db-journal").write_bytes(head + end)
    with pytest.raises(SetupError, match="would make SQLite delete a file"):
        open_reader(locate(tmp_path)).run("0")
    assert precious.exists()


def test_the_copy_before_a_migration_follows_no_link(tmp_path):
    """The copy of a store of another schema does not replace the database that a link names."""
    store, mine = tmp_path / "store", tmp_path / "mine.db"
    store.mkdir()
    for path, table in ((store / "mlflow.db", "alembic_version"), (mine, "mine")):
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(f"CREATE TABLE {table} (version_num)")
            database.execute(f"INSERT INTO {table} VALUES ('abc')")
            database.commit()
    (store / "mlflow.db.abc.bak").symlink_to(mine)
    before = mine.read_bytes()
    with pytest.raises(SetupError):
        Client(locate(store)).listing()
    assert mine.read_bytes() == before


def test_a_claim_writes_through_no_link(store, tmp_path):
    """A `.metrics.sent` that is a link out of the store is not written; the claim is refused."""
    run_id, precious = finished_run(store), tmp_path / "precious"
    precious.write_text("1")
    (metrics,) = store.glob(f"*/{run_id}/artifacts/metrics.jsonl")
    sent = metrics.with_name(".metrics.sent")
    sent.unlink(missing_ok=True)
    sent.symlink_to(precious)
    with metrics.open("a") as file:
        file.write('{"step":9,"time":1,"values":{"x":9.0}}\n')
    write_claim(store, run_id, metrics, run_id)
    (line,) = send_leftovers(locate(store), silent=SILENT_SECONDS)
    assert "refused" in line
    assert precious.read_text() == "1"
