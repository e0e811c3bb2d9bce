"""A report contains the facts of a run folder and nothing else: no script, network access, secret or outside file."""

import base64
import csv
import io
import json
import pickle
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deeplightning.faults import CheckpointError, SetupError
from deeplightning.report import write
from deeplightning.report.facts import facts
from deeplightning.report.write import evaluate, report, write_report, write_run
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.metrics_file import points_line

SCRIPT = "<script>alert(1)</script>"
QUOTE = "\"'><img src=x onerror=alert(1)>"
TOKEN = "ghp_" + "a1B2c3D4e5F6g7H8i9J0" * 2


class Page(HTMLParser):
    """Collects the tags, attributes and text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def check(self) -> None:
        """Check that a page runs no script and loads nothing."""
        banned = {"script", "iframe", "object", "embed", "link", "base", "form", "a"}
        assert {tag for tag, _ in self.tags}.isdisjoint(banned)
        names = {name for _, attributes in self.tags for name in attributes}
        assert [name for name in names if name.startswith("on")] == []
        assert [a["src"] for _, a in self.tags if not str(a.get("src", "data:image/")).startswith("data:image/")] == []
        policies = [a["content"] for tag, a in self.tags if a.get("http-equiv") == "Content-Security-Policy"]
        assert policies == [
            "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
        ]


def png(size: int = 8) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (size, size), 77).save(stream, "PNG")
    return stream.getvalue()


def run_folder(path: Path, names: tuple[str, ...] = ("cat", "dog", "owl"), **more: str) -> RunFolder:
    """Return a run folder of a classification, with a few samples of each class and one mistake in three."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True)
    config = more.get("config", "seed: 1\nmodel:\n  network: {type: own.Net}\ndata: {module: {type: own.Data}}\n")
    folder.config.write_text(config)
    folder.places.write_text(json.dumps({"seed": f"{more.get('file', 'c.yaml')}:1:1"}))
    environment = {"host": more.get("host", "here"), "packages": {"torch": "2"}, "gpus": []}
    folder.environment.write_text(json.dumps(environment))
    folder.results("test").write_text(json.dumps({"test_acc": 2 / 3, "test_loss": 0.5}))
    folder.best_score.write_text(json.dumps({"metric": "val_acc", "value": 0.7, "step": 10}))
    points = [(4, {"val_loss": 1.0, "val_acc": 0.5}), (9, {"val_loss": 0.5, "val_acc": 0.7})]
    folder.metrics.write_text("".join(json.dumps(points_line(1, *point)) + "\n" for point in points))
    with folder.stage_predictions("test").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["index", "label", "predicted_class", "predicted_label", "predicted_probability"])
        for index in range(12):
            label = index % len(names)
            predicted = (label + (index % 3 == 2)) % len(names)
            writer.writerow([index, label, predicted, names[predicted], 0.9])
    image = base64.b64encode(png()).decode()
    sample = {"index": 2, "true": names[-1], "predicted": names[0], "probability": 0.9, "image": image}
    content = {"classes": [*names], "mistakes": [sample | {"name": more.get("file", "a.png")}]}
    folder.mistakes("test").write_text(json.dumps(content))
    (folder.path / "own_picture.png").write_bytes(png())
    return folder


def test_a_report_has_what_the_folder_tells(tmp_path):
    """A report has metrics, pictures, mistakes with file names, config with sources, environment and commands."""
    folder = run_folder(tmp_path / "a run")
    path = write_run(folder)
    shown = Page(path.read_text())
    shown.check()
    for words in ("Net on Data", "0.6667", "0.7", "cat", "a.png", "90.0%", "c.yaml:1:1", "host", "torch"):
        assert words in shown.text, words
    assert f"deeplightning reproduce '{folder.path}'" in shown.text
    alts = [a["alt"] for tag, a in shown.tags if tag == "img"]
    assert [words for words in alts if words.startswith(("loss over", "acc over", "Confusion", "Reliability", "own"))]
    drawn = {"test_confusion_matrix", "test_classes", "test_reliability"}
    assert {p.stem for p in folder.path.glob("*.svg")} == drawn
    assert {p.stem for p in folder.path.glob("*.png")} == drawn | {"own_picture"}
    found = evaluate(facts(folder))
    assert [(name, samples) for name, *_, samples in found.per_class] == [("cat", 4), ("dog", 4), ("owl", 4)]
    assert found.confused == [("owl", "cat", 4)]


def test_names_from_a_run_stay_text(tmp_path):
    """Markup in classes, file names, hosts, metrics, config keys and config values is shown as text."""
    config = f"seed: 1\nmodel: {{network: {{type: {json.dumps(SCRIPT)}}}}}\n{json.dumps(QUOTE)}: {json.dumps(SCRIPT)}\n"
    folder = run_folder(tmp_path / "x", (SCRIPT, QUOTE, "c"), config=config, host=SCRIPT, file=QUOTE + ".png")
    folder.results("test").write_text(json.dumps({SCRIPT: 1.0}))
    folder.metrics.write_text("".join(json.dumps(points_line(1, step, {SCRIPT: 1.0})) + "\n" for step in (0, 1)))
    content = write_run(folder).read_text()
    shown = Page(content)
    shown.check()
    assert SCRIPT in shown.text
    assert QUOTE in shown.text
    assert "<script" not in content
    assert not any("<script" in path.read_text() for path in folder.path.glob("*.svg"))


def test_nothing_of_a_foreign_folder_is_executed_or_followed(tmp_path):
    """No pickle or base is read, links out of the folder show nothing, and a script in an SVG does not run."""
    folder = run_folder(tmp_path / "x", config="_base_: ../secret.yaml\nseed: 1\n")
    (tmp_path / "secret.yaml").write_text("password: hunter2")
    (tmp_path / "secret.png").write_bytes(png(9))
    (folder.path / "linked.png").symlink_to(tmp_path / "secret.png")
    (folder.path / "passwd.svg").symlink_to("/etc/passwd")

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("it was unpickled",))

    for name in ("last.ckpt", "best.ckpt", "samples.npz", "own.png"):
        (folder.path / name).write_bytes(pickle.dumps(Bomb()))
    (folder.path / "evil.svg").write_text(f'<svg xmlns="http://www.w3.org/2000/svg" width="9pt">{SCRIPT}</svg>')
    content = report(facts(folder))
    shown = Page(content)
    shown.check()
    assert "hunter2" not in shown.text
    alts = [a["alt"] for tag, a in shown.tags if tag == "img"]
    assert "evil" in alts
    assert {"linked", "passwd", "own"}.isdisjoint(alts)


DAMAGED = [
    {
        "metrics.jsonl": "[1, 2",
        "test_results.json": '{"test_acc": "<b>", "x": null}',
        "best.json": '{"metric": [], "value": {}, "step": "x"}',
        "environment.json": '{"packages": 3, "git": [], "gpus": "x", "cpu": 1, "python": 2}',
        "places.json": "null",
        "test_mistakes.json": '{"classes": 3, "mistakes": [1, {"image": "!!", "probability": []}, {"image": "AAAA"}]}',
        "test_predictions.csv": "label,predicted_class,predicted_label\n-1,99999999999999999999,x\n",
        "own_picture.png": "\x89PNG\r\n\x1a\n",
    },
    {"metrics.jsonl": "[" * 100_000, "test_predictions.csv": "label,predicted_class,predicted_label\n0,1000000000,x\n"},
    {"metrics.jsonl": '{"val_acc": 3}', "test_predictions.csv": "prediction,target\n1,inf\n"},
    {"test_predictions.csv": "label,predicted_class,predicted_label,predicted_probability\n0,1,x,nan\n"},
    {"test_predictions.csv": "prediction,target\n1e999,x\n"},
    {"test_predictions.csv": "label,predicted_class,predicted_label\n"},
    {"test_predictions.csv": ""},
]


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_are_left_out(damage, tmp_path):
    """The report leaves out damaged files."""
    folder = run_folder(tmp_path / "x")
    folder.metrics.unlink()
    for name, content in damage.items():
        (folder.path / name).write_text(content, encoding="latin-1")
    shown = Page(report(facts(folder)))
    shown.check()
    assert "How to reproduce" in shown.text


def test_no_secret_is_shown(tmp_path):
    """A report contains no value whose key names a secret, and nothing that looks like a token."""
    config = f"seed: 1\nown: {{db_password: hunter2hunter2, note: {TOKEN}}}\n"
    folder = run_folder(tmp_path / "x", config=config, host=f"https://me:{TOKEN}@host", file=TOKEN)
    folder.stage_predictions("test").unlink()
    content = report(facts(folder))
    assert "hunter2" not in content
    assert TOKEN not in content
    assert "***" in content


def test_each_kind_of_prediction_has_its_evaluation(tmp_path):
    """Regression has truth against prediction with R² and RMSE, several labels have precision and recall, and two
    classes have a ROC curve."""
    folder = run_folder(tmp_path / "x", ("no", "yes"))
    assert set(evaluate(facts(folder)).drawings) >= {"test_roc", "test_reliability"}
    alone = run_folder(tmp_path / "y", ("no",))  # one class has no curve
    alone.mistakes("test").write_text(json.dumps({"classes": ["no", "yes"]}))
    assert "test_roc" not in evaluate(facts(alone)).drawings
    random = np.random.default_rng(0)
    truth = random.normal(size=50)
    rows = [f"{n},{t + 0.1},{t}" for n, t in enumerate(truth)]
    folder.stage_predictions("test").write_text("\n".join(["index,prediction,target", *rows]))
    (drawing,) = evaluate(facts(folder)).drawings.values()
    expected = 1 - 50 * 0.01 / np.sum((truth - truth.mean()) ** 2)
    assert f"RMSE 0.1, R² {expected:.4g}" in drawing.alt
    rows = ["0,a|b,a,0.9,0.8", "1,,b,0.1,0.9", "2,b,b,0.2,0.1"]
    head = "index,predicted_labels,labels,probability_a,probability_b"
    folder.stage_predictions("test").write_text("\n".join([head, *rows]))
    assert evaluate(facts(folder)).per_class == [("a", 1.0, 1.0, 1.0, 1), ("b", 0.5, 0.5, 0.5, 2)]


def test_a_large_picture_does_not_displace_smaller_ones(tmp_path, monkeypatch):
    """Only the picture that exceeds the size limit is left out, and the page names it."""
    folder = run_folder(tmp_path / "run")
    (folder.path / "a_large_one.png").write_bytes(png() + bytes(100_000))
    monkeypatch.setattr(write, "MAX_PICTURES_BYTES", 100_000)
    shown = Page(write_run(folder).read_text())
    assert "a_large_one.png" in shown.text
    alts = [a["alt"] for tag, a in shown.tags if tag == "img"]
    assert ("own picture" in alts, "a large one" in alts) == (True, False)


def test_a_file_that_is_no_report_is_kept(tmp_path):
    """It is not overwritten, and the error mentions --out; a report is replaced. A folder needs a config."""
    target = tmp_path / "report.html"
    target.write_text("my own notes")
    with pytest.raises(SetupError, match="is not a report of Deep Lightning; name another file with --out"):
        write_report(target, write.document("first", ""))
    assert target.read_text() == "my own notes"
    target.unlink()
    for title in ("first", "second"):
        write_report(target, write.document(title, ""))
    assert "<h1>second</h1>" in target.read_text()
    with pytest.raises(CheckpointError, match=r"this is not a run folder: it has no cfg\.yaml"):
        facts(RunFolder(tmp_path))


def test_the_last_picture_of_a_series_is_shown(tmp_path):
    """Steps are sorted as numbers: 10 comes after 9."""
    folder = run_folder(tmp_path / "x")
    for step in (9, 10):
        (folder.path / f"samples_{step}.png").write_bytes(png())
    assert "samples_10, the last of 2" in Page(write_run(folder).read_text()).text


def test_the_best_validation_is_found_by_its_value(tmp_path):
    """A checkpoint counts the steps of all optimizers, a series the batches."""
    folder = run_folder(tmp_path / "x")
    points = [(4, {"val_acc": 0.5}), (9, {"val_acc": 0.7}), (14, {"val_acc": 0.6}), (19, {"val_acc": 0.7, "lr-0": 0.1})]
    folder.metrics.write_text("".join(json.dumps(points_line(1, *point)) + "\n" for point in points))
    folder.best_score.write_text(json.dumps({"metric": "val_acc", "value": 0.7, "step": 20}))  # two optimizers
    assert facts(folder).best_step == 9
