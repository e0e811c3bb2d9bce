"""Content of a seal, and imports of own code from it."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

from deeplightning import own_code
from deeplightning.config.own_runs import note_own
from deeplightning.config.source import read
from deeplightning.faults import ConfigError, SetupError, not_installed
from deeplightning.launch import sealed
from deeplightning.sweep.frozen_code import SearchCode
from deeplightning.tracking import environment
from deeplightning.tracking.code import Code, collect

SECRET = 'API_KEY = "sk-live-4f9a8b7c6d5e4f3a2b1c0d9e8f7a6b5c"\n'
ONE = "import nets.inner\nfrom pathlib import Path\n\nWORDS = Path(__file__).parent / 'words.bin'\nVALUE = 1\n" + SECRET
FILES = {
    "sealed_one.py": ONE,
    "beside.py": "VALUE = 1\n",
    "words.bin": "words",
    "nets/__init__.py": "",
    "nets/inner.py": "from nets.later import VALUE\n",
    "nets/later.py": "VALUE = 1\n",
    "nets/tables/weights.bin": "weights",
    "configs/sealed_two.py": "from pathlib import Path\n\nWORDS = Path(__file__).resolve().parents[1] / 'words.bin'\n",
    "configs/a.yaml": "_base_: b.yaml\nseed: 1\n",
    "configs/b.yaml": "seed: 2\ndata: {batch_size: 3}\n",
}


@pytest.fixture(autouse=True)
def state(monkeypatch, tmp_path):
    """Reset imports of own code before and after the test; use a new register of own files."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before = own_code.original_roots()
    monkeypatch.setattr(own_code, "_added", own_code.added_roots())
    modules = {*sys.modules}
    yield
    own_code.use_seal(None)
    own_code.use_import_roots(*before)
    for name in {*sys.modules} - modules:
        del sys.modules[name]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a module and a package in the working directory, one next to the config, and files."""
    folder = tmp_path / "a project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    own_code.use_import_roots(folder, folder / "configs")
    for name in ("sealed_one", "sealed_two"):
        importlib.import_module(name)
    return folder


def copy_of(folder, seal):
    return seal / "code" / folder.relative_to("/")


def forget():
    """Unload modules, as in a new process."""
    for name in ("sealed_one", "sealed_two", "beside", "nets", "nets.inner", "nets.later"):
        sys.modules.pop(name, None)


def edit(project):
    for file in project.rglob("*.py"):
        file.write_text("raise RuntimeError('edited')\n")
    (project / "nets" / "later.py").unlink()


def test_edited_code_runs_as_it_was_sealed(project, tmp_path):
    """Edits and removals take no effect before the seal is removed; `__file__` leads to the data beside a module."""
    seal = sealed.seal(tmp_path / "seal")
    edit(project)
    own_code.use_seal(seal)
    forget()
    assert importlib.import_module("sealed_two").WORDS.read_bytes() == b"words"
    inner = importlib.import_module("nets.inner").__file__
    assert (Path(inner).parent / "tables" / "weights.bin").read_bytes() == b"weights"
    one = importlib.import_module("sealed_one")
    assert one.WORDS.read_bytes() == b"words"
    assert one.VALUE == importlib.import_module("nets.inner").VALUE == importlib.import_module("beside").VALUE == 1
    assert Path(one.__file__).is_relative_to(seal)
    own_code.use_seal(None)
    assert own_code.SEALED not in os.environ
    with pytest.raises(RuntimeError, match="edited"):
        importlib.import_module("sealed_one")


def test_a_file_that_appears_later_shadows_nothing(project):
    """A module added after sealing does not shadow one next to the config; a seal inside has no link to itself."""
    seal = sealed.seal(project / "slurm" / "one" / ".sealed")
    own_code.use_seal(seal)
    (project / "sealed_two.py").write_text("raise RuntimeError('added')\n")
    forget()
    assert importlib.import_module("sealed_two").WORDS.is_file()
    found = {path.name for path in copy_of(project, seal).iterdir()}
    assert "slurm" not in found
    assert {"words.bin", "configs", "nets", "sealed_one.py"} <= found


def test_the_kept_code_is_that_of_an_unsealed_run(project, tmp_path):
    """`code.zip` has the same bytes, the user's paths and no secret. Only the owner can read the seal, which has it."""
    names = ("sealed_one", "sealed_two")
    before = collect(modules={name: sys.modules[name] for name in names}).pack()
    seal = sealed.seal(tmp_path / "seal")
    edit(project)
    own_code.use_seal(seal)
    forget()
    code = collect(modules={name: importlib.import_module(name) for name in names})
    assert code.roots == [str(project), str(project / "configs")]
    assert code.pack() == before
    assert b"sk-live" not in b"".join(code.files.values())
    (copy,) = seal.rglob("sealed_one.py")
    assert SECRET in copy.read_text()
    assert [path.stat().st_mode & 0o777 for path in (seal, copy)] == [0o700, 0o400]
    assert own_code.short(str(copy)) == "sealed_one.py"  # as errors name it


def test_configs_are_read_as_they_were_sealed(project, tmp_path):
    """Edits and removals of a config, its base and a group option have no effect; other files are read as they are."""
    config, group, option = (Path("configs", name) for name in ("a.yaml", "g.yaml", "model/net.yaml"))
    option.parent.mkdir()
    option.write_text("output: logits\n")
    group.write_text("_base_: [{model: net}]\n")
    seal = sealed.seal(tmp_path / "seal", [*read(config).files, *read(group).files])
    config.write_text("seed: 9\n")
    (project / "configs" / "b.yaml").unlink()
    option.unlink()
    own_code.use_seal(seal)
    source = read(config)
    assert source.root.value["seed"].value == 1
    assert source.root.value["data"].value["batch_size"].value == 3
    assert source.root.value["seed"].place == "configs/a.yaml:2:1"
    assert read(group).root.value["model"].value["output"].value == "logits"
    (project / "c.yaml").write_text("seed: 5\n")
    assert read("c.yaml").root.value["seed"].value == 5


def test_git_is_asked_once(project, tmp_path, monkeypatch):
    """The commit is the one at the time of sealing."""
    answers = {"rev-parse": "abc", "symbolic-ref": "main"}
    monkeypatch.setattr(environment, "ask_git", lambda verb, *_: answers[verb])
    seal = sealed.seal(tmp_path / "seal", git=environment.git_state())
    before = environment.git_state()
    answers["rev-parse"] = "def"
    assert environment.git_state()["commit"] == "def"
    own_code.use_seal(seal)
    assert environment.git_state() == before == {"commit": "abc", "branch": "main"}


def test_an_edited_seal_is_not_trusted(project, tmp_path):
    """A seal is intact if this user noted it and nothing in it has changed since; edited originals are named."""
    resume = pytest.importorskip("deeplightning_tune.resume", reason=not_installed("tune"))
    seal = sealed.seal(tmp_path / "seal")
    assert resume.edited(seal) == {}
    one, later = project / "sealed_one.py", project / "nets" / "later.py"
    one.write_text("VALUE = 2\n")
    later.unlink()
    assert resume.edited(seal) == {str(one): "has changed", str(later): "is gone"}
    assert not resume.is_intact(seal)
    note_own(seal / own_code.SEAL)
    cache = copy_of(project, seal) / "__pycache__"
    cache.mkdir()
    (cache / "sealed_one.pyc").touch()
    assert resume.is_intact(seal)
    assert not cache.exists()
    (cache.parent / "added.py").touch()
    assert not resume.is_intact(seal)
    (cache.parent / "added.py").unlink()
    (copy,) = seal.rglob("beside.py")
    copy.chmod(0o600)
    copy.write_text("VALUE = 2\n")
    assert not resume.is_intact(seal)
    assert not resume.is_intact(tmp_path / "nowhere")


def test_a_seal_that_is_gone_or_cannot_be_written_is_an_error(project, tmp_path):
    """The error has the path and the reason; code that may have been edited does not run instead."""
    with pytest.raises(SetupError, match=r"nowhere: the code that was sealed for this launch cannot be read .* again"):
        own_code.use_seal(tmp_path / "nowhere")
    own_code.use_seal(None)
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="the code of this launch cannot be sealed: Not a directory"):
        sealed.seal(tmp_path / "file" / "seal")
    assert (tmp_path / "file").read_bytes() == b""


def test_a_worker_lays_out_what_it_was_sent(tmp_path):
    """On another machine the original folders do not exist: only code is written, without links."""
    code = Code(roots=["/theirs/project", "/theirs/project/configs"], files={(1, "pkg/own.py"): b"VALUE = 1\n"})
    seal = sealed.seal(tmp_path / "seal", code=code, linked=())
    roots = json.loads((seal / own_code.SEAL).read_text())["roots"]
    assert roots == {root: f"code{root}" for root in code.roots}
    assert (seal / "code/theirs/project/configs/pkg/own.py").read_bytes() == b"VALUE = 1\n"


def test_a_search_finds_its_code_from_everywhere(project, tmp_path):
    """A search resumed in another folder uses its sealed code and rejects other code of the same name."""
    resume = pytest.importorskip("deeplightning_tune.resume", reason=not_installed("tune"))
    seal, elsewhere = sealed.seal(tmp_path / "seal"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    edit(project)
    own_code.use_import_roots(elsewhere)
    resume._add_roots(seal, "lr")
    own_code.use_seal(seal)
    forget()
    assert importlib.import_module("sealed_one").VALUE == 1
    own_code.use_seal(None)
    (elsewhere / "nets").mkdir()
    own_code.use_import_roots(elsewhere)
    with pytest.raises(ConfigError, match=r"elsewhere has nets, but the search lr started with own code of that name"):
        resume._add_roots(seal, "lr")


def test_leftovers_beside_a_seal_are_removed(project, tmp_path):
    """Seals of commands that were killed while sealing or before their search began are removed."""
    seal = sealed.seal(tmp_path / "sealed" / "one")
    sealed.seal(tmp_path / "sealed" / "two")
    (tmp_path / "sealed" / ".three.77").mkdir()
    SearchCode(seal).drop_others()
    assert [*(tmp_path / "sealed").iterdir()] == [seal]
    assert (project / "sealed_one.py").exists()
