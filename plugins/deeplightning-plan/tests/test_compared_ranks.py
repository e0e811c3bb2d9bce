"""A dry run of several processes compares what each rank builds, logs and exchanges."""

import pytest
from deeplightning_plan.compared_ranks import UNTRIED, Event, Ranks, compare

LOST = "RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:561] Connection closed by peer"
"""Error of a process whose peer has ended."""


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ([("collective", "barrier")], [], None),
        ([("collective", "barrier")], [("collective", "barrier")], None),
        ([("collective", "barrier"), ("end",)], [("collective", "barrier")], None),
        ([("log", "a"), ("log", "b"), ("end",)], [("log", "b"), ("log", "a"), ("end",)], ""),
        ([("collective", "barrier"), ("collective", "barrier")], [("collective", "barrier"), ("end",)],
         "rank 0 enters barrier where rank 1 enters no further collective; a run would hang there."),
        ([("log", "a"), ("end",)], [("end",)], "rank 0 logs `a` and rank 1 does not"),
        ([("error", "E: x")], [("error", "E: x")], "with two processes it fails: E: x"),
        ([("collective", "barrier")], [("error", "E: x")], "rank 1 fails where rank 0 does not: E: x"),
        ([("error", LOST)], [], None),
        ([("error", LOST)], [("error", "E: x")], "rank 1 fails where rank 0 does not: E: x"),
        ([("error", "E: x")], [("error", LOST)], "rank 0 fails where rank 1 does not: E: x"),
        ([("error", LOST)], [("error", "RuntimeError: Broken pipe")], f"rank 0 fails: {LOST}; and rank 1:"),
    ],
)  # fmt: skip
def test_the_first_difference_is_reported_once_it_is_certain(one, other, words):
    """While more events may follow, the result is None; without a difference it is "". A process that only lost its
    connection is not the cause."""
    found = compare([Event(*event) for event in one], [Event(*event) for event in other])
    assert found == words if not words else words in str(found)


def test_processes_that_cannot_compute_gradients_are_untried():
    """After a fork torch refuses to, if the parent has computed gradients; this is no error of the config."""

    def act(rank, report):
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    with Ranks(act) as ranks:
        assert ranks.difference() == (UNTRIED, False)
