"""Text classification in whole runs: what is learned, measured, written, kept and refused."""

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
    """Texts and labels that a few weights can learn."""
    rows = []
    for n in range(start, start + size):
        label = n % 2
        word, other = ((GOOD, BAD)[not label][n // 2 % 4], (GOOD, BAD)[label][n // 3 % 4])
        tail = f" , and never {other} ." if n % 3 == 0 else " ."
        rows.append((f"the {THINGS[n // 4 % 4]} is {word}{tail}", label))
    return rows


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Files of 128, 33 and 41 reviews; another test file has no labels."""
    folder = tmp_path_factory.mktemp("reviews")
    for name, rows in (("train", reviews(128)), ("dev", reviews(33, 1000)), ("test", reviews(41, 2000))):
        lines = "".join(f"{text}\t{label}\n" for text, label in rows)
        (folder / f"{name}.tsv").write_text(f"sentence\tlabel\n{lines}")
    lines = "".join(f"{number}\t{text}\n" for number, (text, _) in enumerate(reviews(41, 2000)))
    (folder / "bare.tsv").write_text(f"index\tsentence\n{lines}")
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
    """Accuracy in the results is that of the predictions, which have the rows of the file in its order; there is a
    picture of the confusion matrix."""
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
    """Loss and accuracy of the validation, from each text alone, without any padding."""
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
    """A row for each, as for the same texts with labels; to test with them is refused."""
    best = f"test.ckpt='{trained.folder / 'last.ckpt'}'"
    bare = ["data.module.params.test=bare.tsv", best]
    outcome = command("train", text_config, "stages=[predict]", *bare, cwd=place, code=0)
    rows, known = (csv_rows(outcome.folder / "predictions.csv"), csv_rows(trained.folder / "test_predictions.csv"))
    assert "label" not in rows[0]
    assert [row["predicted_class"] for row in rows] == [row["predicted_class"] for row in known]
    refused = command("train", text_config, "stages=[test]", *bare, cwd=place, code=3)
    assert "has no labels to test with" in refused.err


@pytest.mark.slow
def test_without_validation_there_are_no_numbers_of_it(command, text_config, place, tracked):
    """No file and no fold: the run ends well, and has metrics of the training alone. A fold of the file has them."""
    outcome = command(
        "train", text_config, "data.module.params.validation=null", "train.num_epochs=1", cwd=place, code=0
    )
    names = tracked(outcome.folder).metrics
    assert "train_loss_epoch" in names
    assert [name for name in names if name.startswith("val")] == []
    settings = ["data.module.params.validation=null", "data.num_splits=4", "data.fold=3", "train.num_epochs=1"]
    folded = command("train", text_config, *settings, cwd=place, code=0)
    assert "val_acc" in tracked(folded.folder).metrics


@pytest.mark.slow
def test_a_changed_training_file_is_noticed(trained, command, text_config, place, root, tmp_path):
    """Weights say nothing to other tokens: exit code 2, with what to do; the run's own vocabulary is taken."""
    for name in ("dev", "test"):
        (tmp_path / f"{name}.tsv").write_text((root / f"{name}.tsv").read_text())
    (tmp_path / "train.tsv").write_text((root / "train.tsv").read_text() + "an unheard-of film\t1\n" * 2)
    best = f"test.ckpt='{trained.folder / 'last.ckpt'}'"
    moved = ["stages=[test]", best, f"data.root='{tmp_path}'"]
    outcome = command("train", text_config, *moved, cwd=place, code=2)
    assert "the checkpoint was trained with" in outcome.err
    saved = torch.load(trained.folder / "last.ckpt", weights_only=True)["text_classification"]
    (tmp_path / "words.txt").write_text(saved["content"])
    again = command("train", text_config, *moved, "data.module.params.vocabulary=words.txt", cwd=place, code=0)
    results = [json.loads((run.folder / "test_results.json").read_text()) for run in (trained, again)]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["check", "--dry-run"], 0, ""),
        (["check", "model.network.params.poling=end"], 2, "pooling"),
        (["check", "train.checkpoint={monitor: val_accuracy, mode: max}"], 2, "val_acc"),
        (
            ["check", "--dry-run", "model.network.params.num_classes=5"],
            2,
            "the data has 2 classes (labels 0 to 1), the",
        ),
        (["train", "model.network.params.vocabulary_size=9"], 2, "does not take the data's tokens, 0 to 2"),
        (["train", "model.network.params.max_length=5"], 2, "tokens, and the network takes at most 5"),
        (["train", "data.module.params.train=none.tsv"], 3, "none.tsv is missing"),
    ],
)
def test_what_does_not_fit_is_one_note(command, text_config, place, words, code, told):
    """Misspelt keys, a metric that is never logged, network and data that do not fit each other, and files that are
    not there; the config itself is right, and its step is tried."""
    outcome = command(words[0], text_config, *words[1:], cwd=place, code=code)
    assert told in outcome.out + outcome.err
    assert "Traceback" not in outcome.err


def test_a_checkpoint_answers_as_its_bundle(trained, tmp_path):
    """Torch and ONNX Runtime give the same probabilities to texts that a client sends, prepared by the same tokens."""
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
    """int8 by the validation set of the run's data module, each text once; the bundle answers its golden samples."""
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(trained.folder, folder.path)
    export_run(folder)
    told = quantize_run(folder)
    figures = json.loads(folder.bundle_card.read_text())["int8"]
    results = json.loads((trained.folder / "val_results.json").read_text())
    assert figures["accuracy_fp32"] == pytest.approx(100 * results["val_acc"])
    assert figures["texts"] == 33
    assert told.startswith(f"int8: accuracy {figures['accuracy']:.2f} %")
    assert Bundle.open(folder.path, "int8").precision == "int8"
