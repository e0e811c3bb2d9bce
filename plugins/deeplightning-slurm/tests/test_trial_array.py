"""The array of a search, with commands of Slurm that only record how they are called."""

import json
import os
import stat
from types import SimpleNamespace

import pytest
from deeplightning_slurm import launcher

from deeplightning.config.schema import Engine, Target
from deeplightning.faults import SetupError
from deeplightning.launch import Job, array_of

pytest.importorskip("deeplightning_slurm")

from deeplightning_slurm.trial_array import TASK, TrialArray, task_here

SBATCH = """\
#!/bin/sh
tasks=$(sed -n 's/^ARRAY //p' "$1")
echo "sbatch $tasks" >>{asked}
if [ "$tasks" -gt {limit} ]; then
  echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
  echo "sbatch: error: Batch job submission failed" >&2
  exit 1
fi
echo "Submitted batch job $(($(grep -c sbatch {asked}) + 40))"
"""
SCONTROL = """\
#!/bin/sh
case "$1" in
show) echo "MaxArraySize            = {largest}" ;;
ping) ;;
*) echo "scontrol $*" >>{asked} ;;
esac
"""
SCANCEL = '#!/bin/sh\necho "scancel $*" >>{asked}\n'


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """`slurm(largest, limit)` puts a Slurm on the path with such a largest array, and such a limit of a user's jobs;
    gives a function that returns what it was asked since."""
    asked = tmp_path / "asked"

    def place(largest=1001, limit=1001):
        for name, text in {"sbatch": SBATCH, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
            script = tmp_path / "bin" / name
            script.parent.mkdir(exist_ok=True)
            script.write_text(text.replace("{asked}", str(asked)).format(largest=largest, limit=limit))
            script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

        def asked_since():
            lines = asked.read_text().splitlines() if asked.exists() else []
            asked.unlink(missing_ok=True)
            return lines

        return asked_since

    return place


@pytest.fixture
def array(tmp_path):
    """`array(trials)` of a search in the temporary folder."""

    def make(trials, folder="s"):
        return TrialArray(tmp_path / folder, trials, tmp_path / "note", lambda folder, tasks: f"ARRAY {tasks}\n")

    return make


def tasks_of(array, number):
    return [json.loads(array.variables({})[TASK])["number"] for _ in range(number)]


def test_one_array_has_a_task_for_each_trial(slurm, array, tmp_path):
    """Submitted with the first trial; a task's variables are its owner's alone, and read by a shell as they were."""
    asked, search = slurm(), array(3)
    (found,) = search.variables({"TOKEN": "it's $HOME", "GONE": None}).values()
    folder = tmp_path / "s" / "0"
    assert json.loads(found) == {"folder": str(folder), "number": "41_0"}
    file = folder / "variables.sh"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    told = os.popen(f'GONE=1; . "{file}"; echo "$TOKEN$GONE"').read()
    assert told == "it's $HOME\n"
    assert tasks_of(search, 2) == ["41_1", "41_2"]
    assert asked() == ["sbatch 3"]
    assert (tmp_path / "note").read_text() == "41"


def test_the_process_of_a_trial_releases_and_cancels_its_task(slurm, array, monkeypatch):
    asked, search = slurm(), array(2)
    assert task_here() is None
    for name, value in search.variables({}).items():
        monkeypatch.setenv(name, value)
    task = task_here()
    task.release()
    task.cancel()
    assert asked() == ["sbatch 2", "scontrol release 41_0", "scancel 41_0"]


def test_more_trials_than_an_array_may_have(slurm, array):
    """The next array is submitted when the first has no task left, and has the rest."""
    asked, search = slurm(largest=3), array(5)
    assert tasks_of(search, 3) == ["41_0", "41_1", "41_2"]
    assert asked() == ["sbatch 3"]
    assert tasks_of(search, 2) == ["41_0", "41_1"]
    assert asked() == ["sbatch 2"]


def test_a_limit_of_jobs_makes_smaller_arrays(slurm, array, tmp_path):
    """A user who may submit four jobs has arrays of at most that; a single trial that is left submits its own job."""
    asked, search = slurm(limit=4), array(9)
    assert tasks_of(search, 4) == ["42_0", "42_1", "42_2", "42_3"]
    assert asked() == ["sbatch 9", "sbatch 4"]
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["0", "1", "2", "3", "job.sh"]
    assert tasks_of(search, 4) == ["41_0", "41_1", "41_2", "41_3"]
    assert search.variables({}) == {}
    assert asked() == ["sbatch 4"]


def test_another_refusal_ends_the_search(slurm, array, tmp_path):
    asked, search = slurm(), array(3)
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition: x' >&2\nexit 1\n")
    with pytest.raises(SetupError, match="Slurm refuses the job: invalid partition: x"):
        search.variables({})
    assert asked() == []


def test_a_slurm_without_arrays(slurm, array):
    """Each trial submits a job of its own, as without an array."""
    asked, search = slurm(largest=1), array(3)
    assert search.variables({}) == {}
    assert asked() == []


def test_what_no_trial_has_taken_is_cancelled(slurm, array, tmp_path):
    """At the end of the search, and, where that was killed, at the start of the next."""
    asked, search = slurm(), array(3)
    tasks_of(search, 1)
    next_search = array(2, folder="next")
    tasks_of(next_search, 1)
    assert asked() == ["sbatch 3", "scancel 41", "sbatch 2"]
    next_search.close()
    assert asked() == ["scancel 42"]
    assert not (tmp_path / "note").exists()
    assert sorted(path.name for path in (tmp_path / "next").iterdir()) == ["0", "job.sh"]


@pytest.mark.parametrize(
    ("trials", "swept", "is_one"),
    [(3, ["seed", "engineer.x"], True), (1, ["seed"], False), (3, ["engine.num_nodes"], False)],
)
def test_runs_of_one_size_are_an_array(trials, swept, is_one, tmp_path):
    """Where the engine differs from run to run, each is a job of its own size."""
    cfg = SimpleNamespace(engine=Engine(launcher=Target(type="deeplightning_slurm.Slurm")))
    found = array_of(Job(cfg, tmp_path / "c.yaml"), trials, swept, tmp_path / "note")
    assert isinstance(found, TrialArray) is is_one


def test_a_trial_inside_an_allocation_releases_its_task(slurm, array, monkeypatch):
    """It submits no job of its own, so the job around it does not matter."""
    asked, search = slurm(), array(2)
    for name, value in (search.variables({}) | {"SLURM_JOB_ID": "7"}).items():
        monkeypatch.setenv(name, value)
    for name in ("seal", "_frozen_config"):
        monkeypatch.setattr(launcher, name, lambda *_, **__: "")
    monkeypatch.setattr(launcher.Slurm, "script", lambda *_: "")
    monkeypatch.setattr(launcher.Follower, "follow", lambda self: 0)
    assert launcher.Slurm().run(None) == 0
    assert asked()[-1] == "scontrol release 41_0"
