"""A run that is killed at any instant and restarted with the same command ends bit for bit like an uninterrupted run.

An instant is one of the run's events: before or after a batch, in the middle of writing a checkpoint, before or after a
file is synced, renamed or linked, before or after points are sent to the tracker. An uninterrupted run counts them.
`storm/kinds/kills.py` tries random events and points in time.
The network has dropout, the data are shuffled, augmented and read by workers, gradients are accumulated, epochs end
before the data do, the learning rate warms up, the schedule has an `auto` length, the best two checkpoints are kept,
and the run stops early.
"""

import functools

import pytest
from conftest import OWN
from killing import KILLS, SETTINGS, WRITING
from storm.ended import end_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with user code."""
    path = tmp_path_factory.mktemp("kills")
    (path / "own.py").write_text(OWN)
    (path / "kills.py").write_text(KILLS)
    return path


@pytest.fixture(scope="module")
def start(command, tiny, folder):
    """`start(experiment, processes, …)` starts the run; `kill` is RANKS:EVENT, the ranks to kill and the event."""

    def started(experiment, processes, kill="-:0", **variables):
        named = [f"logger.params.experiment_name={experiment}", f"engine.processes={processes}"]
        overrides = (*SETTINGS, f"data.batch_size={16 // processes}", *named)
        variables |= {"KILL": kill, "EVENTS": str(folder / experiment)}
        return command.start("train", tiny, *overrides, cwd=folder, ranks=processes, **variables)

    return started


@pytest.fixture(scope="module")
def uninterrupted(start, store, folder):
    """`uninterrupted(processes)` returns the end of an uninterrupted run, and the events of each rank."""

    @functools.cache
    def run(processes):
        name = f"uninterrupted-{processes}"
        start(name, processes).end(code=0)
        return end_of(store, name), [(folder / f"{name}.{rank}").read_text().splitlines() for rank in range(processes)]

    return run


def test_an_uninterrupted_run_has_every_kind_of_event(uninterrupted):
    """The run stops early, keeps the two best checkpoints, and has every kind of event."""
    end, (events,) = uninterrupted(1)
    assert (end.status, len(end.weights)) == ("FINISHED", 3)
    assert (len(end.series["val_loss"]), len(end.series["test_acc"])) == (2, 1)
    assert {*WRITING, "after fsync", "before link", "after append", "after deliver"} <= set(events)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), pytest.param("SIGINT", 130, marks=pytest.mark.slow)])
def test_a_signal_while_a_run_is_opened_is_no_fault_of_the_store(start, uninterrupted, name, code):
    """A signal while the run is created sets the exit code, and the message names the signal."""
    _, (events,) = uninterrupted(1)
    number = events.index("before append") + 1
    ended = start(f"opened-{code}", 1, f"0:{number}", HOW=name).end()
    assert (ended.code, "cannot be used" in ended.err) == (code, False), ended
    assert f"interrupted by {name}" in ended.err


def assert_ends_like_uninterrupted(start, store, uninterrupted, processes, kills, name):
    """Kill a run at each of some instants, restart it each time, and compare its end with that of the other run.

    An instant is a pair: the ranks to kill (digits), and a fraction of the events of the first of them.
    """
    expected, events = uninterrupted(processes)
    killed_at = []
    for victims, fraction in kills:
        events_of_rank = events[int(victims[0])]
        number = max(1, round(fraction * len(events_of_rank)))
        ended = start(name, processes, f"{victims}:{number}").end()
        assert ended.code != 0, ended
        killed_at.append(events_of_rank[number - 1])
    done = start(name, processes).end(code=0)
    assert end_of(store, name) == expected, (killed_at, done)
    assert any(line.startswith("resumes") for line in done.out.splitlines())


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([("0", 0.5)], id="in the middle"),
        pytest.param([("0", 0.97)], id="at the end", marks=pytest.mark.slow),
        pytest.param([("0", 0.4), ("0", 0.3), ("0", 0.25)], id="again and again", marks=pytest.mark.slow),
        pytest.param([("01", 0.45)], id="both of two", marks=pytest.mark.slow),
        pytest.param([("1", 0.45)], id="one of two", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_like_one_that_was_not(kills, start, store, uninterrupted):
    """A killed run that restarts ends with the same weights, points and best checkpoints, as one FINISHED run."""
    name = f"killed-{kills[0][0]}-{len(kills)}-{kills[0][1]}"
    assert_ends_like_uninterrupted(start, store, uninterrupted, 1 + ("1" in kills[0][0]), kills, name)


@pytest.mark.slow
def test_a_run_killed_while_it_is_created_leaves_no_second_run(start, store, uninterrupted):
    """A kill after the first line is written, and another while the config is written, leave one run in the end."""
    _, (events,) = uninterrupted(1)
    created = events.index("after append") + 1
    kills = [("0", number / len(events)) for number in (created, events.index("before replace", created) + 1)]
    assert_ends_like_uninterrupted(start, store, uninterrupted, 1, kills, "begins")
