"""`deeplightning init --data` derives a config from the data, and refuses data that a kind of project cannot use."""

import csv
import json
import re
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from modules import data_config
from PIL import Image

from deeplightning.array_spec import read_signal
from deeplightning.cli import guess_columns
from deeplightning.cli.guess import MAX_EXAMINED_FILES, Columns
from deeplightning.cli.init import init
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.data.data_errors import DataError
from deeplightning.data.labelled_images import LabelledImages
from deeplightning.faults import ConfigError, SetupError
from deeplightning.run.inputs import inputs_of


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    place = tmp_path / "a place"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def picture(path, colour, size=(12, 8), mode="RGB"):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def table(path, *rows, delimiter=","):
    with Path(path).open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)


def config(kind, data):
    """Write a project into a new folder; return the values of its config, and the notes."""
    notes, paths = init(Path("new project"), kind, Path(data))
    return plain(read(paths[0]).root), "\n".join(notes)


def test_pictures_give_classes_size_channels_mean_and_std():
    """The config has classes, size, channels, mean and std of the pictures, and a relative path to data beside the
    project."""
    Path("pets").mkdir()
    for number in range(3):
        picture(f"pets/cat/{number}.png", (255, 0, 51))
        picture(f"pets/Élan d'or/{number}.PNG", (0, 0, 51))
    written, notes = config("images", "pets")
    params = written["data"]["module"]["params"]
    assert written["data"]["root"] == "../pets"
    assert (params["image_size"], params["mode"], params["on_bad_image"]) == ([8, 12], "RGB", "error")
    assert (params["mean"], params["std"]) == ([0.5, 0.0, 0.2], [0.5, 0.01, 0.01])
    assert written["model"]["network"]["params"] == {"num_classes": 2, "num_channels": 3, "image_size": [8, 12]}
    assert "2 classes, the folders of pets: cat (3), Élan d'or (3)" in notes
    assert "deeplightning ask ../pets/cat/0.png" in Path("new project/README.md").read_text()


@pytest.mark.parametrize("sets", [["train", "val"], ["train", "val", "test"], ["Training", "valid", "Testing"]])
@pytest.mark.parametrize("kind", ["images", "segmentation", "signal"])
def test_data_without_a_test_set_are_not_tested(kind, sets):
    """With a folder `train` but no folder `test`, the config has no stage `test`, and a note says why."""
    for name in sets:
        if kind == "segmentation":
            masked(f"d/{name}/{{}}", np.eye(8))
        for member in ("a", "b"):
            if kind == "images":
                picture(f"d/{name}/{member}/1.png", (9, 9, 9))
            elif kind == "signal":
                Path(f"d/{name}/{member}").mkdir(parents=True)
                np.save(f"d/{name}/{member}/1.npy", np.ones((1, 8), np.float32))
    written, notes = config(kind, "d")
    is_tested = len(sets) == 3
    assert written["stages"] == (["train", "test"] if is_tested else ["train"])
    assert ("no test set: there is no folder d/test" in notes) != is_tested


def test_a_file_of_labels_gives_several_labels():
    """A `labels.csv` beside the folder of pictures gives a task with several labels per picture; a note counts them."""
    for number in range(4):
        picture(f"many/images/{number}.png", (number, 0, 0))
    table("many/labels.csv", ["file", "labels"], ["0.png", "a|b"], ["1.png", "a"], ["2.png", ""], ["3.png", "c"])
    written, notes = config("images", "many")
    data, model = written["data"]["module"], written["model"]
    assert (data["type"], data["params"]["images"]) == ("deeplightning.data.labelled_images.LabelledImages", "images")
    assert (data["params"]["labels"], data["params"]["image_size"]) == ("labels.csv", [8, 12])
    assert model["module"]["type"] == "deeplightning.task.multilabel.ImageMultilabel"
    assert (model["network"]["params"]["num_classes"], model["loss"]["type"]) == (3, "torch.nn.BCEWithLogitsLoss")
    assert "3 labels, by many/labels.csv: a (2), b (1), c (1); 1 of the pictures have none" in notes


@pytest.mark.parametrize(
    ("lines", "labels", "words"),
    [
        (["file;labels", "0.png;a|b", "1.png;a"], "a (2), b (1)", None),
        (["file,labels", "0.png,a;b", "1.png,a;c"], "a (2), b (1), c (1)", None),
        (["file,labels", '0.png,"a, b"', "1.png,"], "a (1), b (1)", None),
        (["file,labels", "0.png,a|b|a", "1.png,a"], "a (2), b (1)", None),
        (["file,labels", "0.png,a", "1.png,c"], "a (1), c (1)", "each picture has one label; if none can have more"),
    ],
)
def test_a_file_of_labels_may_have_other_signs(lines, labels, words):
    """Separators between values and between labels are detected; the project reads the labels that `init` found."""
    for number in range(2):
        picture(f"many/photos/{number}.png", (number, 0, 0))
    Path("many/labels.csv").write_text("\n".join(lines))
    written, notes = config("images", "many")
    assert (f"by many/labels.csv: {labels};" in notes, words is None or words in notes) == (True, True), notes
    found = LabelledImages(data_config("many"), **written["data"]["module"]["params"]).read()["all"]
    assert found.labels.sum(0).tolist() == [int(digit) for digit in re.findall(r"\d", labels)]


def test_folders_of_splits_with_unknown_names_are_noted():
    """Folders such as `seg_train` are taken for classes, and a note says what they contain."""
    for name in ("seg_train/a", "seg_train/b", "seg_test/a", "seg_test/b"):
        picture(f"d/{name}/1.png", (9, 9, 9))
    assert "each of these holds the folders a, b; if those are the classes" in config("images", "d")[1]


def test_grey_large_and_damaged_pictures():
    """Grey pictures have one channel; for several sizes one is proposed, with a network that takes it; damaged files
    are counted and left out of the training."""
    for name in ("a", "b"):
        picture(f"x/train/{name}/1.png", 100, (300, 200), "L")
        picture(f"x/train/{name}/2.png", 100, (140, 150), "L")
    Path("x/train/a/bad.png").write_bytes(b"no picture")
    written, notes = config("images", "x")
    params = written["data"]["module"]["params"]
    assert (params["image_size"], params["mode"], params["on_bad_image"]) == (128, "L", "skip")
    assert params["mean"] == [round(100 / 255, 4)]
    assert written["model"]["network"]["params"] == {"num_classes": 2, "num_channels": 1, "small_images": False}
    assert "1 file cannot be decoded and will be left out: x/train/a/bad.png" in notes
    for number in range(2 * MAX_EXAMINED_FILES - 6):  # every second file is examined
        picture(f"x/train/b/{number + 3}.png", 100, (9, 9), "L")
    init(Path("larger"), "images", Path("x"))
    notes = Path("larger/README.md").read_text()
    assert "1 file cannot be decoded and will be left out in a sample of 300; training checks all: x/train" in notes


def test_masks_give_classes():
    """The number of classes follows from the highest value of a mask except 255; sizes become multiples of 8."""
    for number in range(3):
        picture(f"s/images/{number}.jpg", (9, 9, 9), (33, 20))
        mask = np.full((20, 33), 255, np.uint8)
        mask[:5], mask[5:9] = number, 3
        Path("s/masks").mkdir(exist_ok=True)
        Image.fromarray(mask).save(f"s/masks/{number}.png")
    written, notes = config("segmentation", "s")
    params = written["data"]["module"]["params"]
    assert params["class_names"] == ["class_0", "class_1", "class_2", "class_3"]
    assert params["image_size"] == [16, 32]
    assert written["model"]["network"]["params"]["num_classes"] == 4
    assert "0, 1, 2, 3; 255 does not count" in notes


def masked(place, values, number=4, size=(8, 8), ending="png"):
    for name in range(number):
        picture(f"{place.format('images')}/{name}.jpg", (9, 9, 9), (8, 8))
        path = Path(place.format("masks"), f"{name}.{ending}")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.resize(values, size).astype(np.uint8)).save(path)


def test_masks_are_found_as_the_training_finds_them():
    """The ending may be in capitals. Masks of another size than the picture or with too many values are refused; a note
    says how folders of splits must be arranged."""
    masked("s/{}", [0, 1], ending="PNG")
    assert config("segmentation", "s")[0]["model"]["network"]["params"]["num_classes"] == 2
    masked("t/{}/train", [0, 1])
    Path("new project").rename("first")
    assert "t/images holds the folders train; for sets, put `images`" in config("segmentation", "t")[1]
    Path("t/images/train/1.jpg").write_bytes(b"no picture")
    with pytest.raises(SetupError, match=r"t/images holds pictures that cannot be decoded: t/images/train/1.jpg"):
        init(Path("new"), "segmentation", Path("t"))
    masked("u/{}", [0, 1], size=(4, 8))
    sizes = r"u/masks/0.png: this mask has 8 x 4 pixels, its picture u/images/0.jpg has 8"
    with pytest.raises(SetupError, match=sizes):
        init(Path("new"), "segmentation", Path("u"))
    masked("v/{}", [0, 1, 3, 252, 254, 255])
    with pytest.raises(SetupError, match="too many values for classes: 0, 1, 3, 252, 254, 255; save them without"):
        init(Path("new"), "segmentation", Path("v"))


def test_a_table_of_texts_gives_columns_and_classes():
    """The column of texts, the column of classes, the delimiter and the classes are detected."""
    rows = [[number, "yes" if number % 3 else "no", f"a text; with words {number}"] for number in range(30)]
    table("t.csv", ["id", "Label", "review"], *rows, [30, "", "without a class"], delimiter=";")
    written, notes = config("text", "t.csv")
    params = written["data"]["module"]["params"]
    assert (params["file"], params["text"], params["label"]) == ("../t.csv", "review", "Label")
    assert (params["delimiter"], params["class_names"]) == (";", ["no", "yes"])
    assert "2 classes: no (10), yes (20)" in notes
    assert "missing values, whose rows are left out: Label (1)" in notes


def test_a_table_of_numbers_gives_inputs_and_target():
    """Numbers and categories are distinguished; row numbers and columns that differ in each row are ignored; an example
    row is written."""
    rng = np.random.default_rng(0)
    rows = [
        [i, f"{a:.2f}", ("Bern", "Zug, ZG")[i % 2], f"order {i}", i % 3, f"{b:.2f}"]
        for i, (a, b) in enumerate(rng.normal(5, 2, (60, 2)))
    ]
    rows[1][1] = "NA"
    table("n.csv", ["id", "size", "town", "note", "rooms", "price"], *rows)
    written, notes = config("regression", "n.csv")
    data, network = written["data"], written["model"]["network"]["params"]
    assert (data["root"], data["module"]["params"]["train"]) == ("..", "n.csv")
    assert data["module"]["params"]["columns"] == {
        "id": "ignore", "size": "number", "town": "category", "note": "ignore", "rooms": "number", "price": "number"
    }  # fmt: skip
    assert (data["module"]["params"]["target"], data["module"]["params"]["missing"]) == ("price", "fill")
    assert network == {"num_numbers": 2, "cardinalities": [3], "num_outputs": 1, "depth": 1, "dropout": 0.2}
    assert "the column price is predicted (by its name), numbers" in notes
    assert "ignored, a row number: id\nignored, different in nearly every row: note" in notes
    assert "missing values, which are filled: size (1)" in notes
    row = {"size": float(rows[0][1]), "town": "Bern", "rooms": 0.0}
    assert json.loads(Path("new project/row.json").read_text()) == {"rows": [row]}


@pytest.mark.parametrize("name", ["n.csv", "n.parquet"])
def test_long_whole_numbers_are_categories_where_they_would_lose_digits(name):
    """Whole numbers that a float cannot distinguish, such as account numbers, are categories or ignored; nanoseconds
    since 1970, which stay distinct, are numbers."""
    rows = [[10**17 + i % 3, 10**17 + i, 17 * 10**17 + 10**9 * i, i % 2] for i in range(60)]
    table("n.csv", ["branch", "account", "nanoseconds", "y"], *rows)
    pd.read_csv("n.csv").to_parquet("n.parquet")
    kinds = {"branch": "category", "account": "ignore", "nanoseconds": "number", "y": "category"}
    assert config("table", name)[0]["data"]["module"]["params"]["columns"] == kinds


@pytest.mark.parametrize(("target", "classes"), [("kind", ["a", "b"]), ("rooms", ["0", "1", "2"]), ("price", None)])
def test_the_target_of_a_table_decides_what_is_learned(target, classes):
    """A target of words or few whole numbers is classified, one of other numbers predicted."""
    rows = [[i % 5 + 0.5, ("a", "b")[i % 2], i % 3, i * 1.5] for i in range(60)]
    names = ["size", "kind", "rooms", "price"]
    index = names.index(target)
    order = [*(n for n in range(4) if n != index and names[n] != "price"), index]
    table("n.csv", [names[n] for n in order], *([row[n] for n in order] for row in rows))
    written, _ = config("table", "n.csv")
    task = "classif.Classification" if classes else "regression.Regression"
    assert written["model"]["module"]["type"] == f"deeplightning.task.{task}"
    assert written["model"]["network"]["params"]["num_outputs"] == len(classes or [1])
    few = (250, "val_loss", 0) if classes else (60, None, 1)  # classes of few rows have a simple network
    train, depth = written["train"], written["model"]["network"]["params"]["depth"]
    assert (train["num_epochs"], train["checkpoint"]["monitor"], depth) == few


def test_signals_give_classes_channels_and_length():
    """The config has the median length of the signals; an example signal is written."""
    for name in ("a", "b"):
        Path("s", name).mkdir(parents=True)
        for number, steps in enumerate((10, 12, 14)):
            np.save(f"s/{name}/{number}.npy", np.full((2, steps), number))
    written, notes = config("signal", "s")
    assert written["data"]["module"]["params"] == {"length": 12}
    assert written["model"]["network"]["params"] == {"num_channels": 2, "num_outputs": 2}
    assert "6 signals of 2 channels and 10 to 14 steps, brought to 12" in notes
    assert "too few to train: at least 10 are needed to divide them into sets, not 6" in notes
    assert json.loads(Path("new project/signal.json").read_text()) == {"signal": [[0.0] * 10] * 2}


def test_signals_in_tables_may_have_semicolons_and_decimal_commas():
    """Signals with any separator and decimal sign, also as numpy.savetxt writes them, give the same numbers; a note
    names signals with more channels than steps."""
    for number, (sign, point) in enumerate([(",", "."), (";", ","), ("\t", "."), (";", ".")]):
        path = Path(f"s/{'ab'[number % 2]}/{number}.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x{sign}y{sign}z\n" + f"1{point}5{sign}-2{sign}3e-1\n" * 2)
    assert "more channels than steps: if the axes are swapped" in config("signal", "s")[1]
    Path("s/a/4.csv").write_text("1,5;-2;0,3\n" * 2)
    np.savetxt("s/b/5.csv", [[1.5, -2, 0.3]] * 2)
    np.savetxt("s/b/6.csv", [[1.5, -2, 0.3]] * 2, fmt="%9.2f", header="x y z", comments="")
    found = [read_signal(path).tolist() for path in Path("s").rglob("*.csv")]
    assert found == [[[1.5, 1.5], [-2, -2], [0.3, 0.3]]] * 7


@pytest.mark.parametrize("header", ["review,label", "review,label,"])
def test_texts_are_read_with_the_columns_that_init_has_seen(header, monkeypatch):
    """The project reads tables with an unnamed row number, as R writes them, or with a header that ends with a
    comma."""
    first = "{0}," if header.endswith("l") else ""
    rows = [f"{first}a text number {{0}},{'ab'[number % 2]}".format(number) for number in range(40)]
    Path("t.csv").write_text("\n".join([header, *rows]))
    written, _ = config("text", "t.csv")
    monkeypatch.chdir("new project")
    module = runpy.run_path("texts.py")["TextsOfColumns"](data_config(), **written["data"]["module"]["params"])
    assert sum(map(len, module.read().values())) == 40
    module.setup("fit")
    assert module.text_spec.column == "review"


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
@pytest.mark.parametrize("ending", ["tsv", "csv"])
def test_predict_reads_the_texts_of_the_training(ending, encoding, monkeypatch):
    """Training and `predict` read the same texts from a table: with quotes, several lines or Windows' encoding. A label
    that is no number is a class among numbers."""
    texts = [f'it is "good {number}" for € 3, he said' + "\nat last" * (number % 3) for number in range(40)]
    labels = ["?" if number % 8 == 7 else number % 2 for number in range(40)]
    delimiter = "\t" if ending == "tsv" else ","
    table(f"t.{ending}", ["review", "label"], *zip(texts, labels, strict=True), delimiter=delimiter)
    Path(f"t.{ending}").write_bytes(Path(f"t.{ending}").read_bytes().decode().encode(encoding))
    Path("t.txt").write_text("für 3 €\n", encoding=encoding)
    written, notes = config("text", f"t.{ending}")
    assert "3 classes: 0 (20), 1 (15), ? (5)" in notes
    monkeypatch.chdir("new project")
    module = runpy.run_path("texts.py")["TextsOfColumns"](data_config(), **written["data"]["module"]["params"])
    module.setup("fit")
    assert sorted(text for part in module.read().values() for text in part.texts) == sorted(texts)
    assert [text for _, text in inputs_of(Path("..", f"t.{ending}"), "text", module.text_spec)] == texts
    assert [text for _, text in inputs_of(Path("../t.txt"), "text", module.text_spec)] == ["für 3 €"]


def test_a_column_of_sets_is_no_label():
    """`init` chooses another column as label, and a note says that the column of splits has no effect."""
    rows = [[f"text {number}", "abcde"[number % 5], ("train", "test")[number % 2]] for number in range(40)]
    table("t.csv", ["text", "topic", "set"], *rows)
    written, notes = config("text", "t.csv")
    assert written["data"]["module"]["params"]["label"] == "topic"
    assert "the column set names sets; it does not divide the texts" in notes


def test_only_the_first_rows_of_a_long_table_are_read(monkeypatch):
    """A note says how many rows were read."""
    monkeypatch.setattr(guess_columns, "MAX_ROWS", 20)
    table("n.csv", ["x", "y"], *([i, i] for i in range(50)), ["no number", "at all"])
    assert "20 rows, the first ones, of n.csv" in config("regression", "n.csv")[1]


MANY = "x,y\n" + "1,2\n" * 20


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("text", {}, "d is a folder; name a file: CSV with a header, JSON lines or Parquet"),
        ("text", {"good/1.txt": "fine"}, "d holds texts in files, such as d/good/1.txt; write them into a CSV file"),
        ("table", {"a.csv": MANY, "Train.parquet": ""}, "JSON lines or Parquet, such as d/Train.parquet"),
        ("regression", "", "d cannot be read as a table: Empty CSV file"),
        ("regression", "x,y\n" + "a,b\n" * 20,
         "one of numbers to predict; its columns: x (category), y (category)"),
        ("table", "x^y\n" + "1^2\n" * 20, "its columns: x^y (category); the values of a row are separated by a comma"),
        ("signal", {"a/1.npy": ""}, "d must hold a folder for each of two or more classes; it has: a"),
        ("signal", {"a/1.npy": "", "b/1.txt": ""}, "d/b holds no signal"),
        ("signal", {"a/1.npy": "", "b/1.npy": ""}, "d/a/1.npy cannot be read as a signal"),
        ("text", "x,y\n" + "".join(f"text {i},{i}\n" for i in range(20)), "none of its columns (x, y) has classes"),
        ("images", {}, "d holds no folder. Put the pictures of each class into a folder of its name"),
        ("images", {"train/a.png": "", "test/b.png": ""},
         "d/test holds pictures but no folders, so their classes are"),
        ("images", {"cat/a.png": ""}, "d must hold a folder for each of two or more classes; it has: cat"),
        ("images", {"z/cat/a.png": "", "z/dog/a.png": ""}, "it has: z; if they are in d/z, name that"),
        ("images", {"annotations/a.json": "", "x/a.png": ""}, "d/annotations describes objects in pictures, as COCO"),
        ("images", {"train/labels/a.txt": "", "train/images/a.png": ""},
         "d/train/labels describes objects in pictures"),
        ("images", {"labels.csv": "file,labels\na,x\n", "a.png": ""}, "is missing; write the full name, a.png"),
        ("images", {"cat/a.png": "", "dog/a.txt": ""}, "d/dog holds no picture"),
        ("images", {"cat/a.png": "", "dog/a.png": ""}, "none of the pictures can be decoded: d/cat/a.png"),
        ("images", {"labels.csv": "file,labels\na.png,x\n"}, "d/labels.csv, line 2: the picture d/a.png is missing"),
        ("images", {"labels.jsonl": '{"file": "a.png", "labels": []}'}, "labels no picture"),
        ("images", MANY, "d is not a folder"),
        ("segmentation", {"img/a.png": ""}, "d holds no folder `images` (its folders: img)"),
        ("segmentation", {"images/a.png": "", "masks/a_mask.png": ""},
         "masks/a.png (there is a_mask.png). A mask is a PNG"),
        ("segmentation", {"images/a.png": "", "masks/a.png": ""},
         "none of the pictures can be decoded: d/images/a.png"),
    ],
)  # fmt: skip
def test_data_of_another_form_are_a_note(kind, content, words):
    """The error says what was found and what is needed; nothing is written."""
    if isinstance(content, dict):
        Path("d").mkdir()
        for name, text in content.items():
            Path("d", name).parent.mkdir(parents=True, exist_ok=True)
            Path("d", name).write_text(text)
    else:
        Path("d").write_text(content)
    with pytest.raises(SetupError) as error:
        init(Path("new"), kind, Path("d"))
    assert words in str(error.value)
    assert not Path("new").exists()


def test_a_file_of_labels_may_be_in_utf_16():
    """Labels may be in UTF-16 with tabs, as Excel saves them; an encoding other than UTF-8 and UTF-16 is refused with a
    remedy."""
    for number in range(2):
        picture(f"many/{number}.png", (number, 0, 0))
    Path("many/labels.csv").write_text("file\tlabels\r\n0.png\tgrün\r\n1.png\trot\r\n", "utf-16", newline="")
    assert "2 labels, by many/labels.csv: grün (1), rot (1);" in config("images", "many")[1]
    Path("many/labels.csv").write_text("file,labels\n0.png,grün\n", "cp1252")
    with pytest.raises(SetupError, match=r"many/labels\.csv is not in UTF-8 .*; save it as UTF-8"):
        init(Path("other"), "images", Path("many"))


def test_a_target_without_classes_is_named_as_such():
    """The message for a column whose values are all different says that it has no classes."""
    table("t.csv", ["id", "text", "kind"], *([str(n), f"text {n}", "ab"[n % 2]] for n in range(20)))
    with pytest.raises(SetupError, match="the column id has no classes"):
        init(Path("new"), "text", Path("t.csv"), Columns("id"))


def test_data_that_may_not_be_read_are_no_bug(monkeypatch):
    """A folder without permission is an error of the data, not a traceback."""
    for name in ("cat", "dog"):
        Path("d", name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(Path("d", name, "a.png"))

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("deeplightning.data.class_folders.files_below", refuse)
    monkeypatch.setattr("deeplightning.cli.guess_masks.folders", refuse)
    with pytest.raises(SetupError, match="Permission denied: 'd/cat'"):
        init(Path("new"), "images", Path("d"))
    with pytest.raises(SetupError, match="Permission denied"):
        init(Path("new"), "segmentation", Path("d"))


def test_wrong_arguments_are_errors():
    """An unknown kind, missing or insufficient data, or data for a kind without any is an error."""
    with pytest.raises(ConfigError, match=r"there is no kind 'image'. Did you mean images\? There are: images, text"):
        init(Path("new"), "image", None)
    with pytest.raises(SetupError, match=r"--data no\.csv: there is no such file or folder"):
        init(Path("new"), "text", Path("no.csv"))
    table("one.csv", ["label"], *([["a"], ["b"]] * 5))
    with pytest.raises(SetupError, match=r"one.csv: label is its only column"):
        init(Path("new"), "text", Path("one.csv"), Columns("label"))
    with pytest.raises(ConfigError, match="the kind own takes no data"):
        init(Path("new"), "own", Path())


def test_nothing_is_overwritten():
    """If a file of the project exists already, `init` names it and writes nothing."""
    init(Path("new"), "images", None)
    before = {path: path.stat().st_mtime_ns for path in Path("new").iterdir()}
    with pytest.raises(SetupError, match=r"new/config.yaml, new/README.md, new/.gitignore: already exists"):
        init(Path("new"), "images", None)
    assert {path: path.stat().st_mtime_ns for path in Path("new").iterdir()} == before
    Path("other").mkdir()
    Path("other/reviews.py").touch()
    with pytest.raises(SetupError, match=r"other/reviews.py: already exists"):
        init(Path("other"), "text", None)
    assert [path.name for path in Path("other").iterdir()] == ["reviews.py"]
    Path("file").touch()
    with pytest.raises(SetupError, match="file cannot be created"):
        init(Path("file"), "images", None)


@pytest.mark.parametrize(
    ("more", "words"),
    [(b'"so" fine,a\n', "Line 42 is not CSV"), (b'"no end,a\n', "is not CSV"), (b"f\xfcr,a\n", "can't decode")],
)
def test_texts_that_cannot_be_split_are_an_error_of_the_data(more, words, monkeypatch):
    """A wrong quote or encoding in a table of texts is an error of the data, with the line."""
    table("t.csv", ["review", "label"], *([f"text {n}", "ab"[n % 2]] for n in range(40)))
    written, _ = config("text", "t.csv")
    with Path("t.csv").open("ab") as file:
        file.write(more)
    monkeypatch.chdir("new project")
    module = runpy.run_path("texts.py")["TextsOfColumns"](data_config(), **written["data"]["module"]["params"])
    with pytest.raises(DataError, match=words):
        module.setup("fit")


def test_long_texts_fit_the_network_of_the_project(monkeypatch):
    """The project cuts the texts of every split to a length that the network accepts."""
    table("t.csv", ["review", "label"], *(["word " * 600 + str(n), "ab"[n % 2]] for n in range(40)))
    written, _ = config("text", "t.csv")
    monkeypatch.chdir("new project")
    module = runpy.run_path("texts.py")["TextsOfColumns"](data_config(), **written["data"]["module"]["params"])
    module.setup()
    assert {int(module.dataset(split).lengths.max()) for split in ("train", "val", "test")} == {256}


@pytest.mark.parametrize(("sets", "stages"), [("train val", ["train"]), ("train test", ["train", "test"])])
def test_a_file_of_labels_without_a_test_set_is_not_tested(sets, stages):
    """The config has the stage `test` only if the column `split` has a test set, or does not exist."""
    for number, _ in enumerate(sets.split()):
        picture(f"many/{number}.png", (number, 0, 0))
    table("many/labels.csv", ["file", "labels", "split"], *([f"{n}.png", "a", s] for n, s in enumerate(sets.split())))
    assert config("images", "many")[0]["stages"] == stages


def test_sizes_of_a_table_that_is_not_read_to_its_end_are_left_to_the_training(monkeypatch):
    """Rows that `init` does not read may have other categories and classes."""
    monkeypatch.setattr(guess_columns, "MAX_ROWS", 30)
    table("t.csv", ["x", "town", "kind"], *([f"{n}.5", "ABC"[n // 20], "uv"[n % 2]] for n in range(60)))
    written = config("table", "t.csv")[0]
    network = written["model"]["network"]["params"]
    assert (network["cardinalities"], network["num_outputs"]) == ("auto", "auto")
    assert written["data"]["module"]["params"]["missing"] == "fill"


def test_each_set_of_pictures_must_have_masks():
    """Training reads every set, so pictures without masks are refused before it."""
    masked("d/train/{}", np.eye(8))
    picture("d/test/images/0.jpg", (9, 9, 9), (8, 8))
    with pytest.raises(SetupError, match=r"d/test/images/0\.jpg: this picture has no mask"):
        init(Path("new"), "segmentation", Path("d"))
