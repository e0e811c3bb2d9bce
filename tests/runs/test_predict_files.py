"""`predict RUN FILE`: files of each kind get the answers of the run's bundle, which are those of the endpoint."""

import base64
import csv
import functools
import io
import json
import sys
import wave
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from exported import TEXTS, exported
from PIL import Image
from pyarrow import parquet
from served import picture

from deeplightning.faults import CheckpointError, SetupError
from deeplightning.kinds import KINDS
from deeplightning.run import predict
from serve.answers import answers
from serve.bundle import Bundle

ROWS = [{"age": 20.5 + n, "city": ("Bern", "Rome", "Oslo")[n % 3]} for n in range(20)]
SIGNALS = np.random.default_rng(1).normal(size=(3, 2, 12))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`runs(kind)` returns task, run folder and bundle of a kind."""

    @functools.cache
    def run(kind):
        task, folder = exported(tmp_path_factory.mktemp(kind), kind)
        return task, folder, Bundle.open(folder.bundle)

    return run


def rows_of(path):
    """Return the rows of an output table; [] if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def answered(runs, monkeypatch, tmp_path):
    """`answered(kind, file, …)` returns the rows that `predict` writes to `out` for files, with the task of a kind."""

    def run(kind, *files, out="out.jsonl"):
        task, folder, _ = runs(kind)
        cfg = SimpleNamespace(
            serve=SimpleNamespace(max_pixels=10_000, max_side=200),
            data=SimpleNamespace(module=SimpleNamespace(params={})),
        )
        monkeypatch.setattr(predict, "trained_task", lambda *_: (task, cfg, None))
        predict.predict_files(folder, files, tmp_path / out)
        return rows_of(tmp_path / out)

    return run


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_jsonl(path, *values):
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path


def write_parquet(path, rows):
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def flat(kind, answer):
    """Return the row of an answer of the endpoint, computed independently of the product."""
    gives = KINDS[kind].gives
    if gives == "classification":
        top = answer["predictions"][0]
        return {f"predicted_{k}": top[k] for k in ("class", "label", "probability")}
    if gives == "regression":
        return {f"predicted_{one['name']}": one["value"] for one in answer["predictions"]}
    found = {"predicted_labels": "|".join(label for label in ("low", "middle", "high") if label in answer["labels"])}
    by_label = {one["label"]: one["probability"] for one in answer["predictions"]}
    return found | {f"probability_{label}": by_label[label] for label in ("low", "middle", "high")}


def assert_same(rows, file, kind, expected):
    """Assert that rows of a file have the answers of the endpoint."""
    assert [(row["path"], row["row"]) for row in rows] == [(str(file), n + 1) for n in range(len(expected))]
    for row, answer in zip(rows, expected, strict=True):
        wanted = flat(kind, answer)
        assert list(row) == ["path", "row", *wanted]
        for name, value in wanted.items():
            assert row[name] == (value if isinstance(value, str) else pytest.approx(value, abs=1e-5)), name


@pytest.mark.parametrize("kind", ["table_classification", "table_regression", "table_multilabel"])
@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_csv(folder / "a.csv", ROWS),
        lambda folder: write_jsonl(folder / "a.json", {"rows": ROWS}),
        lambda folder: write_jsonl(folder / "a.jsonl", *ROWS),
        lambda folder: write_parquet(folder / "a.PARQUET", ROWS),
    ],
    ids=["csv", "json", "jsonl", "parquet"],
)
def test_rows_of_tables_are_answered(runs, answered, tmp_path, kind, write):
    """Each row of a CSV, JSON, JSON lines or Parquet file gets a row with its number and the answer of the endpoint."""
    file = write(tmp_path)
    assert_same(answered(kind, file), file, kind, answers(runs(kind)[2], ROWS, 0))


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: folder / "a.txt",
        lambda folder: write_csv(folder / "a.csv", [{"text": text, "n": 1} for text in TEXTS]),
        lambda folder: write_csv(folder / "a.csv", [{"note": text} for text in TEXTS]),
        lambda folder: write_csv(folder / "a.csv", [{"text": "n", "review": text} for text in TEXTS]),
        lambda folder: write_jsonl(folder / "a.jsonl", *[{"review": text, "n": 1} for text in TEXTS]),
        lambda folder: folder / "a.tsv",
        lambda folder: write_jsonl(folder / "a.jsonl", *[{"text": text} for text in TEXTS]),
        lambda folder: write_jsonl(folder / "a.json", {"texts": TEXTS}),
    ],
    ids=["txt", "csv", "one column", "trained", "trained jsonl", "tsv", "jsonl", "json"],
)
def test_texts_are_answered(runs, answered, tmp_path, write):
    """Texts are the lines of a file, or a column: that of the training table, `text`, `sentence`, or the only one."""
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS) + "\n")
    (tmp_path / "a.tsv").write_text("index\tsentence\n" + "".join(f"{n}\t{text}\n" for n, text in enumerate(TEXTS)))
    kind, file = "text_classification", write(tmp_path)
    assert_same(answered(kind, file), file, kind, answers(runs(kind)[2], TEXTS, 0))


def write_wav(path):
    """Write a file of 16 bits and two channels; return its values, (2, 12)."""
    samples = np.round(SIGNALS[0] / 8 * 2**15).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(samples.T.tobytes())
    return samples / 2**15


@pytest.mark.parametrize("kind", ["array_classification", "array_regression", "array_multilabel"])
def test_arrays_and_signals_are_answered(runs, answered, tmp_path, kind):
    """Arrays come from .npy with one or several, .json as for the endpoint, .csv with a line per step, and .wav."""
    several, one, listed, steps = (tmp_path / name for name in ("a.npy", "b.npy", "c.json", "d.csv"))
    np.save(several, SIGNALS)
    np.save(one, SIGNALS[1])
    write_jsonl(listed, {"arrays": SIGNALS.tolist()})
    steps.write_text("left,right\n" + "".join(f"{a!r},{b!r}\n" for a, b in SIGNALS[2].T.tolist()))
    sound = tmp_path / "e.wav"
    given = {several: SIGNALS, one: SIGNALS[1:2], listed: SIGNALS, steps: SIGNALS[2:], sound: write_wav(sound)[None]}
    for file, arrays in given.items():
        assert_same(answered(kind, file), file, kind, answers(runs(kind)[2], list(arrays), 0))
    assert len(answered(kind, tmp_path)) == sum(map(len, given.values()))  # a folder


def test_the_other_files_of_a_folder_are_counted_on_stderr(answered, capsys, tmp_path):
    """Files of a folder that are not read are counted by ending, as in training."""
    write_csv(tmp_path / "a.csv", ROWS)
    for name in ("b.heic", "c.heic", "README", ".hidden"):
        (tmp_path / name).touch()
    assert len(answered("table_classification", tmp_path)) == len(ROWS)
    assert capsys.readouterr().err == f"Files ignored in {tmp_path}, by ending: .heic (2), no ending (1)\n"


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def png(path, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.slow
def test_pictures_get_labels_and_masks(runs, answered, tmp_path):
    """The probabilities of several labels are columns; a mask is a PNG file in the folder beside the table, with the
    pixels that the endpoint sends."""
    files = [png(tmp_path / folder / "a.png", seed) for seed, folder in enumerate(("one", "two"))]
    data = [file.read_bytes() for file in files]
    rows = answered("image_multilabel", *files)
    for row, answer in zip(rows, answers(runs("image_multilabel")[2], data, 100), strict=True):
        assert row.pop("path") in map(str, files)
        wanted = flat("image_multilabel", answer)
        assert row["predicted_labels"] == wanted.pop("predicted_labels")
        assert [row[name] for name in wanted] == pytest.approx([*wanted.values()], abs=1e-5)

    rows = answered("image_segmentation", *files, out="masks.jsonl")
    names = [str(tmp_path / "masks" / name) for name in ("a.png", "a-2.png")]
    assert [row["mask"] for row in rows] == names
    for row, answer in zip(rows, answers(runs("image_segmentation")[2], data, 100), strict=True):
        with Image.open(row["mask"]) as ours, Image.open(io.BytesIO(base64.b64decode(answer["mask"]))) as theirs:
            assert np.array_equal(np.asarray(ours), np.asarray(theirs))
        for one in answer["classes"]:
            assert row[f"share_{one['label']}"] == one["share"]

    answered("image_reconstruction", files[0], out="shown.jsonl")
    with Image.open(tmp_path / "shown" / "a.png") as image:
        assert image.size == (5, 6)


def test_a_run_that_cannot_answer_files_says_so(runs, monkeypatch, tmp_path):
    """Masks without --out, and a task of an unknown kind, are an error with the remedy."""
    task, folder, _ = runs("image_segmentation")
    data = SimpleNamespace(module=SimpleNamespace(params={}))
    cfg = SimpleNamespace(serve=SimpleNamespace(max_pixels=100, max_side=100), data=data)
    monkeypatch.setattr(predict, "trained_task", lambda *_: (task, cfg, None))
    with pytest.raises(SetupError, match=r"--out FILE\.csv"):
        predict.predict_files(folder, [png(tmp_path / "a.png")])
    task = SimpleNamespace(kind="music", inference_model=None)
    with pytest.raises(CheckpointError, match="is of music and cannot answer files"):
        predict.predict_files(folder, [tmp_path / "a.csv"])


def test_rows_and_files_that_cannot_be_answered_are_reported_at_the_end(answered, tmp_path):
    """Each is reported with its place and what is expected, after all others are answered."""
    good = write_csv(tmp_path / "good.csv", [{"age": 30, "city": "Bern"}, {"age": "old", "city": "Rome"}])
    other = tmp_path / "other.png"
    other.write_bytes(b"")
    cut = tmp_path / "cut.jsonl"
    cut.write_text('{"age": 3, "city": "Rome"}\n{"age": 4\n')
    files = [tmp_path / "none.csv", other, cut, write_csv(tmp_path / "short.csv", [{"age": 1}]), good]
    with pytest.raises(SetupError) as raised:
        answered("table_classification", *files)
    rows = rows_of(tmp_path / "out.jsonl")
    assert [(row["path"], row["row"]) for row in rows] == [(str(cut), 1), (str(good), 1)]
    assert raised.value.exit_code == 3
    expected = {
        files[0]: "No such file",
        other: "this run takes rows of a table: files end in .csv, .tsv, .json, .jsonl, .ndjson, .parquet, .pq",
        cut: "object 2 is not JSON",
        f"{files[3]}, row 1": "city is missing",
        f"{good}, row 2": "Column age: 'old' is not a number",
    }
    for note, (place, message) in zip(map(str, raised.value.faults), expected.items(), strict=True):
        assert (note.startswith(str(place)), message in note) == (True, True), note


@pytest.mark.parametrize(
    ("kind", "name", "content", "message"),
    [
        ("text_classification", "a.csv", "a,b\nx,y\n", "there is no column review or text or sentence, but a, b"),
        ("text_classification", "a.txt", "\n\n", "this file has no inputs"),
        ("text_classification", "a.txt", b"\xff\xfe", "not UTF-8"),
        ("text_classification", "a.tsv", "text\tn\na\tb\n1\t2\t3\n", "Line 3 has 3 values, the header 2"),
        ("table_regression", "a.parquet", "no", "this Parquet file cannot be read"),
        ("table_regression", "a.json", "[1]", "The JSON is not an object with the one key rows"),
        ("array_regression", "a.npy", "no", "not an array in numpy's format"),
        ("array_regression", "a.npy", npy(np.zeros(2, complex)), "The array holds complex128, and not numbers."),
        ("array_regression", "a.csv", "1,2\n3\n", "this is not a signal"),
        ("array_regression", "a.csv", "1,2\n3,4\n", "The array has the shape 2 x 2, not 2 x 12"),
        ("array_regression", "a.wav", "RIFF", "this is not a signal"),
        ("image_multilabel", "a.png", picture(size=(1, 201)), "1 x 201 pixels; a side of at most 200 is accepted"),
    ],
)
def test_a_file_of_another_content_says_what_is_wrong(answered, tmp_path, kind, name, content, message):
    """The error names the file and what is wrong with it."""
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SetupError) as raised:
        answered(kind, file)
    assert rows_of(tmp_path / "out.jsonl") == []
    error = str(raised.value)
    assert message in error
    assert name.endswith(".json") or "application/json" not in error  # only requests have that
    assert error.startswith(str(file))


def test_pictures_never_replace_the_inputs(answered, tmp_path):
    """An output table whose folder of pictures would be the folder of the inputs is refused."""
    file = png(tmp_path / "photos" / "a.png")
    before = file.read_bytes()
    for given in (file, file.parent, tmp_path):
        with pytest.raises(SetupError) as raised:
            answered("image_segmentation", given, out="photos.jsonl")
        assert (rows_of(tmp_path / "photos.jsonl"), raised.value.exit_code, file.read_bytes()) == ([], 3, before)


def test_a_local_file_may_have_more_texts_than_a_request(tmp_path):
    """The limits of a request do not apply to local files."""
    from deeplightning.run.inputs import inputs_of

    assert len([*inputs_of(write_jsonl(tmp_path / "a.json", {"texts": ["a, b"] * 1500}), "text")]) == 1500


def test_pictures_never_replace_other_files(answered, tmp_path):
    """A folder that no earlier answer wrote is left alone; answers of an earlier call are replaced."""
    file, mask = png(tmp_path / "images" / "a.png"), png(tmp_path / "masks" / "a.png", 1)
    before = mask.read_bytes()
    with pytest.raises(SetupError, match="choose another --out"):
        answered("image_segmentation", file, out="masks.jsonl")
    assert mask.read_bytes() == before
    (tmp_path / "new").mkdir()
    first, again = (answered("image_segmentation", file, out="new.jsonl") for _ in range(2))
    assert first == again


def test_a_local_picture_may_be_as_large_as_in_training(answered, tmp_path):
    """`serve.max_pixels` limits requests, not files."""
    file = tmp_path / "large.png"
    file.write_bytes(picture(size=(150, 150)))
    assert len(answered("image_multilabel", file)) == 1


def test_a_label_that_stdout_cannot_encode_is_escaped(monkeypatch):
    """On stdout of another encoding than UTF-8, a label is an escape and ends nothing."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", out)
    with predict._writer(None) as write:
        write({"predicted_label": "größe"})
    out.flush()
    assert b"gr\\xf6\\xdfe" in out.buffer.getvalue()


def test_a_table_is_written_to_a_stdout_that_is_no_file(monkeypatch):
    """As in a notebook, or under `contextlib.redirect_stdout`."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with predict._writer(None) as write:
        write({"path": "a.png"})
    assert sys.stdout.getvalue() == "path\r\na.png\r\n"
