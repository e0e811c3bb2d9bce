"""A run that is killed at any instant, and started again by the same command, ends bit for bit like one that was not.

An instant is one of the run's events: before or after a batch, inside the writing of a checkpoint, before or after a
file is synced, renamed or linked, before or after points go to the tracker. A first run counts them. Instants that a
seed draws, among them moments in time, are tried by `storm/kinds/kills.py`.
The network has dropout, the data are shuffled, augmented and read by workers, gradients are accumulated, epochs end
before the data do, the rate warms up, the schedule has an `auto` length, the best two checkpoints are kept, and the
run ends early.
"""

import pytest
from conftest import OWN
from killing import KILLS, SETTINGS, WRITING
from storm.ended import end_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with own code."""
    path = tmp_path_factory.mktemp("kills")
    (path / "own.py").write_text(OWN)
    (path / "kills.py").write_text(KILLS)
    return path


@pytest.fixture(scope="module")
def start(command, tiny, folder):
    """`start(experiment, processes, …)` starts the run; `kill` says who dies at which event."""

    def started(experiment, processes, kill="-:0", **variables):
        named = [f"logger.params.experiment_name={experiment}", f"engine.processes={processes}"]
        words = (*SETTINGS, f"data.batch_size={16 // processes}", *named)
        told = {"KILL": kill, "EVENTS": str(folder / experiment)} | variables
        return command.start("train", tiny, *words, cwd=folder, ranks=processes, **told)

    return started


@pytest.fixture(scope="module")
def whole(start, store, folder):
    """`whole(processes)` is the end of an uninterrupted run, and the events of each rank."""
    known = {}

    def run(processes):
        if processes not in known:
            start(f"whole-{processes}", processes).end(code=0)
            paths = [folder / f"whole-{processes}.{rank}" for rank in range(processes)]
            known[processes] = end_of(store, f"whole-{processes}"), [path.read_text().splitlines() for path in paths]
        return known[processes]

    return run


def test_an_uninterrupted_run_is_what_is_to_be_shown(whole):
    """It stops early, keeps two of the best, and has every kind of event."""
    end, (events,) = whole(1)
    assert (end.status, len(end.weights)) == ("FINISHED", 3)
    assert (len(end.series["val_loss"]), len(end.series["test_acc"])) == (2, 1)
    assert {*WRITING, "after fsync", "before link", "after append", "after deliver"} <= set(events)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), pytest.param("SIGINT", 130, marks=pytest.mark.slow)])
def test_a_signal_while_a_run_is_opened_is_no_fault_of_the_store(start, whole, name, code):
    """The exit code is the signal's, and the note names it."""
    _, (events,) = whole(1)
    number = events.index("before append") + 1
    ended = start(f"opened-{code}", 1, f"0:{number}", HOW=name).end()
    assert (ended.code, "cannot be used" in ended.err) == (code, False), ended
    assert f"interrupted by {name}" in ended.err


def assert_ends_like_whole(start, store, whole, processes, kills, name):
    """Kills a run at each of some instants, starts it again each time, and compares its end.

    An instant is a pair: who dies (ranks as digits), and a fraction of the events of the first of them.
    """
    expected, events = whole(processes)
    told = []
    for victims, fraction in kills:
        own = events[int(victims[0])]
        number = max(1, round(fraction * len(own)))
        ended = start(name, processes, f"{victims}:{number}").end()
        assert ended.code != 0, ended
        told.append(own[number - 1])
    done = start(name, processes).end(code=0)
    assert end_of(store, name) == expected, (told, done)
    assert any(line.startswith("resumes") for line in done.out.splitlines())


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([("0", 0.5)], id="in the middle"),
        pytest.param([("0", 0.97)], id="at its end", marks=pytest.mark.slow),
        pytest.param([("0", 0.4), ("0", 0.3), ("0", 0.25)], id="again and again", marks=pytest.mark.slow),
        pytest.param([("01", 0.45)], id="both of two", marks=pytest.mark.slow),
        pytest.param([("1", 0.45)], id="one of two", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_like_one_that_was_not(kills, start, store, whole):
    """Weights, points, the best and their files; one run in the tracker, FINISHED."""
    name = f"killed-{kills[0][0]}-{len(kills)}-{kills[0][1]}"
    assert_ends_like_whole(start, store, whole, 1 + ("1" in kills[0][0]), kills, name)


@pytest.mark.slow
def test_a_run_killed_as_it_begins_is_none(start, store, whole):
    """Once when its first line is written, once while its config is: in the end there is one run."""
    _, (events,) = whole(1)
    created = events.index("after append") + 1
    places = [created, events.index("before replace", created) + 1]
    kills = [("0", place / len(events)) for place in places]
    assert_ends_like_whole(start, store, whole, 1, kills, "begins")
