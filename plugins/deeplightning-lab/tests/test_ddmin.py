"""Delta debugging finds a minimal set of changes within the bounds of its paper on the number of tests."""

import math

from deeplightning_lab.ddmin import Outcome, ddmin, most_tests
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = st.integers(1, 14)
FEW = settings(max_examples=60, deadline=None)


class Counted:
    """Test function that records the sets it is called with.

    Args:
        judge: returns the outcome of a set.
    """

    def __init__(self, judge):
        self.judge, self.tested = judge, []

    def __call__(self, chosen):
        self.tested.append(tuple(chosen))
        return self.judge(set(chosen))


def holds(cause):
    """Return a test function that fails if all changes of the cause are present."""
    return lambda chosen: Outcome.BAD if cause <= chosen else Outcome.GOOD


@st.composite
def sizes_and_causes(draw):
    size = draw(SIZE)
    return size, set(draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)))


@FEW
@given(sizes_and_causes())
def test_the_changes_that_fail_together_are_found_and_no_other(drawn):
    """ddmin returns exactly the cause, for any number and position of its changes."""
    size, cause = drawn
    test = Counted(holds(cause))
    assert ddmin(range(size), test) == sorted(cause)
    assert len(test.tested) <= most_tests(size)


@FEW
@given(SIZE, st.randoms(use_true_random=False))
def test_the_result_fails_and_no_change_of_it_can_be_left_out(size, random):
    """With arbitrary outcomes, including unresolved ones, the result is minimal; no set is tested twice, the full and
    the empty set never, and the number of tests is bounded."""
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
    assert len(test.tested) == len(set(test.tested)) <= most_tests(size)
    assert not {(), tuple(range(size))} & set(test.tested)


@FEW
@given(st.integers(2, 60), st.data())
def test_a_single_cause_is_found_by_halving(size, data):
    """It takes at most two tests per halving, as the paper proves for this case."""
    cause = data.draw(st.integers(0, size - 1))
    test = Counted(holds({cause}))
    assert ddmin(range(size), test) == [cause]
    assert len(test.tested) <= 2 * math.ceil(math.log2(size))


@FEW
@given(sizes_and_causes(), st.data())
def test_changes_that_need_each_other_are_kept_together(drawn, data):
    """If one change of a pair without the other is unresolved, the result has both or neither."""
    size, cause = drawn
    one, other = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))

    def judge(chosen):
        return Outcome.UNRESOLVED if (one in chosen) != (other in chosen) else holds(cause)(chosen)

    found = set(ddmin(range(size), Counted(judge)))
    assert cause <= found
    assert (one in found) == (other in found)
