"""A bundle opens only if it is unchanged: a damaged or edited one is refused in one sentence with exit code 4, and no
other file is read."""

import json
import os
import shutil

import numpy as np
import pytest
from served import COLOURS, encoded, negative_run, picture

from deeplightning.image_spec import ImageSpec
from deeplightning.runfolder import card_digest
from serve.bundle import Bundle, BundleError

SAMPLES = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8), dtype=np.uint8)
RUN = {"id": "abc", "folder_name": "a run", "created": "now", "versions": {}}


def test_a_bundle_answers(run_folder):
    """A bundle, opened directly or by its run folder, has task, labels and the export's facts about the run, and
    predicts as its network does. Its golden samples are available in the form that clients send."""
    bundle = Bundle.open(run_folder.path)
    assert bundle.examples == json.loads(run_folder.bundle_card.read_text())["golden"]["pictures"]
    assert (bundle.folder, bundle.task, bundle.precision) == (run_folder.bundle, "image_classification", "fp32")
    assert (bundle.spec, bundle.labels, bundle.run) == (ImageSpec(8, 8), ["red", "green", "blue"], RUN)
    np.testing.assert_array_equal(bundle.samples, SAMPLES)
    scores = np.exp(SAMPLES.mean(axis=(2, 3), dtype=np.float64) / 32)  # by another way than the graph's
    answers = bundle.predict(SAMPLES)
    assert answers.dtype == np.float32
    np.testing.assert_allclose(answers, scores / scores.sum(1, keepdims=True), atol=1e-6)
    prepared = bundle.prepare(picture(size=(20, 10)), 200)
    np.testing.assert_array_equal(prepared[:, 0, 0], COLOURS["red"])
    assert (prepared.dtype, prepared.shape, prepared.flags.c_contiguous) == (np.uint8, (3, 8, 8), True)


def test_a_bundle_may_be_copied_and_linked_to(run_folder, tmp_path):
    """A bundle opens at any path and through a link."""
    shutil.copytree(run_folder.bundle, tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to("elsewhere")
    np.testing.assert_array_equal(Bundle.open(tmp_path / "link").samples, SAMPLES)


def edited(change, has_digest=True):
    """Return a function that edits the card by `change`, with a correct digest or without."""

    def damage(folder):
        card = json.loads((folder / "bundle.json").read_text())
        change(card)
        with_digest = {**card, "digest": card_digest(card)} if has_digest else card
        (folder / "bundle.json").write_text(json.dumps(with_digest))

    return damage


def written(data):
    return lambda folder: (folder / "bundle.json").write_bytes(data)


def flipped(name):
    def damage(folder):
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    return damage


def answers(*rows):
    return lambda card: card["golden"].update(fp32=encoded(np.array(rows, "<f4").tobytes()))


# Wrong cards, folders and links instead of files, and other graphs are in `hostile/bundles.jsonl`.
DAMAGES = {
    "no folder": (shutil.rmtree, "There is no folder"),
    "no bundle.json": (lambda folder: (folder / "bundle.json").unlink(), "`deeplightning export RUN` writes one"),
    "flipped model": (flipped("model.onnx"), "model.onnx is not the file that was exported"),
    "cut JSON": (lambda folder: os.truncate(folder / "bundle.json", 300), "is not JSON"),
    "deep JSON": (written(b"[" * 100_000), "is not JSON"),
    "vast JSON": (lambda folder: os.truncate(folder / "bundle.json", 10**9), "a bundle.json of more than 32,000,000"),
    "edited labels": (
        edited(lambda card: card["labels"].reverse(), has_digest=False),
        "is damaged: bundle.json was changed since its export; write it again with `deeplightning export RUN`",
    ),
    "no digest": (edited(lambda card: card.pop("digest"), has_digest=False), "was changed"),
    "nan": (written(b'{"format": 2, "run": NaN}'), "is not JSON"),
    "sample too large": (
        edited(lambda card: card["golden"]["pictures"].__setitem__(-1, encoded(picture(size=(9, 9))))),
        "Golden sample 3",
    ),
    "no bundle": (lambda folder: [file.unlink() for file in folder.iterdir()], "There is no bundle in"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_bundle_is_refused_in_one_sentence(run_folder, tmp_path, capfd, damage, words):
    """A damaged bundle is refused with exit code 4 and a sentence that says what is wrong and where."""
    folder = tmp_path / "bundle"
    shutil.copytree(run_folder.bundle, folder)
    damage(folder)
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4
    assert capfd.readouterr() == ("", "")


def test_a_bundle_answers_with_pictures(tmp_path):
    """A task that answers with pictures gives numbers from 0 to 1; labels are refused."""
    folder = negative_run(tmp_path).bundle
    bundle = Bundle.open(folder)
    assert (bundle.task, bundle.labels) == ("image_reconstruction", [])
    answers = bundle.predict(SAMPLES[:3])
    assert (answers.dtype, answers.shape) == (np.float32, (3, 3, 8, 8))
    np.testing.assert_allclose(answers * 255, 255 - SAMPLES[:3].astype(np.float32), atol=1e-4)
    edited(lambda card: card.update(labels=["red"]))(folder)
    with pytest.raises(BundleError, match="none for pictures"):
        Bundle.open(folder)
