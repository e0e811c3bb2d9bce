"""The storm test runner: a seed repeats a case, a failed case means exit code 1 and a command that repeats it, and
Ctrl-C prints the table."""

import os
import signal
import time
from types import SimpleNamespace

import psutil
import pytest
import storm
from commands import python
from hangs import limited
from served import gone, wait_until
from storm import planted, shim
from storm.place import Broken, Skipped, expect
from storm.schedule import Storm
from storm.table import repeat, table


def kind(case, **more):
    """Return a module of a kind of case."""
    return SimpleNamespace(**({"WHAT": "something", "HOUR": 100, "LIMIT": 20, "case": case} | more))


@pytest.fixture
def run(tmp_path):
    """`run(case, …)` runs a kind of case for some tenths of a second and returns the storm with its results."""

    def run_storm(case, seconds=0.3, seed=1, only=None, **more):
        results = []
        base = tmp_path / str(len(list(tmp_path.iterdir())))
        base.mkdir()
        modules = {"one": kind(case, **more)}
        made = Storm(modules, base, seed, seconds, 2, lambda result, folder: results.append(result), only)
        made.results = results
        made.run()
        return made

    return run_storm


def test_seed_and_number_repeat_a_case(run):
    """The random numbers of a case depend only on the seed and its number."""

    def case(draw, place):
        return f"{draw.random()}"

    first = {result.number: result.message for result in run(case, seed=5).results}
    second = {result.number: result.message for result in run(case, seed=5).results}
    other = {result.number: result.message for result in run(case, seed=6).results}
    common = first.keys() & second.keys() & other.keys()
    assert len(common) > 1
    assert all(first[number] == second[number] != other[number] for number in common)
    (alone,) = run(case, seed=5, only=1).results
    assert alone.message == first[1]


def test_each_kind_of_failure_is_reported(run):
    """A failed expectation, another error, a killed case and one that does not end have a message and a command."""

    def case(draw, place):
        if place.folder.parent.name == "one-1":
            expect(1 == 2, "one is two", "seen")
        if place.folder.parent.name == "one-2":
            raise ValueError("odd")
        if place.folder.parent.name == "one-3":
            os.kill(os.getpid(), signal.SIGKILL)
        if place.folder.parent.name == "one-4":
            time.sleep(100)
        if int(place.folder.parent.name.partition("-")[2]) > 4:
            time.sleep(0.4)  # else there would be hundreds of cases
        return "fine"

    found = {result.number: result for result in run(case, seconds=4, LIMIT=2).results}
    assert [found[number].held for number in range(5)] == [True, False, False, False, False]
    assert found[1].message == "one is two\nseen"
    assert "ValueError: odd" in found[2].message
    assert "ended with -9" in found[3].message
    assert "not ended after 2 s" in found[4].message
    assert repeat("kills", 7, 12) == "bash test.sh --storm --seed 7 --only kills --case 12"


def test_processes_that_a_case_leaves_are_killed_and_reported(run, monkeypatch):
    """A process whose parent has ended belongs to its case."""
    monkeypatch.setattr("storm.worker.GRACE", 0.2)

    def case(draw, place):
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(100)
            os._exit(0)
        return "fine"

    (result,) = run(case, only=0).results
    assert result.held is False
    assert result.message.startswith("processes were left: ")
    left = int(result.message.removeprefix("processes were left: ").split()[0])
    wait_until(lambda: gone(left))


def test_a_kind_that_cannot_be_tried_is_skipped(run):
    """A kind that cannot run has its reason, another one the numbers of tried and failed cases."""

    def skipped(draw, place):
        raise Skipped("no compiler")

    def counts(draw, place):
        place.count = 25
        if place.folder.parent.name == "one-1":
            raise Broken("it does not hold")
        return "fine"

    assert "| skipped: no compiler |" in table(run(skipped))
    made = run(counts)
    tally = made.tallies["one"]
    assert (tally.tried, tally.broken) == (25 * tally.cases, 1)
    assert f"| {tally.tried:,} " in table(made)


def test_ctrl_c_ends_the_cases_and_keeps_what_ran(tmp_path):
    """Processes that the cases have started end, too."""

    def case(draw, place):
        while place.folder.parent.name != "one-0":
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(5)  # retry: Python loses an exception raised in a `__del__`
        return "fine"

    def is_interrupted():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        results = []
        made = Storm({"one": kind(case)}, tmp_path, 1, 100, 1, lambda result, folder: results.append(result))
        with pytest.raises(KeyboardInterrupt):
            made.run()
        assert [result.message for result in results] == ["fine"]
        assert "| 1 " in table(made)
        assert (tmp_path / "one-1").is_dir()
        assert psutil.Process().children() == []

    limited(60, is_interrupted)


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_the_program_ends_with_1_for_a_broken_promise(tmp_path, monkeypatch, capsys, holds, code):
    """The folder of the case and the command that repeats it are kept, and the table is printed."""
    from storm import __main__ as program

    def case(draw, place):
        expect(holds, "planted")
        return "fine"

    monkeypatch.setattr(storm, "load_kinds", lambda: {"one": kind(case)})
    monkeypatch.setattr("commands.import_all", lambda preload: None)
    monkeypatch.setattr(program, "_clean_environment", lambda: None)
    arguments = ["--only", "one", "--case", "3", "--seed", "4", "--minutes", "1", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["storm", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert program.main() == code
    finally:
        signal.signal(signal.SIGTERM, before)
    output = capsys.readouterr()
    assert "| one " in output.out
    assert (tmp_path / "4" / "one-3" / "case").exists() == (not holds)
    if not holds:
        again = "bash test.sh --storm --seed 4 --only one --case 3"
        assert "one 3: BROKEN: planted" in output.out
        assert again in output.out
        assert again in (tmp_path / "4" / "broken.txt").read_text()
        assert str(tmp_path / "4" / "broken.txt") in output.err


def test_a_kind_that_is_not_there_is_named(monkeypatch, capsys):
    """The exit code is 2, and the error lists the kinds that exist."""
    from storm import __main__ as program

    monkeypatch.setattr("sys.argv", ["storm", "--only", "kils"])
    assert program.main() == 2
    assert "--only kils: no such kind of case; there are kills, search" in capsys.readouterr().err


def test_the_shim_is_loaded_from_a_path_with_a_blank_too(tmp_path, monkeypatch):
    """A blank ends a name in LD_PRELOAD, and the loader ignores files that it does not find."""
    source = tmp_path / "a clone" / "tests" / "storm" / "shim.c"
    source.parent.mkdir(parents=True)
    source.write_bytes(shim.SOURCE.read_bytes())
    monkeypatch.setattr(shim, "SOURCE", source)
    try:
        preload = shim.environment()["LD_PRELOAD"]
    except Skipped as skipped:
        pytest.skip(str(skipped))
    done = python("-S", "-c", "print(open('/proc/self/maps').read())", LD_PRELOAD=preload)
    assert preload.partition(":")[0] in done.stdout
    assert done.stderr == ""


def test_each_planted_fault_has_its_place():
    """The text that it replaces occurs exactly once in its file."""
    found = {name: (planted.ROOT / fault.file).read_text().count(fault.right) for name, fault in planted.FAULTS.items()}
    assert found == dict.fromkeys(planted.FAULTS, 1)
