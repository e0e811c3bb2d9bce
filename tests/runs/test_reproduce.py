"""`reproduce` repeats a run from its files alone; `diff` compares two runs."""

import errno
import hashlib
import io
import json
import math
import os
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from conftest import digest
from mlflow.tracking import MlflowClient
from tiny import git

from deeplightning.callbacks.provenance import Provenance
from deeplightning.config.own_runs import note_own
from deeplightning.faults import CheckpointError, RunError
from deeplightning.reproduce.again import reproduce
from deeplightning.reproduce.differences import _code_between, _weight_differences, as_text, between, differences
from deeplightning.reproduce.past import past_run
from deeplightning.runfolder import RunFolder
from deeplightning.tracking import code, datafiles, environment
from deeplightning.tracking.metrics_file import first_differences, is_repeatable

PASSWORD = "correct-horse-battery"  # in the environment
TOKEN = "hf_" + "Zk3b9QeX7LmP2vRt8YwN5dHc1sJa4gUf"  # in the code
CONFIG = """\
seed: 7
data: {root: ROOT, module: {type: own.Table, params: {password: "${oc.env:TABLE_PASSWORD}"}}, batch_size: 16}
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: nets.wide.network, params: {}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.05, momentum: 0.9}}
  loss: {type: beside.Loss}
train: {num_epochs: 1, export: false}
stages: [train, test]
logger: {params: {system_metrics: false}, log_every_n_steps: 4, pictures: null}
"""
OWN = f"""\
import numpy as np
import yaml
from deeplightning.data.datasets import Samples
from deeplightning.data.digits import Digits

HUB_TOKEN = "{TOKEN}"


class Table(Digits):
    def __init__(self, cfg, password):
        super().__init__(cfg)
        assert password == "{PASSWORD}"
        self.folder = cfg.data.root

    def read(self):
        import late
        rows = np.loadtxt(f"{{self.folder}}/digits.csv", dtype=np.int64, delimiter=",")
        return {{"all": Samples(rows[:, 1:].reshape(-1, 8, 8).astype(np.uint8), rows[:, 0] % late.CLASSES)}}
"""
WIDE = """\
import json
from pathlib import Path
from torch import nn
from .narrow import WIDTH


def network():
    width = WIDTH * json.loads(Path(__file__).with_name("factor.json").read_text())
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10))
"""


def commit(tree):
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        git(tree, *arguments)


def write(folder, files):
    """Write texts to files by their names; create folders as needed."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def write_table(root):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 60)
    pixels = np.clip(rng.integers(0, 60, (60, 64)) + 15 * labels[:, None], 0, 255)
    root.mkdir(exist_ok=True)
    np.savetxt(root / "digits.csv", np.column_stack([labels, pixels]), fmt="%d", delimiter=",")
    (root / "readme.md").write_text("sixty digits\n")


@pytest.fixture(scope="module")
def gone(command, tmp_path_factory):
    """A run from a dirty git tree (a changed file, untracked files, code beside the config), its data and its store.
    The tree, with `.git`, is deleted."""
    top = tmp_path_factory.mktemp("gone")
    tree, root, store = top / "a tree", top / "table", top / "mlruns"
    write(tree, {"own.py": "# to be written\n", "nets/narrow.py": "WIDTH = 8\n", "unused.py": "UNUSED = 1\n"})
    commit(tree)
    write(tree, {"own.py": OWN, "nets/narrow.py": "WIDTH = 12\n", "nets/wide.py": WIDE, "nets/factor.json": "2\n"})
    write(tree, {"nets/weights.npz": "0" * 1000, "late.py": "CLASSES = 10\n", ".env": "KEY=kept-elsewhere\n"})
    beside = "from torch.nn import CrossEntropyLoss as Loss\n"
    write(tree, {"conf/beside.py": beside, "conf/c.yaml": CONFIG.replace("ROOT", str(root))})
    write_table(root)
    uri = f"logger.params.tracking_uri='{store}'"
    done = command("train", "conf/c.yaml", uri, cwd=tree, TABLE_PASSWORD=PASSWORD, code=0)
    shutil.rmtree(tree)
    return done, root, store


@pytest.fixture
def forked(command):
    """`forked(plan)` runs the plan of a reproduction in a forked process; a new one spends seconds on imports."""

    def start(plan):
        done = command("train", plan.config, *plan.overrides, cwd=plan.directory, **plan.variables)
        return done.code, done.folder if "Artifact storage path" in done.out else None

    return start


@pytest.fixture(scope="module")
def trained(train):
    """The folder of a small run without user code."""
    return train("stages=[train,test]").folder


def series_of(store, run_id):
    client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    names = client.get_run(run_id).data.metrics
    return {name: [(p.step, p.value) for p in client.get_metric_history(run_id, name)] for name in names}


def diff_lines(outcome):
    """Return the lines of a `diff` without edits of this clone while the tests run."""
    lines = [line for line in outcome.out.splitlines() if not line.startswith("  deeplightning (its own files)")]
    following = [*lines[1:], ""]
    return [line for line, after in zip(lines, following, strict=False) if line != "code" or after.startswith("  ")]


@pytest.mark.slow
def test_a_run_of_a_dirty_tree_is_made_again_after_the_tree_is_gone(gone, command, tmp_path):
    """A new run from its id and the tracker alone has the same metrics and weights, bit for bit."""
    done, _, store = gone
    run_id = done.folder.parent.name
    again = command("reproduce", run_id, cwd=tmp_path, MLFLOW_TRACKING_URI=str(store), TABLE_PASSWORD=PASSWORD, code=0)
    named = next(line for line in again.err.splitlines() if line.startswith("code: "))
    assert named.endswith(": beside.py, late.py, nets/factor.json, nets/narrow.py, nets/wide.py, own.py")
    assert again.folder.parent.parent == done.folder.parent.parent
    assert again.folder != done.folder
    assert series_of(store, again.folder.parent.name) == series_of(store, run_id)
    assert digest(again.folder / "last.ckpt") == digest(done.folder / "last.ckpt")
    tags = MlflowClient(f"sqlite:///{store / 'mlflow.db'}").get_run(again.folder.parent.name).data.tags
    assert tags["reproduces"] == run_id
    assert diff_lines(command("diff", done.folder, again.folder, cwd=tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_keeps_of_its_code(gone):
    """`code.zip` has the imported files, late ones too, and small text files of their packages; it has no data, no
    `.env` and no secret."""
    folder = RunFolder(gone[0].folder)
    with zipfile.ZipFile(folder.code) as archive:
        names = archive.namelist()
        kept = {name: archive.read(name).decode() for name in names}
    manifest = json.loads(kept.pop("manifest.json"))
    expected = ("0/own.py", "0/late.py", "0/nets/wide.py", "0/nets/narrow.py", "0/nets/factor.json", "1/beside.py")
    assert set(kept) == set(expected)
    assert kept["0/nets/narrow.py"] == "WIDTH = 12\n"
    assert 'HUB_TOKEN = "***"' in kept["0/own.py"]
    assert '"${oc.env:TABLE_PASSWORD}"' in kept["0/own.py"]
    assert manifest["concealed"] == ["own.py:6"]
    assert manifest["packages"] == {"PyYAML": yaml.__version__}
    assert len(manifest["deeplightning"]["digest"]) == 64
    for path in folder.path.rglob("*"):
        if path.is_file():
            content = path.read_bytes() + "".join(kept.values()).encode()
            assert not [secret for secret in (PASSWORD, TOKEN, "kept-elsewhere") if secret.encode() in content], path
    assert "own.py:6 looks like a secret" in gone[0].err


def test_a_byte_that_changed_in_the_data_is_named_before_anything_runs(gone, command, tmp_path):
    """A missing file and a new one are named too; the exit code is 3, and no run is opened."""
    done, root, store = gone
    runs = len(list(store.glob("0/*")))
    copy = shutil.copytree(root, tmp_path / "table")
    content = bytearray((copy / "digits.csv").read_bytes())
    content[0] ^= 1  # another digit
    (copy / "digits.csv").write_bytes(content)
    (copy / "readme.md").unlink()
    (copy / "more.csv").write_text("1,2\n")
    words = ("reproduce", done.folder, f"data.root='{copy}'")
    refused = command(*words, cwd=tmp_path, TABLE_PASSWORD=PASSWORD, code=3)
    assert "digits.csv: other content (SHA-256 " in refused.err
    assert "more.csv: new" in refused.err
    assert "readme.md: missing" in refused.err
    assert len(list(store.glob("0/*"))) == runs


def test_other_data_make_another_run_and_the_first_difference_is_named(gone, forked, tmp_path, monkeypatch):
    """`--any-data` runs it on other data. The exit code is 5; the error has the metric, its step, both values and the
    next step, and a warning the likely reason."""
    monkeypatch.setenv("TABLE_PASSWORD", PASSWORD)
    done, root, _ = gone
    copy = shutil.copytree(root, tmp_path / "table")
    text = (copy / "digits.csv").read_text().splitlines()
    (copy / "digits.csv").write_text("\n".join(["5," + line.partition(",")[2] for line in text]) + "\n")
    output = []

    def with_roots(plan):  # a forked process does not read PYTHONPATH
        shutil.copytree(plan.directory.with_name("1"), plan.directory, dirs_exist_ok=True)
        return forked(plan)

    with pytest.raises(RunError) as failed:
        reproduce(str(done.folder), [f"data.root='{copy}'"], any_data=True, say=output.append, start=with_roots)
    assert failed.value.exit_code == 5
    first, second = past_run(str(done.folder)), past_run(failed.value.args[0].split(" does not")[0])
    apart = first_differences(first.series, second.series)[0]
    assert f"first difference: {apart.name} at step {apart.step}: {apart.one!r} → {apart.two!r}" in str(failed.value)
    assert (apart.name, apart.step) == ("train_loss", 0)
    assert str(failed.value).endswith(f"`deeplightning diff {first} {second}` shows what else differs")
    assert any("warning: the data are not those of" in line for line in output)


def test_a_copied_folder_is_enough(trained, forked, tmp_path, monkeypatch):
    """The metrics are compared with its `metrics.jsonl`; the new run goes into the store that is in use."""
    copied = shutil.copytree(trained, tmp_path / "copied")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    output = []
    uri = f"logger.params.tracking_uri='{tmp_path / 'store'}'"
    again = reproduce(str(copied), [uri], say=output.append, start=forked)
    points = sum(map(len, past_run(str(trained)).series.values()))
    assert f"metrics: the same {points} points of" in " ".join(output)
    assert again.path.is_relative_to(tmp_path / "store")
    assert not any("code" in line for line in output)


def test_weights_that_differ_are_told_by_their_tensor(trained, forked, tmp_path, monkeypatch):
    """The error names the first tensor that differs; here the copy's checkpoint and results are edited."""
    copied = RunFolder(shutil.copytree(trained, tmp_path / "copied"))
    checkpoint = torch.load(copied.last, weights_only=True)
    name = next(iter(checkpoint["state_dict"]))
    checkpoint["state_dict"][name].view(-1)[0] += 0.25
    torch.save(checkpoint, copied.last)
    copied.metrics.unlink()
    copied.results("test").write_text('{"test_acc": 2.0}')
    monkeypatch.chdir(tmp_path)
    output = []
    with pytest.raises(RunError) as failed:
        reproduce(str(copied.path), say=output.append, start=forked)
    assert "first difference: test_acc: 2.0 →" in str(failed.value)
    assert f"the tensor {name} (1 of " in str(failed.value)
    assert "neither a tracker nor metrics.jsonl" in " ".join(output)


@pytest.mark.parametrize("name", ["cfg.yaml", "code.zip"])
def test_the_code_of_a_run_that_was_made_elsewhere_is_not_executed(name, trained, tmp_path, command):
    """A copy of a user's own run is trusted until its config or code changes; without code a remedy is named."""
    copied = RunFolder(shutil.copytree(trained, tmp_path / "a copy"))
    with (copied.path / name).open("ab") as file:
        file.write(b"\n")
    started = []
    with pytest.raises(CheckpointError) as refused:
        reproduce(str(copied.path), say=started.append, start=started.append)
    assert started == []
    message = str(refused.value)
    assert "you did not make this run, as it is now, on this machine" in message
    assert all(path in message for path in code.read_code(copied.code).names())
    assert message.endswith("If you trust all of it: --trust")
    outcome = command("reproduce", copied.path, cwd=tmp_path, code=4)
    assert ("Traceback" in outcome.err, "--trust" in outcome.err) == (False, True)
    copied.code.unlink()
    outcome = command("reproduce", copied.path, "--trust", cwd=tmp_path, code=4)
    assert "Traceback" not in outcome.err
    assert "this run kept no code (code.zip)" in outcome.err
    assert f"`deeplightning train '{copied.config}'`" in outcome.err


def test_packages_that_were_installed_into_a_folder_of_pythonpath_are_there_again(trained, tmp_path, monkeypatch):
    """The clean process finds the packages of `pip install --target`. It does not find other code of the user."""
    for name in ("packages/lib-1.0.dist-info", "own"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "own"), str(tmp_path / "packages")]))
    plans = []
    with pytest.raises(SystemExit):
        reproduce(str(trained), say=lambda _: None, start=lambda plan: plans.append(plan) or (3, None))
    folders = plans[0].variables["PYTHONPATH"].split(os.pathsep)
    assert str(tmp_path / "packages") in folders
    assert str(tmp_path / "own") not in folders


def test_git_runs_no_program_that_a_repository_names_and_uses_none_of_another_user(tmp_path, monkeypatch):
    """Each program would create a file; Git's own tests set `GIT_TEST_ASSUME_DIFFERENT_OWNER`."""
    tree, ran = tmp_path / "tree", tmp_path / "ran"
    ran.mkdir()
    write(tree, {"own.py": "one = 1\n", ".gitattributes": "*.py filter=p diff=p\n"})
    commit(tree)
    names = ["filter.p.smudge", "filter.p.clean", "filter.a=b.clean", "diff.p.textconv", "diff.p.command"]
    names += ["core.fsmonitor", "core.sshCommand", "diff.external", "tar.tar.command"]
    for name in names:
        program = tmp_path / f"program {name}"
        program.write_text(f"#!/bin/sh\ntouch '{ran}/{name}'\ncat\n")
        program.chmod(0o755)
        git(tree, "config", name, f"'{program}'")
    hook = tree / ".git" / "hooks" / "post-index-change"
    hook.write_text(f"#!/bin/sh\ntouch '{ran}/hook'\n")
    hook.chmod(0o755)
    write(tree, {"own.py": "one = 2\n", ".gitattributes": "*.py filter=a=b diff=p\n*.other filter=p\n"})
    monkeypatch.chdir(tree)
    assert environment.git_state()["commit"]
    assert list(ran.iterdir()) == []
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # a `safe.directory` there would allow it
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert environment.git_state() is None


def test_a_run_that_began_from_a_checkpoint_begins_from_it_again(train, trained, forked, tmp_path, monkeypatch):
    """It is a separate run: the run of the checkpoint stays unchanged."""
    start = shutil.copyfile(trained / "last.ckpt", tmp_path / "somewhere.ckpt")
    resumed = train(f"train.resume_ckpt='{start}'", "train.num_epochs=3").folder
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    monkeypatch.chdir(tmp_path)
    again = reproduce(str(resumed), say=lambda text: None, start=forked)
    assert again.path not in (resumed, trained)
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_a_run_that_failed_fails_again(train, forked, tmp_path, monkeypatch):
    """The metrics up to the failure are compared."""
    failed = train("model.optimizer.params.lr=1e30", code=5).folder
    monkeypatch.chdir(tmp_path)
    output = []
    again = reproduce(str(failed), say=output.append, start=forked)
    assert past_run(str(again.path)).status == "FAILED"
    assert "the run ended as FAILED: what it logged until then is compared" in output


def test_one_of_several_processes_does_not_begin_a_reproduction(trained, command, place):
    """Each process of a launcher would start all processes of the run, so it is refused with exit code 3."""
    launcher = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x"}
    assert "start reproduce only once" in command("reproduce", trained, cwd=place, code=3, **launcher).err


@pytest.mark.slow
def test_a_run_of_two_processes_is_made_again(job, command, tmp_path):
    """`reproduce` starts both processes itself."""
    done = job("data.batch_size=8", "train.num_epochs=1")
    again = command("reproduce", done.folder, cwd=tmp_path, code=0)
    assert digest(again.folder / "last.ckpt") == digest(done.folder / "last.ckpt")


def test_a_result_that_is_no_number_twice_is_no_difference():
    """NaN equals NaN, alone or in a list; infinity does not equal NaN."""
    one = {"a": math.nan, "b": [math.nan], "c": math.nan, "d": 1}
    two = {"a": float("nan"), "b": [float("nan")], "c": math.inf, "d": 1.0}
    assert [name for name, _, _ in between(one, two)] == ["c"]


def test_each_kind_of_difference_has_its_group(gone, command, tmp_path):
    """The groups are config, code, data, environment, hardware and metrics, as text and as JSON. A run does not differ
    from itself."""
    first = RunFolder(gone[0].folder)
    second = RunFolder(shutil.copytree(first.path, tmp_path / "second"))
    second.config.write_text(second.config.read_text().replace("lr: 0.05", "lr: 0.06"))
    note_own(second.config)
    recorded = json.loads(second.environment.read_text())
    recorded["packages"]["torch"], recorded["cpu"]["model"] = "9.9.9", "Abacus"
    recorded |= {"started": "2030-01-01", "command": "other", "launch": "other"}
    second.environment.write_text(json.dumps(recorded))
    data = json.loads(second.data.read_text())
    data["files"]["digits.csv"][1] = "0" * 64
    second.data.write_text(json.dumps(data))
    kept = code.read_code(second.code)
    kept.files[0, "nets/narrow.py"] = b"WIDTH = 13\n"
    second.code.write_bytes(kept.pack())
    lines = [json.loads(line) for line in second.metrics.read_text().splitlines()]
    changed = next(line for line in lines if "val_loss" in line.get("values", {}))
    changed["values"]["val_loss"] = 3.5
    second.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    found = differences(past_run(str(first.path)), past_run(str(second.path)))
    assert {group: [name for name, _, _ in items] for group, items in found.items()} == {
        "config": ["model.optimizer.params.lr"],
        "code": ["nets/narrow.py"],
        "data": ["digits.csv"],
        "environment": ["torch"],
        "hardware": ["cpu.model"],
        "metrics": [f"val_loss (from step {changed['step']} on)"],
    }
    outcome = command("diff", first.path, second.path, "--patch", "--exit-code", cwd=tmp_path, code=1)
    assert outcome.out.strip() == as_text(differences(past_run(str(first.path)), past_run(str(second.path)), True))
    assert "  -WIDTH = 12\n  +WIDTH = 13\n" in outcome.out
    assert "config\n  model.optimizer.params.lr: 0.05 → 0.06\n" in outcome.out
    shown = json.loads(command("diff", first.path, second.path, "--format", "json", cwd=tmp_path, code=0).out)
    assert shown["config"] == [{"name": "model.optimizer.params.lr", "first": 0.05, "second": 0.06}]
    same = command("diff", first.path, first.path, "--exit-code", cwd=tmp_path)
    assert (same.code, same.out) == (0, "")


@pytest.fixture
def collected(monkeypatch):
    """`collected(roots, (name, file), …)` is the code of a process with these import roots and imported modules. The
    first root is the working directory."""

    def collect(roots, *modules, **more):
        loaded = {name: sys.modules[name] for name in ("json", "numpy", "os")}
        for name, file in modules:
            loaded[name] = type(sys)(name)
            loaded[name].__file__ = str(file)
        monkeypatch.setattr(sys, "path", [*map(str, roots), *(p for p in sys.path if p not in map(str, roots))])
        monkeypatch.chdir(roots[0])
        return code.collect(modules=loaded, **more)

    return collect


def test_only_imported_code_is_read(collected, tmp_path, monkeypatch):
    """Only folders of imported packages are listed, so other files in the working directory cost nothing."""
    names = ("main.py", "other.py", "pack/__init__.py", "pack/inner.py", "pack/data.csv")
    write(tmp_path, dict.fromkeys(names, "from pack import inner\nimport json, numpy as np\n"))
    listed, scan = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": listed.append(str(path)) or scan(path))
    found = collected([tmp_path], ("main", tmp_path / "main.py"))
    assert set(found.names()) == {"main.py", "pack/__init__.py", "pack/inner.py"}
    assert listed == [str(tmp_path / "pack")]


def test_roots_keep_their_order_and_files_of_one_name_apart(collected, tmp_path):
    """Roots have the order of `sys.path`. The zip unpacks to the same files, and the same code gives the same bytes."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        write(folder, {"shared/part.py": f"import late{folder.name}\n", f"late{folder.name}.py": "# é\n"})
    modules = [("shared.part", one / "shared" / "part.py"), ("latetwo", two / "latetwo.py")]
    found = collected([one, two], *modules)
    assert (found.roots, found.working_directory) == ([str(one), str(two)], str(one))
    assert set(found.files) == {(0, "shared/part.py"), (0, "lateone.py"), (1, "latetwo.py")}
    packed = found.pack()
    assert packed == collected([one, two], *modules[::-1]).pack()
    (tmp_path / "code.zip").write_bytes(packed)
    again = code.read_code(tmp_path / "code.zip")
    assert again.files == found.files
    assert [folder.name for folder in code.unpack(again, tmp_path / "out")] == ["0", "1"]
    assert (tmp_path / "out/0/lateone.py").read_text() == "# é\n"


def test_code_keeps_the_state_in_which_it_was_imported(collected, tmp_path):
    """A file that is edited during the run is kept as it was at the start; a file that is imported later is added."""
    write(tmp_path, {"main.py": "x = 1\n", "late.py": "y = 1\n"})
    before = collected([tmp_path], ("main", tmp_path / "main.py"))
    (tmp_path / "main.py").write_text("x = 2\n")
    modules = [("main", tmp_path / "main.py"), ("late", tmp_path / "late.py")]
    assert collected([tmp_path], *modules, before=before).names() == {"main.py": b"x = 1\n", "late.py": b"y = 1\n"}


def test_code_over_the_limits_is_left_out_and_named(collected, tmp_path, monkeypatch):
    """Size and number of files are limited, and each file that is left out is named with the reason."""
    monkeypatch.setattr(code, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(code, "MAX_FILES", 3)
    monkeypatch.setattr(code, "MAX_TEXT_BYTES", 10)
    write(tmp_path / "pack", {f"m{number}.py": f"x = {number}\n" for number in range(4)})
    write(tmp_path / "pack", {"big.py": "#" * 101, "long.txt": "#" * 11, "credentials.json": "{}"})
    found = collected([tmp_path], ("pack.m0", tmp_path / "pack" / "m0.py"))
    assert set(found.names()) == {"pack/m0.py", "pack/m1.py", "pack/m2.py"}
    reasons = {Path(path).name: why for path, why in found.left_out.items()}
    assert reasons == {
        "big.py": "larger than 100 bytes",
        "long.txt": "larger than 10 bytes",
        "m3.py": f"more than 3 files or {code.MAX_BYTES:,} bytes of code",
    }


@pytest.mark.parametrize("name", ["0/../../evil.py", "0//etc/evil.py", "7/evil.py", "0/a\\evil.py", "evil.py"])
def test_a_zip_that_leads_out_of_its_folder_or_is_damaged_is_refused(name, tmp_path):
    """Nothing is unpacked from an untrusted `code.zip` with damage or a path outside its folder."""
    (tmp_path / "code.zip").write_bytes(code.Code(files={(0, "a.py"): b"x"}, roots=["/"]).pack()[:-30])
    with pytest.raises(CheckpointError, match="is damaged, or not the code of a run"):
        code.read_code(tmp_path / "code.zip")
    manifest = json.loads(zipfile.ZipFile(io.BytesIO(code.Code().pack())).read("manifest.json"))
    manifest |= {"roots": ["/"], "files": {name: "0" * 64}}
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        archive.writestr(name, "import os")
    with pytest.raises(CheckpointError, match="is not the name of a code file"):
        code.read_code(tmp_path / "code.zip")


def test_a_folder_of_data_is_told_by_its_files(tmp_path, monkeypatch):
    """Each file has name, size and SHA-256, or the size alone; hidden files, code and tracking stores are left out."""
    names = ("a/1.png", "a/2.png", ".hidden", "code.py", "mlruns/mlflow.db", "mlruns/x.png")
    write(tmp_path, {name: name for name in names})
    found = datafiles.describe_files([tmp_path], str(tmp_path), remember=False)
    assert found["files"].keys() == {"a/1.png", "a/2.png"}
    assert found["files"]["a/1.png"] == [7, hashlib.sha256(b"a/1.png").hexdigest()]
    assert datafiles.changes(found, datafiles.describe_again(found, None)) == {}
    (tmp_path / "a/2.png").write_text("other!!")
    assert datafiles.changes(found, datafiles.describe_again(found, None)).keys() == {"a/2.png"}
    found = datafiles.describe_files([tmp_path], None, seconds=-1, remember=False)
    assert list(found["files"].values()) == [[7, None]] * 2
    assert "only the size of 2 files is recorded" in found["incomplete"]
    (tmp_path / "a/1.png").write_bytes(bytes(11))
    assert list(datafiles.changes(found, datafiles.describe_again(found, None)).values()) == ["7 bytes → 11"]
    monkeypatch.setattr(datafiles, "MAX_FILES", 1)
    assert len(datafiles.describe_files([tmp_path], None, remember=False)["files"]) == 1


def test_a_data_module_tells_its_files(tmp_path):
    """The files are those of `files`, else paths among its attributes and params, else all of `data.root`."""
    for name in ("a.tsv", "b.tsv", "words.txt"):
        (tmp_path / name).touch()

    class Module:
        def __init__(self, **attributes):
            self.__dict__ |= attributes

    def names(module, **params):
        return {path.name for path in datafiles.paths_of(module, str(tmp_path), params)}

    assert names(Module(files=lambda: ["a.tsv", "gone.tsv"])) == {"a.tsv"}
    assert names(Module(files={"train": tmp_path / "a.tsv"}, words=tmp_path / "words.txt")) == {"a.tsv", "words.txt"}
    assert names(Module(), table="b.tsv", mode="crop") == {"b.tsv", tmp_path.name}
    assert names(Module()) == {tmp_path.name}
    assert datafiles.paths_of(Module(), None, {"mode": "crop", "sizes": [1, 2]}) == []


def test_differences_of_series_begin_with_the_earliest_step():
    """A missing point is a difference and NaN equals NaN; metrics of time, memory and load are not compared."""
    nan = float("nan")
    one = {"loss": [(0, 1.0), (4, nan), (8, 3.0)], "acc": [(8, 0.5)], "same": [(1, 1.0)]}
    two = {"loss": [(0, 1.0), (4, nan)], "acc": [(8, 0.6)], "same": [(1, 1.0)], "more": [(2, 1.0)]}
    assert [str(apart) for apart in first_differences(one, two)] == [
        *("more at step 2: none → 1.0", "acc at step 8: 0.5 → 0.6", "loss at step 8: 3.0 → none")
    ]
    assert not any(map(is_repeatable, ["batch_time", "system/cpu", "images_per_s", "samples_per_sec", "gpu_memory"]))
    assert all(map(is_repeatable, ["train_loss", "val_acc", "lr", "epoch", "timestep_loss", "grad_norm/a.times"]))


def test_a_run_is_moved_to_another_disk_beside_an_earlier_one(trained, tmp_path, monkeypatch):
    """Two reproductions in the temporary folder are both kept, although a rename between two file systems fails."""

    def start(plan):
        shutil.copytree(trained, plan.directory / "version_0")
        return 0, plan.directory / "version_0"

    def rename(*_, **__):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "rename", rename)
    folders = [reproduce(str(trained), say=lambda line: None, start=start).path for _ in range(2)]
    assert len({*folders}) == 2
    assert all(folder.parent == tmp_path / "runs" and RunFolder(folder).last.exists() for folder in folders)


def test_a_patch_of_line_ends_alone_describes_both_files():
    """Without lines to show, `--patch` gives the same description as a plain diff."""
    codes = [code.Code(roots=["/x"], files={(0, "own.py"): text}) for text in (b"A = 1", b"A = 1\n")]
    ((name, one, two),) = _code_between(*(SimpleNamespace(code=of) for of in codes), patch=True)
    assert (name, one[:7], two[:7]) == ("own.py", "1 lines", "1 lines")
    assert one != two


def test_relative_paths_are_those_of_the_user(trained, tmp_path, monkeypatch):
    """The new run starts in another folder; it still finds initial weights and `data.root`."""
    copied = RunFolder(shutil.copytree(trained, tmp_path / "copied"))
    text = copied.config.read_text()
    assert "init_from: null" in text
    copied.config.write_text(text.replace("init_from: null", "init_from: weights/a.ckpt"))
    note_own(copied.config)
    write(tmp_path, {"weights/a.ckpt": "", "data/x.csv": ""})
    monkeypatch.chdir(tmp_path)
    seen = []

    def start(plan):
        seen.extend(plan.overrides[-2:])
        return 3, None

    with pytest.raises(SystemExit):
        reproduce(str(copied.path), ["data.root=data"], any_data=True, say=lambda _: None, start=start)
    assert seen == [f"model.init_from='{tmp_path / 'weights/a.ckpt'}'", f"data.root='{tmp_path / 'data'}'"]


def test_a_run_that_was_tested_later_is_made_again(train, command, place, forked, tmp_path, monkeypatch):
    """A test by `deeplightning test RUN` is no part of the run's config, so it is not compared."""
    done = train("stages=[train]", "seed=11").folder
    command("test", done, cwd=place, code=0)
    monkeypatch.chdir(tmp_path)
    assert reproduce(str(done), say=lambda text: None, start=forked).path != done


def test_weights_of_an_interrupted_run_are_not_compared_with_later_ones(tmp_path, monkeypatch):
    """A reproduction of an interrupted run goes further; weights of different steps differ in any case."""
    folders = [RunFolder(tmp_path / name) for name in "ab"]
    for step, folder in enumerate(folders):
        folder.path.mkdir()
        torch.save({"global_step": step, "state_dict": {}}, folder.last)
    said = []
    assert _weight_differences(*folders, said.append, False) == []
    assert said == ["the weights are not compared: last.ckpt: step 0 → 1"]
    assert _weight_differences(*folders, said.append, True) == ["last.ckpt: step 0 → 1"]


def test_data_without_a_digest_are_named_in_the_log(tmp_path, caplog):
    """A warning gives the number of files of which only the size is recorded."""
    write(tmp_path, {"data/x.bin": "x"})
    module, logger = SimpleNamespace(type="own.Data", params={}), SimpleNamespace(params={})
    data = SimpleNamespace(root=str(tmp_path / "data"), dataset="D", module=module)
    recorder = Provenance(SimpleNamespace(secrets=None, logger=logger, data=data), RunFolder(tmp_path))
    recorder._stop_digest.set()
    recorder._hash_data(None, [tmp_path / "data"])
    assert "only the size of 1 files is recorded" in caplog.text


def test_a_difference_shows_a_variable_as_it_was_written(gone, tmp_path, monkeypatch):
    """It does not show the value of the variable."""
    first = RunFolder(gone[0].folder)
    second = RunFolder(shutil.copytree(first.path, tmp_path / "second"))
    second.config.write_text(second.config.read_text().replace("${oc.env:TABLE_PASSWORD}", "nothing"))
    note_own(second.config)
    monkeypatch.setenv("TABLE_PASSWORD", "hunter-22")
    found = differences(past_run(str(first.path)), past_run(str(second.path)))["config"]
    assert found == [("data.module.params.password", "${oc.env:TABLE_PASSWORD}", "nothing")]
