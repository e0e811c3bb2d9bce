"""`train.export` or `--format` adds the network to a bundle as `model.pt2`, verified against the task."""

import hashlib
import json
import zipfile

import numpy as np
import pytest
import torch
from exported import exported
from torch import nn

from deeplightning.export.bundle import FormatError, golden_inputs
from deeplightning.export.formats import add_pt2
from deeplightning.kinds import KINDS
from deeplightning.runfolder import RunFolder, card_digest, golden_digest
from serve.bundle import Bundle


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.bundle.iterdir()}


@pytest.mark.parametrize(
    "kind", [kind if kind == "table_regression" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_each_kind_is_there_as_pt2(kind, tmp_path):
    """The file answers as the network does in batches of any size, and contains no path of a source file; the card has
    its digest. The server opens the bundle, and does not need this file."""
    task, folder = exported(tmp_path / "run", kind)
    before = contents(folder)
    file = add_pt2(task, folder)
    after, card = contents(folder), json.loads(folder.bundle_card.read_text())
    assert after.keys() == before.keys() | {"model.pt2"}
    assert card["files"]["model.pt2"] == hashlib.sha256(after["model.pt2"]).hexdigest()
    assert card["digest"] == card_digest(card)
    assert card["golden"]["digest"] == golden_digest(card)
    (samples,) = golden_inputs(folder, card).values()
    network = torch.export.load(file).module()
    for size in (1, 2, 7):
        batch = torch.from_numpy(np.resize(samples, (size, *samples.shape[1:])))
        with torch.inference_mode():
            torch.testing.assert_close(network(batch), task.inference_model()(batch), atol=1e-5, rtol=1e-5)
    assert Bundle.open(folder.path).precision == "fp32"
    with zipfile.ZipFile(file) as parts:
        content = b"".join(parts.read(part) for part in parts.namelist())
    assert b"site-packages" not in content
    assert b"exported.py" not in content
    file.unlink()
    assert Bundle.open(folder.path).precision == "fp32"


class ByTurns(nn.Module):
    """Does something else for torch.export in the second turn."""

    turn = 1

    def forward(self, rows):
        if self.turn == 2 and torch.compiler.is_exporting():
            return self.exported(rows.mean(1, keepdim=True).repeat(1, 3))
        return rows.mean(1, keepdim=True).repeat(1, 3)


class Refuses(ByTurns):
    def exported(self, rows):
        raise RuntimeError("no export of me")


class Differs(ByTurns):
    def exported(self, rows):
        return rows * 1.1


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (Refuses(), r"cannot be exported as pt2: no export of me\."),
        (Differs(), "exported as pt2 and the checkpoint give different answers: they differ by up to"),
    ],
)
def test_a_network_that_the_format_cannot_express_leaves_the_bundle(network, words, tmp_path, monkeypatch):
    """One message has the format and the next step; the exit code is 4, and the bundle stays."""
    task, folder = exported(tmp_path, "table_regression", network)
    before = contents(folder)
    monkeypatch.setattr(ByTurns, "turn", 2)
    with pytest.raises(FormatError, match=words) as error:
        add_pt2(task, folder)
    assert "leave pt2 out of train.export" in str(error.value)
    assert error.value.exit_code == 4
    assert contents(folder) == before
    assert [path.name for path in folder.path.iterdir()] == ["bundle"]


def test_a_run_has_the_formats_of_its_config(train, command, place):
    """`train.export: [onnx, pt2]` writes both at the end of training; `export --format` adds the format later."""
    run = train("train.num_epochs=1", "data.module.params.limit=100", "train.export=[onnx,pt2]")
    folder = RunFolder(run.folder)
    assert folder.bundle_pt2.is_file()
    folder.bundle_pt2.unlink()
    done = command("export", str(folder.path), "--format", "pt2", cwd=place)
    assert done.out.strip().splitlines()[-1] == str(folder.bundle)
    assert folder.bundle_pt2.is_file()
