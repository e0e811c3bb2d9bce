"""The job array of a search, with fake Slurm commands that record their arguments."""

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
    """`slurm(largest, limit)` puts fake commands on the path, with a maximum array size and a limit of jobs per user;
    returns a function that returns the calls since its last call."""
    asked = tmp_path / "asked"

    def install(largest=1001, limit=1001):
        for name, text in {"sbatch": SBATCH, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
            script = tmp_path / "bin" / name
            script.parent.mkdir(exist_ok=True)
            script.write_text(text.replace("{asked}", str(asked)).format(largest=largest, limit=limit))
            script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

        def calls():
            lines = asked.read_text().splitlines() if asked.exists() else []
            asked.unlink(missing_ok=True)
            return lines

        return calls

    return install


@pytest.fixture
def array(tmp_path):
    """`array(trials)` makes the array of a search in the temporary folder."""

    def make(trials, folder="s"):
        return TrialArray(tmp_path / folder, trials, tmp_path / "note", lambda folder, tasks: f"ARRAY {tasks}\n")

    return make


def tasks_of(array, number):
    return [json.loads(array.variables({})[TASK])["number"] for _ in range(number)]


def test_one_array_has_a_task_for_each_trial(slurm, array, tmp_path):
    """The first trial submits it; only the owner can read a task's variables, which a shell reads unchanged."""
    calls, search = slurm(), array(3)
    (found,) = search.variables({"TOKEN": "it's $HOME", "GONE": None}).values()
    folder = tmp_path / "s" / "0"
    assert json.loads(found) == {"folder": str(folder), "number": "41_0"}
    file = folder / "variables.sh"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.popen(f'GONE=1; . "{file}"; echo "$TOKEN$GONE"').read() == "it's $HOME\n"
    assert tasks_of(search, 2) == ["41_1", "41_2"]
    assert calls() == ["sbatch 3"]
    assert (tmp_path / "note").read_text() == "41"


def test_the_process_of_a_trial_releases_and_cancels_its_task(slurm, array, monkeypatch):
    """It finds its task in its environment; another process has none."""
    calls, search = slurm(), array(2)
    assert task_here() is None
    for name, value in search.variables({}).items():
        monkeypatch.setenv(name, value)
    task = task_here()
    task.release()
    task.cancel()
    assert calls() == ["sbatch 2", "scontrol release 41_0", "scancel 41_0"]


def test_more_trials_than_an_array_may_have(slurm, array):
    """Another array is submitted once the first one has no task left."""
    calls, search = slurm(largest=3), array(5)
    assert tasks_of(search, 3) == ["41_0", "41_1", "41_2"]
    assert calls() == ["sbatch 3"]
    assert tasks_of(search, 2) == ["41_0", "41_1"]
    assert calls() == ["sbatch 2"]


def test_a_limit_of_jobs_makes_smaller_arrays(slurm, array, tmp_path):
    """With a limit of four jobs, arrays have at most four tasks; a single remaining trial submits its own job."""
    calls, search = slurm(limit=4), array(9)
    assert tasks_of(search, 4) == ["42_0", "42_1", "42_2", "42_3"]
    assert calls() == ["sbatch 9", "sbatch 4"]
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["0", "1", "2", "3", "job.sh"]
    assert tasks_of(search, 4) == ["41_0", "41_1", "41_2", "41_3"]
    assert search.variables({}) == {}
    assert calls() == ["sbatch 4"]


def test_another_refusal_ends_the_search(slurm, array, tmp_path):
    """An error of sbatch ends the search with its message."""
    calls, search = slurm(), array(3)
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition: x' >&2\nexit 1\n")
    with pytest.raises(SetupError, match="Slurm refuses the job: invalid partition: x"):
        search.variables({})
    assert calls() == []


def test_a_slurm_without_arrays(slurm, array):
    """If Slurm's MaxArraySize is 1, each trial submits a separate job."""
    calls, search = slurm(largest=1), array(3)
    assert search.variables({}) == {}
    assert calls() == []


def test_what_no_trial_has_taken_is_cancelled(slurm, array, tmp_path):
    """Unused tasks are cancelled at the end of the search, or by the next search if this one was killed."""
    calls, search = slurm(), array(3)
    tasks_of(search, 1)
    next_search = array(2, folder="next")
    tasks_of(next_search, 1)
    assert calls() == ["sbatch 3", "scancel 41", "sbatch 2"]
    next_search.close()
    assert calls() == ["scancel 42"]
    assert not (tmp_path / "note").exists()
    assert sorted(path.name for path in (tmp_path / "next").iterdir()) == ["0", "job.sh"]


@pytest.mark.parametrize(
    ("trials", "swept", "is_one"),
    [(3, ["seed", "engineer.x"], True), (1, ["seed"], False), (3, ["engine.num_nodes"], False)],
)
def test_runs_of_one_size_are_an_array(trials, swept, is_one, tmp_path):
    """If the engine differs between runs, each run is a separate job."""
    cfg = SimpleNamespace(engine=Engine(launcher=Target(type="deeplightning_slurm.Slurm")))
    found = array_of(Job(cfg, tmp_path / "c.yaml"), trials, swept, tmp_path / "note")
    assert isinstance(found, TrialArray) is is_one


def test_a_trial_inside_an_allocation_releases_its_task(slurm, array, monkeypatch):
    """It submits no separate job, so the surrounding allocation does not matter."""
    calls, search = slurm(), array(2)
    for name, value in (search.variables({}) | {"SLURM_JOB_ID": "7"}).items():
        monkeypatch.setenv(name, value)
    for name in ("seal", "_frozen_config"):
        monkeypatch.setattr(launcher, name, lambda *_, **__: "")
    monkeypatch.setattr(launcher.Slurm, "script", lambda *_: "")
    monkeypatch.setattr(launcher.Follower, "follow", lambda self: 0)
    assert launcher.Slurm().run(None) == 0
    assert calls()[-1] == "scontrol release 41_0"
