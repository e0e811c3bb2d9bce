"""benchmarks/texts.py has three programs learn the same reviews in the same number of steps."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import texts
import timed
from side_by_side import ROOT


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A folder with 1,280 reviews to learn, 300 to judge by."""
    folder = tmp_path_factory.mktemp("few reviews")
    texts.write_reviews(folder)
    lines = (folder / "train.tsv").read_text().splitlines(keepends=True)
    (folder / "train.tsv").write_text("".join(lines[:1281]))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("program", [texts.SELF, texts.BY_LENGTH, texts.RAW])
def test_programs_take_the_same_steps_and_say_an_accuracy(program, few, tmp_path):
    """Ten steps an epoch, for two epochs, and weights on the disk after each; each of eight buckets has a rest."""
    took = timed.run(texts.commands(sys.executable, few)[program], tmp_path / "run")
    (process,) = took.processes
    assert len(process.cpu) == (32 if program == texts.BY_LENGTH else 20)
    assert 0.3 < texts.accuracy(took.output) <= 1
    kept = {path.suffix for path in took.folder.rglob("*.*") if path.stat().st_size > 10**6}
    assert kept & {".pt", ".ckpt"}


def test_without_an_environment_for_the_trainer_the_code_is_3(monkeypatch, capsys):
    """Its note names the reason."""

    def none(*_: object, **__: object) -> str:
        raise texts.side_by_side.NotMade("no network")

    monkeypatch.setattr(texts.side_by_side, "environment", none)
    monkeypatch.setattr(sys, "argv", ["texts.py"])
    with pytest.raises(SystemExit) as ended:
        texts.main()
    assert ended.value.code == 3
    assert "no network" in capsys.readouterr().err


def test_the_program_of_the_peers_reads_what_is_written(few):
    """As many texts as there are lines, with tokens of one vocabulary."""
    script = (
        f"import sys; sys.path.append({str(texts.PEERS)!r})\nfrom texts_raw import sets\nfrom pathlib import Path\n"
    )
    script += f"found = sets(Path({str(few)!r}))\nprint(len(found['train']), len(found['dev']))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1280", "300"]
