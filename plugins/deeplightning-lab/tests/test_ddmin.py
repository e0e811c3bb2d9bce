"""Delta debugging finds a minimal set of changes, in as many tests as its paper allows."""

import math

from deeplightning_lab.ddmin import Outcome, ddmin, most_tests
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = st.integers(1, 14)
FEW = settings(max_examples=60, deadline=None)


class Counted:
    """A test of sets of numbers, which notes what it was asked.

    Args:
        judge: the outcome of a set.
    """

    def __init__(self, judge):
        self.judge, self.asked = judge, []

    def __call__(self, chosen):
        self.asked.append(tuple(chosen))
        return self.judge(set(chosen))


def holds(cause):
    """Fails where all of a cause are there."""
    return lambda chosen: Outcome.BAD if cause <= chosen else Outcome.GOOD


@st.composite
def sizes_and_causes(draw):
    size = draw(SIZE)
    return size, set(draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)))


@FEW
@given(sizes_and_causes())
def test_the_changes_that_fail_together_are_found_and_no_other(drawn):
    """Whichever and however many they are."""
    size, cause = drawn
    test = Counted(holds(cause))
    assert ddmin(range(size), test) == sorted(cause)
    assert len(test.asked) <= most_tests(size)


@FEW
@given(SIZE, st.randoms(use_true_random=False))
def test_the_result_fails_and_no_change_of_it_can_be_left_out(size, random):
    """For a test whose outcomes have no order at all, unresolved ones among them: each set is tested once, neither all
    changes nor none are, and the number of tests is bounded."""
    outcomes = {}

    def judge(chosen):
        if len(chosen) == size:
            return Outcome.BAD
        return outcomes.setdefault(frozenset(chosen), random.choice(list(Outcome)))

    test = Counted(judge)
    found = ddmin(range(size), test)
    assert found == sorted(set(found))
    assert judge(set(found)) is Outcome.BAD
    assert all(outcomes[frozenset(found) - {one}] is not Outcome.BAD for one in found if len(found) > 1)
    assert len(test.asked) == len(set(test.asked)) <= most_tests(size)
    assert not {(), tuple(range(size))} & set(test.asked)


@FEW
@given(st.integers(2, 60), st.data())
def test_a_single_cause_is_found_by_halving(size, data):
    """In at most two tests for each halving, as the paper has it for this case."""
    cause = data.draw(st.integers(0, size - 1))
    test = Counted(holds({cause}))
    assert ddmin(range(size), test) == [cause]
    assert len(test.asked) <= 2 * math.ceil(math.log2(size))


@FEW
@given(sizes_and_causes(), st.data())
def test_changes_that_need_each_other_are_kept_together(drawn, data):
    """A set with one change of a pair and not the other is unresolved, such as two files that change a name."""
    size, cause = drawn
    one, other = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))

    def judge(chosen):
        return Outcome.UNRESOLVED if (one in chosen) != (other in chosen) else holds(cause)(chosen)

    found = set(ddmin(range(size), Counted(judge)))
    assert cause <= found
    assert (one in found) == (other in found)
