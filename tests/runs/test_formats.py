"""`train.export` or `--format` adds the network to a bundle in torch's formats, verified against the task."""

import hashlib
import json
import warnings
import zipfile

import numpy as np
import pytest
import torch
from exported import exported
from torch import nn

from deeplightning.export.bundle import FormatError, golden_inputs
from deeplightning.export.formats import FORMATS, add_format
from deeplightning.kinds import KINDS
from deeplightning.runfolder import RunFolder, card_digest, golden_digest
from serve.bundle import Bundle


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.bundle.iterdir()}


def loaded(folder, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls TorchScript deprecated
        if name == "torchscript":
            return torch.jit.load(folder.bundle_torchscript)
        return torch.export.load(folder.bundle_pt2).module()


@pytest.mark.parametrize(
    "kind", [kind if kind == "table_regression" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_each_kind_is_there_in_each_format(kind, tmp_path):
    """The file answers as the network does in batches of any size, and contains no path of a source file; the card has
    its digest. The server opens the bundle, and needs none of these files."""
    task, folder = exported(tmp_path / "run", kind)
    before = contents(folder)
    for name in FORMATS:
        assert add_format(task, folder, name).is_file()
    after, card = contents(folder), json.loads(folder.bundle_card.read_text())
    files = {"model.torchscript.pt", "model.pt2"}
    assert after.keys() == before.keys() | files
    assert {name: card["files"][name] for name in files} == {
        name: hashlib.sha256(after[name]).hexdigest() for name in files
    }
    assert card["digest"] == card_digest(card)
    assert card["golden"]["digest"] == golden_digest(card)
    (samples,) = golden_inputs(folder, card).values()
    for name in FORMATS:
        network = loaded(folder, name)
        for size in (1, 2, 7):
            batch = torch.from_numpy(np.resize(samples, (size, *samples.shape[1:])))
            with torch.inference_mode():
                torch.testing.assert_close(network(batch), task.inference_model()(batch), atol=1e-5, rtol=1e-5)
    assert Bundle.open(folder.path).precision == "fp32"
    for name in files:
        with zipfile.ZipFile(folder.bundle / name) as parts:
            content = b"".join(parts.read(part) for part in parts.namelist())
        assert b"site-packages" not in content
        assert b"exported.py" not in content
        (folder.bundle / name).unlink()
    assert Bundle.open(folder.path).precision == "fp32"


class OtherwiseWhenTraced(nn.Module):
    def forward(self, rows):
        return rows.mean(1, keepdim=True).repeat(1, 3) * (1.1 if torch.jit.is_tracing() else 1)


class RefusesTraces(nn.Module):
    def forward(self, rows):
        if torch.jit.is_tracing():
            raise RuntimeError("no trace of me")
        return rows.mean(1, keepdim=True).repeat(1, 3)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (RefusesTraces(), r"cannot be exported as torchscript: no trace of me\."),
        (
            OtherwiseWhenTraced(),
            "exported as torchscript and the checkpoint give different answers: they differ by up to",
        ),
    ],
)
def test_a_network_that_a_format_cannot_express_leaves_the_bundle(network, words, tmp_path):
    """One message has the format and the next step; the exit code is 4, and the bundle stays."""
    task, folder = exported(tmp_path, "table_regression", network)
    before = contents(folder)
    with pytest.raises(FormatError, match=words) as error:
        add_format(task, folder, "torchscript")
    assert "leave torchscript out of train.export" in str(error.value)
    assert error.value.exit_code == 4
    assert contents(folder) == before
    assert [path.name for path in folder.path.iterdir()] == ["bundle"]
    add_format(task, folder, "pt2")


def test_a_run_has_the_formats_of_its_config(train, command, place):
    """`train.export: [onnx, pt2]` writes both at the end of training; `export --format` adds another format later."""
    run = train("train.num_epochs=1", "data.module.params.limit=100", "train.export=[onnx,pt2]")
    folder = RunFolder(run.folder)
    assert folder.bundle_pt2.is_file()
    assert not folder.bundle_torchscript.exists()
    done = command("export", str(folder.path), "--format", "torchscript", cwd=place)
    assert done.out.strip().splitlines()[-1] == str(folder.bundle)
    assert folder.bundle_pt2.is_file()
    assert folder.bundle_torchscript.is_file()
