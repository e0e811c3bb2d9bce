"""Text classification end to end: training, metrics, output files, checkpoints and errors."""

import json
import shutil

import numpy as np
import pytest
import sklearn.metrics
import torch
from tiny import csv_rows

from deeplightning.export.bundle import export
from deeplightning.model.transformer import TextTransformer
from deeplightning.run.load import trained_task
from deeplightning.run.make_bundle import export_run, quantize_run
from deeplightning.runfolder import RunFolder
from deeplightning.text_spec import TextSpec
from deeplightning.torch_server import Checkpoint
from serve.bundle import Bundle

CONFIG = """\
seed: 7
data:
  root: ROOT
  module:
    type: deeplightning.data.text.TextData
    params: {train: train.tsv, validation: dev.tsv, test: test.tsv, class_names: [negative, positive]}
  batch_size: 16
model:
  module: {type: deeplightning.task.text_classif.TextClassification}
  network:
    type: deeplightning.model.transformer.TextTransformer
    params: {num_classes: 2, vocabulary_size: 60, width: 16, num_layers: 1, num_heads: 2, max_length: 32}
  optimizer:
    type: torch.optim.AdamW
    params: {lr: 0.01, eps: 1.0e-8, weight_decay: 0.01}
    groups: [{match: 'bias|norm', weight_decay: 0}]
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 4, export: false}
logger:
  params: {tracking_uri: STORE, system_metrics: false}
  log_every_n_steps: 4
"""
GOOD, BAD = ["fine", "fresh", "funny", "wise"], ["dull", "bleak", "stale", "noisy"]
THINGS = ["film", "plot", "cast", "score"]


def reviews(size, start=0):
    """Return texts and labels that a small network can learn."""
    rows = []
    for n in range(start, start + size):
        label = n % 2
        word, other = ((GOOD, BAD)[not label][n // 2 % 4], (GOOD, BAD)[label][n // 3 % 4])
        tail = f" , and never {other} ." if n % 3 == 0 else " ."
        rows.append((f"the {THINGS[n // 4 % 4]} is {word}{tail}", label))
    return rows


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Files of 128, 33 and 41 reviews, and a test file without labels."""
    folder = tmp_path_factory.mktemp("reviews")
    for name, rows in (("train", reviews(128)), ("dev", reviews(33, 1000)), ("test", reviews(41, 2000))):
        lines = "".join(f"{text}\t{label}\n" for text, label in rows)
        (folder / f"{name}.tsv").write_text(f"sentence\tlabel\n{lines}")
    lines = "".join(f"{number}\t{text}\n" for number, (text, _) in enumerate(reviews(41, 2000)))
    (folder / "unlabelled.tsv").write_text(f"index\tsentence\n{lines}")
    return folder


@pytest.fixture(scope="module")
def text_config(root, store, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "text.yaml"
    path.write_text(CONFIG.replace("ROOT", f"'{root}'").replace("STORE", f"'{store}'"))
    return path


@pytest.fixture(scope="module")
def trained(command, text_config, place):
    """A run that was trained, validated and tested."""
    return command("train", text_config, "stages=[train, validate, test]", cwd=place, code=0)


def test_it_learns_and_leaves_what_every_run_leaves(trained, root):
    """The predictions have the file's rows in order, the results their accuracy, and the confusion matrix is drawn."""
    for stage, name in (("val", "dev"), ("test", "test")):
        results = json.loads((trained.folder / f"{stage}_results.json").read_text())
        rows = csv_rows(trained.folder / f"{stage}_predictions.csv")
        labels = [line.split("\t")[1] for line in (root / f"{name}.tsv").read_text().splitlines()[1:]]
        assert [row["index"] for row in rows] == [str(n) for n in range(len(labels))]
        assert [row["label"] for row in rows] == labels
        expected = sklearn.metrics.accuracy_score(labels, [row["predicted_class"] for row in rows])
        assert results[f"{stage}_acc"] == pytest.approx(expected)
        assert results[f"{stage}_acc"] > 0.9
        assert {row["predicted_label"] for row in rows} == {"negative", "positive"}
    assert (trained.folder / "val_confusion_matrix.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_are_those_of_the_whole_set(trained, root):
    """Validation loss and accuracy equal those of texts that are evaluated one by one, without padding."""
    checkpoint = torch.load(trained.folder / "last.ckpt", weights_only=True)
    network = TextTransformer(2, 60, width=16, num_layers=1, num_heads=2, max_length=32).eval()
    network.load_state_dict({n.removeprefix("network."): w for n, w in checkpoint["state_dict"].items()})
    saved = checkpoint["text_classification"]
    spec = TextSpec.from_dict(saved["text_spec"], saved["content"])
    assert saved["class_names"] == ["negative", "positive"]
    texts, labels = zip(*reviews(33, 1000), strict=True)
    with torch.no_grad():
        logits = torch.cat([network(torch.tensor([tokens])) for tokens in spec.encode(texts)])
    results = json.loads((trained.folder / "val_results.json").read_text())
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    assert results["val_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert results["val_acc"] == pytest.approx((logits.argmax(1) == torch.tensor(labels)).float().mean().item())


def test_texts_without_labels_are_predicted(trained, command, text_config, place):
    """Texts without labels get the predictions of the same texts with labels; a test with them is refused."""
    settings = ["data.module.params.test=unlabelled.tsv", f"test.ckpt='{trained.folder / 'last.ckpt'}'"]
    outcome = command("train", text_config, "stages=[predict]", *settings, cwd=place, code=0)
    rows, known = csv_rows(outcome.folder / "predictions.csv"), csv_rows(trained.folder / "test_predictions.csv")
    assert "label" not in rows[0]
    assert [row["predicted_class"] for row in rows] == [row["predicted_class"] for row in known]
    refused = command("train", text_config, "stages=[test]", *settings, cwd=place, code=3)
    assert "has no labels to test with" in refused.err


@pytest.mark.slow
def test_without_validation_there_are_no_numbers_of_it(command, text_config, place, tracked):
    """Without a validation file and a fold a run has metrics of the training alone; with a fold it has both."""
    settings = ["data.module.params.validation=null", "train.num_epochs=1"]
    outcome = command("train", text_config, *settings, cwd=place, code=0)
    names = tracked(outcome.folder).metrics
    assert "train_loss_epoch" in names
    assert [name for name in names if name.startswith("val")] == []
    folded = command("train", text_config, *settings, "data.num_splits=4", "data.fold=3", cwd=place, code=0)
    assert "val_acc" in tracked(folded.folder).metrics


@pytest.mark.slow
def test_a_changed_training_file_is_noticed(trained, command, text_config, place, root, tmp_path):
    """A checkpoint is refused with exit code 2 if the training file gives another vocabulary; with the run's vocabulary
    the changed file is accepted, and the results are the same."""
    for name in ("dev", "test"):
        (tmp_path / f"{name}.tsv").write_text((root / f"{name}.tsv").read_text())
    (tmp_path / "train.tsv").write_text((root / "train.tsv").read_text() + "an unheard-of film\t1\n" * 2)
    moved = ["stages=[test]", f"test.ckpt='{trained.folder / 'last.ckpt'}'", f"data.root='{tmp_path}'"]
    outcome = command("train", text_config, *moved, cwd=place, code=2)
    assert "the checkpoint was trained with" in outcome.err
    saved = torch.load(trained.folder / "last.ckpt", weights_only=True)["text_classification"]
    (tmp_path / "words.txt").write_text(saved["content"])
    again = command("train", text_config, *moved, "data.module.params.vocabulary=words.txt", cwd=place, code=0)
    results = [json.loads((run.folder / "test_results.json").read_text()) for run in (trained, again)]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["check", "--dry-run"], 0, ""),
        (["check", "model.network.params.poling=end"], 2, "pooling"),
        (["check", "train.checkpoint={monitor: val_accuracy, mode: max}"], 2, "val_acc"),
        (
            ["check", "--dry-run", "model.network.params.num_classes=5"],
            *(2, "the data has 2 classes (labels 0 to 1), the network"),
        ),
        (["train", "model.network.params.vocabulary_size=9"], 2, "does not take the data's tokens, 0 to 2"),
        (["train", "model.network.params.max_length=5"], 2, "tokens, and the network takes at most 5"),
        (["train", "data.module.params.train=none.tsv"], 3, "none.tsv is missing"),
    ],
)
def test_what_does_not_fit_is_one_note(command, text_config, place, arguments, code, words):
    """A valid config passes a dry run. A misspelt key, a metric that is never logged, a network that does not fit the
    data and a missing file are reported without a traceback."""
    outcome = command(arguments[0], text_config, *arguments[1:], cwd=place, code=code)
    assert words in outcome.out + outcome.err
    assert "Traceback" not in outcome.err


def test_a_checkpoint_answers_as_its_bundle(trained, tmp_path):
    """Torch and ONNX Runtime compute the same probabilities for a client's texts, with the same tokenizer."""
    shutil.copytree(trained.folder, tmp_path / "run")
    run, texts = RunFolder(tmp_path / "run"), [text for text, _ in reviews(5, 3000)]
    np.savez_compressed(run.samples, texts=np.array(texts))
    export(trained_task(run)[0], run, np.array(texts), {})
    by_torch, by_onnx = Checkpoint.open(run), Bundle.open(run.path)
    assert by_torch.spec == by_onnx.spec
    assert by_torch.labels == by_onnx.labels == ["negative", "positive"]
    assert by_torch.samples.tolist() == by_onnx.samples.tolist()
    rows = [by_onnx.spec.prepare(text.encode()) for text in ("a fine film", "never stale , never dull")]
    tokens = by_onnx.spec.stack(rows)
    assert by_torch.predict(tokens) == pytest.approx(by_onnx.predict(tokens), abs=1e-5)


def test_a_run_is_quantized_on_its_own_texts(trained, tmp_path):
    """int8 is calibrated on the run's validation set, each text once, and the bundle answers its golden samples."""
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(trained.folder, folder.path)
    export_run(folder)
    summary = quantize_run(folder)
    figures = json.loads(folder.bundle_card.read_text())["int8"]
    results = json.loads((trained.folder / "val_results.json").read_text())
    assert figures["accuracy_fp32"] == pytest.approx(100 * results["val_acc"])
    assert figures["texts"] == 33
    assert summary.startswith(f"int8: accuracy {figures['accuracy']:.2f} %")
    assert Bundle.open(folder.path, "int8").precision == "int8"


@pytest.mark.slow
def test_weights_of_another_vocabulary_are_named(trained, command, text_config, place, root, tmp_path):
    """`model.init_from` loads embeddings by number; a warning says that these belong to other words."""
    texts = shutil.copytree(root, tmp_path / "texts")
    with (texts / "train.tsv").open("a") as file:
        file.write("an unheard-of film\t1\n" * 200)
    start = [f"model.init_from='{trained.folder}'", "train.num_epochs=1"]
    for more, is_other in (([f"data.root='{texts}'"], True), ([], False)):
        done = command("train", text_config, *start, *more, cwd=place, code=0)
        assert ("belong to other words" in done.out + done.err) == is_other
