"""The benchmarks measure what they say: mutations are made where they claim, they are wrong for certain, and answers
are judged as the documentation has it. What is timed is not run here."""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

from deeplightning.config.check import load
from deeplightning.config.target import find

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import engines
import mutations
import scoring
import side_by_side

ROOT = Path(__file__).resolve().parents[1]
SMALL = {kind: count // 7 for kind, count in mutations.KINDS.items()}
SEEDS = (3, 11, 12, 13)


@pytest.fixture(scope="module")
def maker():
    return mutations.Maker(ROOT)


@pytest.fixture(scope="module")
def all_of_them(maker):
    """The mutations of the seeds that the figures are published for."""
    return [mutation for seed in SEEDS for mutation in maker.make(seed)]


def lines_of(mutation):
    return [int(line.rpartition(":")[2]) for line in mutation.lines]


def changed(mutation):
    """The first line that is not as it was, from 1."""
    before = (ROOT / mutation.file).read_text().splitlines()
    after = mutation.text.splitlines()
    pairs = enumerate(zip(before, after, strict=False), 1)
    return next((n for n, (one, two) in pairs if one != two), min(len(before), len(after)) + 1)


def test_a_seed_makes_the_same_300_mutations_each_time(maker):
    """And another seed makes others; no two of a seed are the same."""
    one, again, other = maker.make(3), maker.make(3), maker.make(4)
    assert one == again
    assert len(one) == len({(m.config, m.file, m.text) for m in one}) == sum(mutations.KINDS.values()) == 300
    assert len({m.text for m in one} & {m.text for m in other}) < 150


def test_a_mutation_stands_where_it_says(all_of_them):
    """What is put in place of something else stands in the line where it must be told, and that is the first line that
    differs; what is removed or set is so for another reader of YAML."""
    for mutation in all_of_them:
        after = mutations.File(mutation.file, mutation.text)
        text = mutation.text.splitlines()
        assert mutation.lines
        if mutation.kind in ("key", "class", "param", "type", "word", "target"):
            assert lines_of(mutation) == [changed(mutation)], mutation
        elif mutation.kind == "duplicate":
            key = mutation.what.removesuffix(" twice").rpartition(".")[2]
            (line,) = lines_of(mutation)
            assert f"{key}:" in text[line - 1], mutation
            assert (
                len(text) > len((ROOT / mutation.file).read_text().splitlines()) or text[line - 1].count(f"{key}:") > 1
            )
        elif mutation.kind == "missing":
            path = tuple(int(part) if part.isdigit() else part for part in mutation.what.split()[0].split("."))
            assert path in mutations.File(mutation.file, (ROOT / mutation.file).read_text()).pairs
            assert path not in after.pairs


def test_a_typo_is_no_word_that_is_legal(all_of_them, monkeypatch):
    """No class that typos make can be imported, and no param is taken by the class that it is given to."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "own_code")
    for mutation in all_of_them:
        if mutation.kind == "class":
            name = mutation.what.rpartition(" → ")[2]
            with pytest.raises(ValueError, match=r"."):
                find(name)
        elif mutation.kind == "param" and ".params." in mutation.what:
            place, param = re.match(r"(\S+)\.params\.\w+: `\w+` → `(\w+)`", mutation.what).groups()
            path = tuple(int(part) if part.isdigit() else part for part in place.split("."))
            taken = inspect.signature(find(mutations.File("", mutation.text).plain((*path, "type")))).parameters
            assert param not in taken


def answer(*places, code=2, suggestion=None):
    return scoring.Answer(code, tuple(scoring.Told(place, "…", suggestion) for place in places))


def test_an_answer_is_judged_by_code_line_and_word():
    """Caught is exit code 2; the line must be one of the mutation's; the first suggestion there must be what was meant;
    all else that is told is counted."""
    typo = mutations.Mutation("key", "a.yaml", "a.yaml", "", "", ("a.yaml:3",), ("lr",))
    score, plain = scoring.Score, dataclasses.replace(typo, meant=())
    assert scoring.score(typo, answer("a.yaml:3", suggestion="lr")) == score(True, True, True, 0)
    assert scoring.score(typo, answer("a.yaml:3", suggestion="eps")) == score(True, True, False, 0)
    assert scoring.score(typo, answer("a.yaml:3")) == score(True, True, False, 0)
    assert scoring.score(typo, answer("a.yaml:4", suggestion="lr")) == score(True, False, False, 1)
    assert scoring.score(typo, answer("b.yaml:3", suggestion="lr")) == score(True, False, False, 1)
    assert scoring.score(typo, answer("a.yaml:3", code=0, suggestion="lr")) == score(False, False, False, 1)
    assert scoring.score(typo, answer("a.yaml:3", code=1, suggestion="lr")) == score(False, False, False, 1)
    assert scoring.score(plain, answer("a.yaml:1", "a.yaml:3", "a.yaml:7")) == score(True, True, None, 2)
    assert scoring.score(plain, answer()) == score(True, False, None, 0)


def test_what_check_prints_is_read_back():
    """Places, messages and suggestions of the machine-readable output; anything else counts as nothing told."""
    out = '{"faults": [{"file": "a.yaml", "line": 3, "message": "unknown key", "suggestion": "lr"}]}'
    assert scoring.read(2, out, "").told == (scoring.Told("a.yaml:3", "unknown key", "lr"),)
    assert scoring.read(1, "Traceback", "") == scoring.Answer(1, (), "Traceback")


def test_shipped_configs_pass_and_planted_faults_are_told(maker):
    """Through the command itself: no fault in any config as it ships, and a small sample of mutations told in its
    line."""
    with scoring.sandbox(ROOT) as place:
        shipped = {config.name: scoring.check(config.name, place) for config in maker.configs}
        sample = [(mutation, scoring.check_mutation(mutation, place)) for mutation in maker.make(3, SMALL)]
        assert (place / "configs/base.yaml").read_text() == (ROOT / "configs/base.yaml").read_text()
    assert {name: said for name, said in shipped.items() if said.code or said.told} == {}
    right = [scoring.score(mutation, said).right_line for mutation, said in sample]
    assert len(right) == sum(SMALL.values()) == 38
    assert sum(right) >= 37, [pair for pair, fine in zip(sample, right, strict=True) if not fine]


def test_the_peers_have_our_torch_and_lightning():
    """What both environments hold is of one version, and the same four faults can be planted in each config."""
    pinned = dict(
        re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)", (side_by_side.PEERS / "requirements.txt").read_text(), re.M)
    )
    ours = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.M))
    shared = {
        name: version for name, version in pinned.items() if name in ours and name[:8] not in ("omegacon", "antlr4-p")
    }
    assert shared == {name: ours[name] for name in shared}
    assert {"torch", "pytorch-lightning", "mlflow", "scikit-learn"} <= set(shared)
    for config in (
        ROOT / "configs/base.yaml",
        side_by_side.PEERS / "lightning_cli.yaml",
        side_by_side.PEERS / "hydra.yaml",
    ):
        assert [right for right, _, _ in side_by_side.FAULTS.values() if config.read_text().count(right) != 1] == []


def test_cpu_seconds_are_those_of_the_process(tmp_path):
    """A process that computes costs what it says itself, one that sleeps next to nothing."""
    burns = "import time\nwhile time.process_time() < 0.3: pass\nprint(time.process_time())"
    ended = side_by_side.run([sys.executable, "-S", "-c", burns], tmp_path)
    assert ended.code == 0
    assert 0.3 <= float(ended.output) <= ended.seconds
    sleeps = side_by_side.run([sys.executable, "-S", "-c", "import time; time.sleep(0.5)"], tmp_path)
    assert sleeps.seconds < 0.3


def test_series_of_losses_are_compared_step_by_step():
    """The largest difference counts; a step that one of them lacks, or a loss that is no number, is infinitely far."""
    assert engines.apart({0: 2.0, 1: 1.5}, {0: 2.5, 1: 1.25}) == 0.5
    for other in ({0: 2.0}, {0: 2.0, 2: 1.5}, {0: 2.0, 1: float("nan")}):
        assert engines.apart({0: 2.0, 1: 1.5}, other) == float("inf")
        assert engines.apart(other, {0: 2.0, 1: 1.5}) == float("inf")
    assert engines.apart({}, {}) == float("inf")


def test_bytes_that_a_process_holds_are_those_of_its_tensors():
    """Four for each parameter, eight and a count of steps for Adam's state; weights that an optimizer has beside the
    network's are counted as such."""
    network = engines.Wide()
    numbers = 64 * 256 + 4 * 256 * 256 + 256 * 10 + 5 * 256 + 10
    adam = torch.optim.Adam(network.parameters())
    network(torch.zeros(2, 1, 8, 8)).sum().backward()
    adam.step()
    state = 8 * numbers + 4 * 12
    assert engines.held(network, adam) == {"parameters": 4 * numbers, "state": state, "copies": 0}
    copy = torch.zeros(100, requires_grad=True)
    copy.grad = torch.zeros(100)
    other = torch.optim.SGD([copy], lr=0.1, momentum=0.9)
    other.step()
    assert engines.held(network, other) == {"parameters": 4 * numbers, "state": 400, "copies": 400}


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_the_config_of_each_engine_is_right(engine, monkeypatch, tmp_path):
    """There is no fault in it, and each optimizer step sees 64 samples."""
    monkeypatch.chdir(ROOT / "benchmarks")
    (tmp_path / "config.yaml").write_text(engines.config(engine, tmp_path))
    cfg = load(str(tmp_path / "config.yaml"))
    assert cfg.engine.backend == (None if engine == "null" else engine)
    assert cfg.data.batch_size * cfg.engine.processes == 64
