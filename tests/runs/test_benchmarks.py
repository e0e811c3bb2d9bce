"""The benchmarks are valid: planted faults are real faults, and the programs of a comparison compute the same.

Nothing is timed here.
"""

import inspect
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from deeplightning.config.target import find

# Last, since a program there is named like our package `serve`.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import engines
import mutations
import scoring
import servers
import side_by_side
import timed
import train as training

ROOT = Path(__file__).resolve().parents[2]
SMALL = {kind: count // 7 for kind, count in mutations.KINDS.items()}
SEEDS = (3, 11, 12, 13)


@pytest.fixture(scope="module")
def maker():
    return mutations.Maker(ROOT)


@pytest.fixture(scope="module")
def published(maker):
    """The mutations of the seeds of the published figures."""
    return [mutation for seed in SEEDS for mutation in maker.make(seed)]


def test_a_seed_makes_the_same_300_mutations_each_time(maker):
    """A seed gives the same 300 distinct mutations each time, and another seed gives others."""
    one, again, other = maker.make(3), maker.make(3), maker.make(4)
    assert one == again
    assert len(one) == len({(m.config, m.file, m.text) for m in one}) == sum(mutations.KINDS.values()) == 300
    assert len({m.text for m in one} & {m.text for m in other}) < 150


def test_a_typo_is_no_legal_name(published, monkeypatch):
    """No class with a typo can be imported, and no param with a typo is a parameter of its class."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "own_code")
    for mutation in published:
        if mutation.kind == "class":
            name = mutation.what.rpartition(" → ")[2]
            with pytest.raises(ValueError, match=r"."):
                find(name)
        elif mutation.kind == "param" and ".params." in mutation.what:
            place, param = re.match(r"(\S+)\.params\.\w+: `\w+` → `(\w+)`", mutation.what).groups()
            path = tuple(int(part) if part.isdigit() else part for part in place.split("."))
            taken = inspect.signature(find(mutations.File("", mutation.text).plain((*path, "type")))).parameters
            assert param not in taken


@pytest.mark.slow
def test_shipped_configs_pass_and_planted_faults_are_reported(maker):
    """`deeplightning check` accepts each shipped config, and reports 37 of 38 sampled mutations at their line."""
    with scoring.sandbox(ROOT) as place:
        shipped = {config.name: scoring.check(config.name, place) for config in maker.configs}
        sample = [(mutation, scoring.check_mutation(mutation, place)) for mutation in maker.make(3, SMALL)]
        assert (place / "configs/base.yaml").read_text() == (ROOT / "configs/base.yaml").read_text()
    assert {name: said for name, said in shipped.items() if said.code or said.told} == {}
    right = [scoring.score(mutation, said).right_line for mutation, said in sample]
    assert len(right) == sum(SMALL.values()) == 38
    assert sum(right) >= 37, [pair for pair, fine in zip(sample, right, strict=True) if not fine]


def test_the_peers_have_our_torch_and_lightning():
    """The environments of the peers pin our versions, and the same faults can be planted in each config."""
    ours = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.M))
    needed = {
        "requirements.txt": {"torch", "pytorch-lightning", "mlflow", "scikit-learn"},
        "serve_requirements.txt": {"torch", "torchvision", "mlflow", "flask", "pillow"},
        "texts_requirements.txt": {"torch", "transformers"},
    }
    for file, names in needed.items():
        pinned = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)", (side_by_side.PEERS / file).read_text(), re.M))
        shared = pinned.keys() & ours.keys() - {"omegaconf", "antlr4-python3-runtime"}
        assert {name: pinned[name] for name in shared} == {name: ours[name] for name in shared}
        assert names <= shared
    peers = [side_by_side.PEERS / name for name in ("lightning_cli.yaml", "hydra.yaml")]
    for config in (ROOT / "configs/base.yaml", *peers):
        assert [right for right, _, _ in side_by_side.FAULTS.values() if config.read_text().count(right) != 1] == []


def test_bytes_that_a_process_holds_are_those_of_its_tensors():
    """Bytes are four for each parameter, and eight and a step counter for Adam's state; an optimizer's own copies of
    the weights are counted separately."""
    network = engines.Wide()
    numbers = 64 * 256 + 4 * 256 * 256 + 256 * 10 + 5 * 256 + 10
    adam = torch.optim.Adam(network.parameters())
    network(torch.zeros(2, 1, 8, 8)).sum().backward()
    adam.step()
    state = 8 * numbers + 4 * 12
    assert engines.bytes_here(network, adam) == {"parameters": 4 * numbers, "state": state, "copies": 0}
    copy = torch.zeros(100, requires_grad=True)
    copy.grad = torch.zeros(100)
    other = torch.optim.SGD([copy], lr=0.1, momentum=0.9)
    other.step()
    assert engines.bytes_here(network, other) == {"parameters": 4 * numbers, "state": 400, "copies": 400}


def took(output, folder=Path()):
    """Return the result of a program with this output and folder, with made-up times."""
    return timed.Took(9.0, 10.0, 1.0, output, folder, [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's advice to the script
def test_each_program_learns_the_same(command, store, tmp_path, monkeypatch, capsys):
    """The plain script in both variants, Lightning and our run end with the same weights and accuracy."""
    import train_lightning
    import train_raw

    data = tmp_path / "data"
    timed.make_pictures(data, 100, 28, 1, 10)
    module = training.PIXELS.replace("size: 1", "size: 28").replace("classes: 2", "classes: 10")
    job = training.Job(data, module, "small", "train_network.Small", 6, batch_size=16, epochs=2, seed=3)
    (tmp_path / "config.yaml").write_text(training.config_of(job, store))
    for name in ("train_network.py", "train_own.py"):
        shutil.copy(timed.PEERS / name, tmp_path)
    run = command("train", tmp_path / "config.yaml", cwd=tmp_path, code=0)
    found = {"ours": took(run.out)}
    scripts = {
        "raw": (train_raw.main, []),
        "by hand": (train_raw.main, ["--in-memory"]),
        "lightning": (train_lightning.main, ["--store", str(store / "mlflow.db")]),
    }
    for name, (main, more) in scripts.items():
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [name, *training._words(job), *more])
        main()
        found[name] = took(capsys.readouterr().out, folder)
    (weights,) = {training.finished(one).weights for one in found.values()}
    assert len(weights) == 12
    assert len({training.accuracy(one) for one in found.values()}) == 1


@pytest.mark.parametrize("name", [pytest.param("texts", marks=pytest.mark.slow), "tables"])
def test_peers_read_texts_and_rows_as_ours_does(name, tmp_path):
    """A peer's model and ours give the same probabilities, however the peer pads texts."""
    import serve_parts

    from serve.bundle import Bundle

    run = servers.make_run(name, tmp_path)
    bundle, weights = Bundle.open(run), run.with_suffix(".pt")
    model, read = serve_parts.trained(name, weights), serve_parts.reader(name, weights)
    for number, content in enumerate(servers.contents(name)):
        (ours,) = bundle.predict(bundle.spec.prepare(content["text"] if name == "texts" else content["rows"][0])[None])
        with torch.inference_mode():
            theirs = model(read(content)[None]).softmax(1)[0]
        assert ours.argmax() == number
        assert torch.allclose(torch.from_numpy(ours), theirs, atol=1e-4)
