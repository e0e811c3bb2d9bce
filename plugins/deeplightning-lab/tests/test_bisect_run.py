"""The differences of two runs are found, and runs that mix both are built from them."""

import json

import pytest
import yaml
from deeplightning_lab.bisect import _data_root
from deeplightning_lab.bisect_run import Parts, fixed, is_available, mix, parts_of, switchable
from hypothesis import given, settings
from hypothesis import strategies as st

from deeplightning.reproduce.past import PastRun
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.code import Code, describe_program, read_code

SGD = {"type": "torch.optim.SGD", "params": {"lr": 0.1, "momentum": 0.9}, "groups": []}
ADAM = {"type": "torch.optim.Adam", "params": {"lr": 0.001, "betas": [0.9, 0.99]}, "groups": []}
PROGRAM = describe_program()


def tree(**sections):
    """Return a config with the given sections."""
    return {"seed": 7, "data": {"root": "/data", "batch_size": 64}, "model": {"optimizer": SGD}} | sections


@pytest.fixture
def run(tmp_path):
    """`run(name, config, files, …)` makes a run folder with config, code and environment."""

    def make(name, config, files=None, roots=("/work",), program=PROGRAM, **environment):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.config.write_text(yaml.safe_dump(config, sort_keys=False))
        folder.environment.write_text(json.dumps({"directory": "/work"} | environment))
        named = {key if isinstance(key, tuple) else (0, key): text.encode() for key, text in (files or {}).items()}
        code = Code([*roots], roots[0] if roots else None, named, program=dict(program))
        folder.code.write_bytes(code.pack())
        return PastRun(folder, None, None, trust=True)

    return make


def parts(*runs):
    return [parts_of(run, "python") for run in runs]


def described(good, bad, overrides=()):
    return [str(difference) for difference in switchable(*parts(good, bad), overrides)]


def written(mixture, folder):
    """Write a mixture as a run folder; return its config, code files and environment."""
    made = RunFolder(folder)
    mixture.write(made)
    config, environment = yaml.safe_load(made.config.read_text()), json.loads(made.environment.read_text())
    return config, read_code(made.code).names(), environment


def test_each_key_is_a_difference_of_its_own(run):
    """A difference has both values, also of a key that one run lacks; keys that affect no metric are ignored."""
    good = run("good", tree(train={"num_epochs": 1, "export": True}, logger={"log_every_n_steps": 1}))
    data = {"root": "/data", "batch_size": 256, "fold": 1}
    bad = run("bad", tree(data=data, train={"num_epochs": 1, "export": False}))
    assert described(good, bad) == ["data.batch_size 64 → 256", "data.fold none → 1"]


def test_a_section_whose_type_differs_is_one_difference(run):
    """It includes the params; sections of the same type are compared key by key."""
    good, bad = run("good", tree()), run("bad", tree(model={"optimizer": ADAM}))
    assert [text.partition(" ")[0] for text in described(good, bad)] == ["model.optimizer"]
    faster = run("faster", tree(model={"optimizer": SGD | {"params": {"lr": 0.2, "nesterov": True}}}))
    assert described(good, faster) == [
        *("model.optimizer.params.lr 0.1 → 0.2", "model.optimizer.params.momentum 0.9 → none"),
        "model.optimizer.params.nesterov none → true",
    ]


def test_the_arguments_of_an_engine_are_switched_with_its_backend(run, tmp_path):
    """The number of processes is a separate difference."""
    good = run("good", tree(engine={"backend": "ddp", "params": {"static_graph": True}, "processes": 2}))
    bad = run("bad", tree(engine={"backend": "fsdp", "params": {"wrap": ["Block"]}, "processes": 4}))
    assert described(good, bad) == ["engine.backend ddp → fsdp", "engine.processes 2 → 4"]
    both = parts(good, bad)
    mixture = mix(*both, switchable(*both)[:1])
    expected = {"backend": "fsdp", "params": {"wrap": ["Block"]}, "processes": 2}
    assert written(mixture, tmp_path / "mixture")[0]["engine"] == expected


def test_overridden_keys_are_no_difference(run):
    """Overrides of a key and of its section apply to all runs."""
    good, bad = run("good", tree()), run("bad", tree(seed=8, data={"root": "/elsewhere", "batch_size": 32}))
    assert described(good, bad, ["data.root=/here"]) == ["seed 7 → 8", "data.batch_size 64 → 32"]
    assert described(good, bad, ["~data", "seed=1"]) == []


def test_a_relative_folder_of_data_means_the_same_in_a_mixture(run, tmp_path):
    """It is relative to the directory in which the run was started, so two such runs differ."""
    directories = [tmp_path / "one", tmp_path / "two"]
    for folder in directories:
        (folder / "digits").mkdir(parents=True)
    relative = tree(data={"root": "digits"})
    good, bad = (run(f"run {d.name}", relative, directory=str(d)) for d in directories)
    assert described(good, bad) == [f"data.root {directories[0]}/digits → {directories[1]}/digits"]


def test_all_differences_make_the_second_run_and_none_the_first(run, tmp_path):
    """This holds for config, code (added, removed and changed files, another root) and environment."""
    files = {"own.py": "a = 1\n", "gone.py": "", "same.py": "b = 1\n"}
    good = run("good", tree(), files, threads=1, variables={"OMP_NUM_THREADS": "1", "MKL_CBWR": "AVX2"})
    more = {"own.py": "a = 2\n", "same.py": "b = 1\n", "new.py": "", (1, "beside.py"): "c = 1\n"}
    changed = tree(seed=8, model={"optimizer": ADAM, "loss": {"type": "own.Loss"}})
    bad = run("bad", changed, more, ("/other", "/conf"), threads=2, variables={"OMP_NUM_THREADS": "2"})
    both = parts(good, bad)
    differences = switchable(*both)
    names = [difference.name for difference in differences]
    code_files = ["beside.py", "gone.py", "new.py", "own.py"]
    assert names == ["seed", "model.optimizer", "model.loss", *code_files, "threads", "MKL_CBWR"]
    ends = [written(part, tmp_path / f"end {number}") for number, part in enumerate(both)]
    first, last = mix(*both, []), mix(*both, differences)
    assert written(first, tmp_path / "first") == ends[0]
    config, code, environment = written(last, tmp_path / "last")
    assert (config, code) == ends[1][:2]
    assert (environment["threads"], environment["variables"]) == (2, {"OMP_NUM_THREADS": "2"})
    assert first.digest() == both[0].digest()


def test_a_mixture_has_one_file_of_the_second_run(run, tmp_path):
    """The digest of a mixture is unique, and does not depend on the order in which mixtures are built."""
    good = run("good", tree(), {"own.py": "a = 1\n", "net.py": "b = 1\n"})
    bad = run("bad", tree(seed=8), {"own.py": "a = 2\n", "net.py": "b = 2\n"})
    both = parts(good, bad)
    seed, net, own = switchable(*both)
    assert (net.name, own.name) == ("net.py", "own.py")
    mixture = mix(*both, [own])
    assert written(mixture, tmp_path / "mixture")[1] == {"own.py": b"a = 2\n", "net.py": b"b = 1\n"}
    digests = [mix(*both, chosen).digest() for chosen in ([], [own], [net], [seed], [seed, net, own])]
    assert len(set(digests)) == 5
    assert mix(*both, [own]).digest() == digests[1]


def test_a_secret_stays_a_reference_in_a_mixture(run, tmp_path, monkeypatch):
    """Neither the folder of a mixture nor a difference contains the value."""
    monkeypatch.setenv("TABLE_PASSWORD", "correct-horse-battery")
    guarded = {"root": "/data", "module": {"type": "own.Table", "params": {"password": "${oc.env:TABLE_PASSWORD}"}}}
    good = run("good", tree(), {"own.py": 'P = "${oc.env:TABLE_PASSWORD}"\n'})
    bad = run("bad", tree(data=guarded), {"own.py": 'P = "${oc.env:TABLE_PASSWORD}"  # !\n'})
    both = parts(good, bad)
    differences = switchable(*both)
    config, code, _ = written(mix(*both, differences), tmp_path / "mixture")
    assert config["data"]["module"]["params"]["password"] == "${oc.env:TABLE_PASSWORD}"
    assert "correct-horse-battery" not in f"{config}{code}{[*map(str, differences)]}"


def test_what_cannot_be_switched_here_is_listed(run):
    """Packages, the machine, and Deep Lightning's own files are listed as fixed."""
    same = {"os": "Linux", "program": {"version": "9.9.9", "digest": "0" * 64}}
    good = run("good", tree(), {"own.py": ""}, packages={"torch": "1"}, host="here", os="Linux", threads=1)
    bad = run("bad", tree(), {"own.py": "a\n"}, packages={"torch": "2"}, host="there", threads=2, **same)
    differences = switchable(*parts(good, bad))
    assert [difference.name for difference in differences] == ["own.py", "threads"]
    assert fixed(good, bad, differences)[:2] == ["torch 1 → 2", "host here → there"]
    assert is_available(good.code)
    assert not is_available(bad.code)


def test_changed_data_files_are_listed_if_the_data_keys_are_equal(run):
    """If a key of `data` differs, different files are a consequence and are not listed."""
    good, bad, other = run("good", tree()), run("bad", tree(seed=8)), run("other", tree(data={"root": "/other"}))
    for past, digest in ((good, "a" * 64), (bad, "b" * 64), (other, "b" * 64)):
        listed = {"root": "/data", "files": {"x.csv": [10, digest]}, "folders": [], "incomplete": None}
        past.folder.data.write_text(json.dumps(listed))
    (listed,) = fixed(good, bad, switchable(*parts(good, bad)))
    assert listed.partition(":")[0] == "data x.csv 10 bytes, aaaaaaaa → 10 bytes, bbbbbbbb"
    assert fixed(good, other, switchable(*parts(good, other))) == []


KEYS = st.sampled_from(["type", "params", "lr", "engine", "backend", "data"])
TREES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.5, 1.0, "a", "1"]) | st.lists(st.integers(0, 1)),
    lambda inner: st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=4), st.dictionaries(KEYS, TREES, max_size=4))
def test_all_differences_of_any_two_configs_lead_from_one_to_the_other(one, two):
    """A config has no difference from itself, and each difference that is left out remains as the only one."""
    both = [Parts(tree, Code(), {}, "python") for tree in (one, two)]
    differences = switchable(*both)
    assert switchable(both[0], both[0]) == []
    assert yaml.safe_dump(mix(*both, differences).tree) == yaml.safe_dump(two)
    for left in differences:
        rest = [difference for difference in differences if difference is not left]
        assert [str(d) for d in switchable(mix(*both, rest), both[1])] == [str(left)]
    assert yaml.safe_dump(both[0].tree) == yaml.safe_dump(one)


def test_the_data_are_checked_where_the_runs_look_for_them(run, tmp_path, monkeypatch):
    """A reference and a quoted override are resolved, as the runs resolve them."""
    monkeypatch.setenv("DATA", str(tmp_path))
    made = run("a", tree(data={"root": "${oc.env:DATA}"}))
    assert _data_root(made, "${oc.env:DATA}", []) == str(tmp_path)
    assert _data_root(made, "${oc.env:DATA}", ["data.root='/new data'"]) == "/new data"


def test_a_mixed_run_is_written_in_utf_8(tmp_path, monkeypatch):
    """A config is read as UTF-8, whatever the locale."""
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "ascii")
    Parts({"a": "Größe"}, Code(), {}, "python").write(folder := RunFolder(tmp_path))
    assert "Größe" in folder.config.read_text(encoding="utf-8")
