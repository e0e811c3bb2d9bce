"""The storm itself: a seed repeats a case, a broken promise ends with 1 and the command that repeats it, Ctrl-C prints
the table."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import storm
from hangs import limited
from storm import planted, shim
from storm.place import Broken, Skipped, expect
from storm.schedule import Storm
from storm.table import repeat, table


def kind(case, **more):
    """A module of a kind of case."""
    return SimpleNamespace(**({"WHAT": "something", "HOUR": 100, "LIMIT": 20, "case": case} | more))


@pytest.fixture
def run(tmp_path):
    """`run(case, …)` runs a kind of case for some tenths of a second; gives the storm and its results."""

    def started(case, seconds=0.3, seed=1, only=None, **more):
        results = []
        base = tmp_path / str(len(list(tmp_path.iterdir())))
        base.mkdir()
        modules = {"one": kind(case, **more)}
        made = Storm(modules, base, seed, seconds, 2, lambda result, folder: results.append(result), only)
        made.results = results
        made.run()
        return made

    return started


def test_seed_and_number_repeat_a_case(run):
    """What a case draws depends on nothing else."""

    def case(draw, place):
        return f"{draw.random()}"

    first = {result.number: result.words for result in run(case, seed=5).results}
    second = {result.number: result.words for result in run(case, seed=5).results}
    other = {result.number: result.words for result in run(case, seed=6).results}
    common = first.keys() & second.keys() & other.keys()
    assert len(common) > 1
    assert all(first[number] == second[number] != other[number] for number in common)
    (alone,) = run(case, seed=5, only=1).results
    assert alone.words == first[1]


def test_a_broken_promise_is_counted_with_its_words(run):
    """As is any other error, a death of the case, and one that does not end; each has the line that repeats it."""

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
            time.sleep(0.4)  # else there are hundreds of them
        return "fine"

    found = {result.number: result for result in run(case, seconds=4, LIMIT=2).results}
    assert [found[number].held for number in range(5)] == [True, False, False, False, False]
    assert found[1].words == "one is two\nseen"
    assert "ValueError: odd" in found[2].words
    assert "ended with -9" in found[3].words
    assert "not ended after 2 s" in found[4].words
    assert repeat("kills", 7, 12) == "bash test.sh --storm --seed 7 --only kills --case 12"


def test_what_a_case_leaves_is_broken_and_killed(run, monkeypatch):
    """A process whose parent has ended is its case's."""
    monkeypatch.setattr("storm.worker.GRACE", 0.2)

    def case(draw, place):
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(100)
            os._exit(0)
        return "fine"

    (result,) = run(case, only=0).results
    assert result.held is False
    assert result.words.startswith("processes were left: ")
    left = int(result.words.removeprefix("processes were left: ").split()[0])
    end = time.monotonic() + 10  # the kernel may take a moment
    while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_kind_that_cannot_be_tried_is_skipped(run):
    """With its reason in the table; counts and broken ones are there, too."""

    def skipped(draw, place):
        raise Skipped("no compiler")

    def counts(draw, place):
        place.count = 25
        if place.folder.parent.name == "one-1":
            raise Broken("it does not hold")
        return "fine"

    made = run(skipped)
    assert "| skipped: no compiler |" in table(made)
    made = run(counts)
    tally = made.tallies["one"]
    assert (tally.tried, tally.broken) == (25 * tally.cases, 1)
    assert f"| {tally.tried:,} " in table(made)


def test_ctrl_c_ends_the_cases_and_keeps_what_ran(tmp_path):
    """All that they have started ends as well."""

    def case(draw, place):
        while place.folder.parent.name != "one-0":
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(5)  # Python loses an exception that a signal raises in a `__del__`: then again
        return "fine"

    def is_interrupted():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        results = []
        made = Storm({"one": kind(case)}, tmp_path, 1, 100, 1, lambda result, folder: results.append(result))
        with pytest.raises(KeyboardInterrupt):
            made.run()
        assert [result.words for result in results] == ["fine"]
        assert "| 1 " in table(made)
        assert (tmp_path / "one-1").is_dir()
        assert psutil.Process().children() == []

    limited(60, is_interrupted)


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_the_program_ends_with_1_for_a_broken_promise(tmp_path, monkeypatch, capsys, holds, code):
    """It keeps the folder of the case and the command that repeats it, and prints the table."""
    from storm import __main__ as program

    def case(draw, place):
        expect(holds, "planted")
        return "fine"

    monkeypatch.setattr(storm, "load_kinds", lambda: {"one": kind(case)})
    monkeypatch.setattr("commands.import_all", lambda preload: None)
    monkeypatch.setattr(program, "_as_commands_have_it", lambda: None)
    arguments = ["--only", "one", "--case", "3", "--seed", "4", "--minutes", "1", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["storm", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert program.main() == code
    finally:
        signal.signal(signal.SIGTERM, before)
    told = capsys.readouterr()
    assert "| one " in told.out
    assert (tmp_path / "4" / "one-3" / "case").exists() == (not holds)
    if not holds:
        again = "bash test.sh --storm --seed 4 --only one --case 3"
        assert "one 3: BROKEN: planted" in told.out
        assert again in told.out
        assert again in (tmp_path / "4" / "broken.txt").read_text()
        assert str(tmp_path / "4" / "broken.txt") in told.err


def test_a_kind_that_is_not_there_is_named(monkeypatch, capsys):
    """Exit code 2, with those that are."""
    from storm import __main__ as program

    monkeypatch.setattr("sys.argv", ["storm", "--only", "kils"])
    assert program.main() == 2
    assert "--only kils: no such kind of case; there are kills, search" in capsys.readouterr().err


def test_the_shim_is_loaded_from_a_path_with_a_blank_too(tmp_path, monkeypatch):
    """LD_PRELOAD would take a blank for the end of a name, and the loader leaves out what it does not find."""
    source = tmp_path / "a clone" / "tests" / "storm" / "shim.c"
    source.parent.mkdir(parents=True)
    source.write_bytes(shim.SOURCE.read_bytes())
    monkeypatch.setattr(shim, "SOURCE", source)
    try:
        preload = shim.environment()["LD_PRELOAD"]
    except Skipped as skipped:
        pytest.skip(str(skipped))
    done = subprocess.run(
        [sys.executable, "-S", "-c", "print(open('/proc/self/maps').read())"],
        env=os.environ | {"LD_PRELOAD": preload},
        capture_output=True,
        text=True,
        check=True,
    )
    assert preload.partition(":")[0] in done.stdout
    assert done.stderr == ""


def test_each_planted_fault_has_its_place():
    """The text that it replaces is in its file once."""
    found = {name: (planted.ROOT / fault.file).read_text().count(fault.right) for name, fault in planted.FAULTS.items()}
    assert found == dict.fromkeys(planted.FAULTS, 1)
