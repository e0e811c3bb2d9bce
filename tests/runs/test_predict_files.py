"""`predict RUN FILE`: files of each kind are answered as the run's bundle, and so the endpoint, answers them."""

import base64
import csv
import io
import json
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
    """`runs(kind)`: task, run folder and bundle of a kind, made once."""
    made = {}

    def run(kind):
        if kind not in made:
            task, folder = exported(tmp_path_factory.mktemp(kind), kind)
            made[kind] = task, folder, Bundle.open(folder.bundle)
        return made[kind]

    return run


@pytest.fixture
def asked(runs, monkeypatch, tmp_path):
    """`asked(kind, file, …)` answers files by the task of a kind: the rows, and the error if one was raised."""

    def ask(kind, *files, out="out.jsonl"):
        task, folder, _ = runs(kind)
        cfg = SimpleNamespace(serve=SimpleNamespace(max_pixels=10_000, max_side=200))
        monkeypatch.setattr(predict, "trained_task", lambda *_: (task, cfg, None))
        error = None
        try:
            predict.predict_files(folder, files, tmp_path / out)
        except SetupError as raised:
            error = raised
        written = tmp_path / out
        return [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else [], error

    return ask


def table(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def lines(path, *values):
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path


def stored(path, rows):
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def flat(kind, answer):
    """The row of an answer of the endpoint, put together another way than ours."""
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
        lambda folder: table(folder / "a.csv", ROWS),
        lambda folder: lines(folder / "a.json", {"rows": ROWS}),
        lambda folder: lines(folder / "a.jsonl", *ROWS),
        lambda folder: stored(folder / "a.PARQUET", ROWS),
    ],
    ids=["csv", "json", "jsonl", "parquet"],
)
def test_rows_of_tables_are_answered(runs, asked, tmp_path, kind, write):
    """From CSV, JSON, JSON lines and Parquet: a row for each, with its number, and the numbers of the endpoint."""
    file = write(tmp_path)
    rows, error = asked(kind, file)
    assert error is None
    assert_same(rows, file, kind, answers(runs(kind)[2], ROWS, 0))


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: folder / "a.txt",
        lambda folder: table(folder / "a.csv", [{"text": text, "n": 1} for text in TEXTS]),
        lambda folder: table(folder / "a.csv", [{"note": text} for text in TEXTS]),
        lambda folder: table(folder / "a.csv", [{"text": "n", "review": text} for text in TEXTS]),
        lambda folder: lines(folder / "a.jsonl", *[{"review": text, "n": 1} for text in TEXTS]),
        lambda folder: folder / "a.tsv",
        lambda folder: lines(folder / "a.jsonl", *[{"text": text} for text in TEXTS]),
        lambda folder: lines(folder / "a.json", {"texts": TEXTS}),
    ],
    ids=["txt", "csv", "one column", "trained", "trained jsonl", "tsv", "jsonl", "json"],
)
def test_texts_are_answered(runs, asked, tmp_path, write):
    """A line each, or the column of the training table, `text` or `sentence`, or the only one."""
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS) + "\n")
    (tmp_path / "a.tsv").write_text("index\tsentence\n" + "".join(f"{n}\t{text}\n" for n, text in enumerate(TEXTS)))
    file = write(tmp_path)
    rows, error = asked("text_classification", file)
    assert error is None
    assert_same(rows, file, "text_classification", answers(runs("text_classification")[2], TEXTS, 0))


def sound(path):
    """16 bits, two channels, and the numbers that it stands for."""
    whole = np.round(SIGNALS[0] / 8 * 2**15).astype("<i2")  # (2, 12)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(whole.T.tobytes())
    return whole / 2**15


@pytest.mark.parametrize("kind", ["array_classification", "array_regression", "array_multilabel"])
def test_arrays_and_signals_are_answered(runs, asked, tmp_path, kind):
    """.npy with one or several, .json as the endpoint takes it, .csv with a line for each step, .wav."""
    several, one, listed, steps = (tmp_path / name for name in ("a.npy", "b.npy", "c.json", "d.csv"))
    np.save(several, SIGNALS)
    np.save(one, SIGNALS[1])
    lines(listed, {"arrays": SIGNALS.tolist()})
    steps.write_text("left,right\n" + "".join(f"{a!r},{b!r}\n" for a, b in SIGNALS[2].T.tolist()))
    heard = sound(tmp_path / "e.wav")
    given = {several: SIGNALS, one: SIGNALS[1:2], listed: SIGNALS, steps: SIGNALS[2:], tmp_path / "e.wav": heard[None]}
    for file, arrays in given.items():
        rows, error = asked(kind, file)
        assert error is None
        assert_same(rows, file, kind, answers(runs(kind)[2], list(arrays), 0))
    rows, error = asked(kind, tmp_path)  # a folder
    assert error is None
    assert len(rows) == sum(map(len, given.values()))


def test_the_other_files_of_a_folder_are_counted_on_stderr(asked, capsys, tmp_path):
    """As a training counts them: a folder of photographs has some that are not read."""
    table(tmp_path / "a.csv", ROWS)
    for name in ("b.heic", "c.heic", "README", ".hidden"):
        (tmp_path / name).touch()
    rows, error = asked("table_classification", tmp_path)
    assert (len(rows), error) == (len(ROWS), None)
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
def test_pictures_get_labels_and_masks(runs, asked, tmp_path):
    """Several labels are columns; a mask is a PNG file in the folder beside the table, as the endpoint sends it."""
    files = [png(tmp_path / folder / "a.png", seed) for seed, folder in enumerate(("one", "two"))]
    data = [file.read_bytes() for file in files]
    rows, error = asked("image_multilabel", *files)
    assert error is None
    for row, answer in zip(rows, answers(runs("image_multilabel")[2], data, 100), strict=True):
        assert row.pop("path") in map(str, files)
        wanted = flat("image_multilabel", answer)
        assert row["predicted_labels"] == wanted.pop("predicted_labels")
        assert [row[name] for name in wanted] == pytest.approx([*wanted.values()], abs=1e-5)

    rows, error = asked("image_segmentation", *files, out="masks.jsonl")
    assert error is None
    names = [str(tmp_path / "masks" / name) for name in ("a.png", "a-2.png")]
    assert [row["mask"] for row in rows] == names
    for row, answer in zip(rows, answers(runs("image_segmentation")[2], data, 100), strict=True):
        with Image.open(row["mask"]) as ours, Image.open(io.BytesIO(base64.b64decode(answer["mask"]))) as theirs:
            assert np.array_equal(np.asarray(ours), np.asarray(theirs))
        assert [row[f"share_{one['label']}"] for one in answer["classes"]] == [
            one["share"] for one in answer["classes"]
        ]

    rows, error = asked("image_reconstruction", files[0], out="shown.jsonl")
    assert error is None
    with Image.open(tmp_path / "shown" / "a.png") as image:
        assert image.size == (5, 6)


def test_a_run_that_cannot_answer_files_says_so(runs, monkeypatch, tmp_path):
    """Masks do not go to stdout, and a task of another kind answers no files: one note, with the remedy."""
    task, folder, _ = runs("image_segmentation")
    cfg = SimpleNamespace(serve=SimpleNamespace(max_pixels=100, max_side=100))
    monkeypatch.setattr(predict, "trained_task", lambda *_: (task, cfg, None))
    with pytest.raises(SetupError, match=r"--out FILE\.csv"):
        predict.predict_files(folder, [png(tmp_path / "a.png")])
    task = SimpleNamespace(kind="music", inference_model=None)
    with pytest.raises(CheckpointError, match="is of music and cannot answer files"):
        predict.predict_files(folder, [tmp_path / "a.csv"])


def test_what_cannot_be_answered_is_named_after_the_rest(asked, tmp_path):
    """Rows and files, each with its place and what is expected; all others have their answers."""
    good = table(tmp_path / "good.csv", [{"age": 30, "city": "Bern"}, {"age": "old", "city": "Rome"}])
    other = tmp_path / "other.png"
    other.write_bytes(b"")
    cut = tmp_path / "cut.jsonl"
    cut.write_text('{"age": 3, "city": "Rome"}\n{"age": 4\n')
    files = [tmp_path / "none.csv", other, cut, table(tmp_path / "short.csv", [{"age": 1}]), good]
    rows, error = asked("table_classification", *files)
    assert [(row["path"], row["row"]) for row in rows] == [(str(cut), 1), (str(good), 1)]
    assert error.exit_code == 3
    expected = {
        files[0]: "No such file",
        other: "this run takes rows of a table: files end in .csv, .tsv, .json, .jsonl, .ndjson, .parquet, .pq",
        cut: "object 2 is not JSON",
        f"{files[3]}, row 1": "city is missing",
        f"{good}, row 2": "Column age: 'old' is not a number",
    }
    for note, (place, words) in zip(map(str, error.faults), expected.items(), strict=True):
        assert (note.startswith(str(place)), words in note) == (True, True), note


@pytest.mark.parametrize(
    ("kind", "name", "content", "words"),
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
def test_a_file_of_another_content_says_what_is_wrong(asked, tmp_path, kind, name, content, words):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    rows, error = asked(kind, file)
    assert rows == []
    assert words in str(error)
    assert name.endswith(".json") or "application/json" not in str(error)  # which is for requests
    assert str(error).startswith(str(file))


def test_pictures_never_replace_the_inputs(asked, tmp_path):
    """A table beside a folder of inputs, with its name, is refused."""
    file = png(tmp_path / "photos" / "a.png")
    before = file.read_bytes()
    for given in (file, file.parent, tmp_path):
        rows, error = asked("image_segmentation", given, out="photos.jsonl")
        assert (rows, error.exit_code, file.read_bytes()) == ([], 3, before)


def test_a_local_file_may_have_more_texts_than_a_request(tmp_path):
    """As with rows and arrays."""
    from deeplightning.run.inputs import inputs_of

    assert len([*inputs_of(lines(tmp_path / "a.json", {"texts": ["a, b"] * 1500}), "text")]) == 1500
