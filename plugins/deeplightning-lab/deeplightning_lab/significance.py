"""Compare two groups of runs, and state in two sentences whether their difference is significant.

The seeds of a group are a sample of all seeds: they show how other trainings would differ. The test samples are a
sample of all data: they show how the same runs would do on another test set. Both are reported; the seeds decide if
both sides have at least two runs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from deeplightning.config.metric_check import mode_by_name, own_name
from deeplightning.config.schema import Mode
from deeplightning.faults import CheckpointError, count, nearest
from deeplightning.process.terminal import number
from deeplightning_lab import evidence
from deeplightning_lab.evidence import Interval
from deeplightning_lab.groups import Group, SampleScores

COMMON_METRICS = ("test_acc", "best val_acc", "val_acc", "test_loss", "best val_loss", "val_loss", "train_loss")
"""Metrics to judge if neither `--metric` nor the configs name one, in this order."""

State = Literal["higher", "lower", "same", "open", "unknown"]


@dataclass
class Row:
    """Comparison of one metric.

    Attributes:
        metric: its name.
        mode: whether a lower or a higher value is better; None: unknown.
        a, b: the means; each seed counts once.
        runs_a, runs_b: the numbers of runs; each seed counts once.
        a_low, a_high, b_low, b_high: 95 % t intervals of the means; NaN where there is one run.
        difference: B minus A, over the pairs if the runs are paired.
        low, high: its 95 % bootstrap interval; NaN where it is unknown.
        pairs: pairs of runs with the same seed; 0: the runs are not paired.
        g: Hedges' g; None: unknown, or there is no spread.
        state: `higher` or `lower`: B is, and the interval excludes 0; `same`: the interval lies within ± `by`; `open`:
            the interval contains 0; `unknown`: there are too few runs, or they have no spread.
        more: further seeds per side that a power of 0.8 needs; None: none, or too many.
    """

    metric: str
    mode: Mode | None
    a: float
    b: float
    runs_a: int
    runs_b: int
    a_low: float
    a_high: float
    b_low: float
    b_high: float
    difference: float
    low: float = math.nan
    high: float = math.nan
    pairs: int = 0
    g: float | None = None
    state: State = "unknown"
    more: int | None = None


@dataclass
class Samples:
    """Comparison by sample on the same test set.

    Attributes:
        score: name of the score of each sample.
        mode: whether a lower or a higher score is better.
        samples: the number of samples.
        a, b: the means over samples and runs.
        difference: B minus A.
        low, high: its 95 % interval by bootstrap over the samples; NaN if each pair has its own test set.
        only_a, only_b, p: McNemar's exact test, for one run on each side; None for several.
        significant: for several runs, the number of pairs with the same seed and a p of McNemar's test below 0.05;
            None for one.
        pairs: the number of pairs.
    """

    score: str
    mode: Mode
    samples: int
    a: float
    b: float
    difference: float
    low: float
    high: float
    only_a: int | None = None
    only_b: int | None = None
    p: float | None = None
    significant: int | None = None
    pairs: int = 0

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass
class Comparison:
    """Comparison of two groups of runs.

    Attributes:
        a, b: descriptions of the groups.
        judged: the metric that the sentences are about.
        by: the smallest difference that matters; None: any.
        rows: one for each metric that both have.
        samples: None unless both have scores on the same test set.
        sentences: the conclusion.
        notes: caveats.
    """

    a: str
    b: str
    judged: str
    by: float | None
    rows: list[Row]
    samples: Samples | None
    sentences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON; unknown values are None."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            if isinstance(value, list):
                return [plain(item) for item in value]
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return plain(asdict(self))  # type: ignore[no-any-return]


def compare(a: Group, b: Group, metric: str | None = None, by: float | None = None) -> Comparison:
    """Compare two groups in every metric that both have, and draw a conclusion from one.

    Args:
        a: the baseline runs.
        b: the runs to compare with it.
        metric: the metric for the conclusion; None: the monitored one, of the test if there is one, else a common one.
        by: the smallest difference that matters, above 0; None: any.

    Raises:
        CheckpointError: they share no metric.
        ValueError: one group lacks this metric.
    """
    shared = [name for name in a.metrics if a.values(name) and b.values(name)]
    if not shared:
        raise CheckpointError(f"{a.name} and {b.name} share no metric: {_metric_names(a)} and {_metric_names(b)}")
    if metric is not None and metric not in shared:
        names = ", ".join(shared)
        raise ValueError(f"--metric {metric}: both sides have {names}.{nearest(metric, shared)}")
    judged = metric or _metric_to_judge(a, b, shared)
    rows = [_compare_metric(a, b, name, by) for name in shared]
    row = next(row for row in rows if row.metric == judged)
    samples, why = _compare_samples(a, b)
    found = Comparison(a.description, b.description, judged, by, rows, samples)
    found.sentences = [*_sentences(row, by, samples)]
    found.notes += [f"{side}: {note}" for side, group in (("A", a), ("B", b)) for note in group.notes]
    found.notes += _missing_value_notes(a, b, judged)
    if why and (row.state == "unknown" or "not tested on the same" in why):
        found.notes.append(why)
    if {m.run.folder.path for m in a.members} & {m.run.folder.path for m in b.members}:
        found.notes.append("A and B share runs: a comparison of a run with itself shows nothing")
    return found


def _metric_names(group: Group) -> str:
    return ", ".join(group.metrics[:5]) or "nothing"


def _metric_to_judge(a: Group, b: Group, shared: list[str]) -> str:
    """Return the metric to judge: the monitored one (on the test set, its best value, or itself), or a common one."""
    for group in (a, b):
        monitor = group.members[0].run.config.get("train.checkpoint.monitor")
        if isinstance(monitor, str):
            for name in (f"test_{own_name(monitor)}", f"best {monitor}", monitor):
                if name in shared:
                    return name
    return next((name for name in COMMON_METRICS if name in shared), shared[0])


def _mode(metric: str, *groups: Group) -> Mode | None:
    """Return whether a lower or a higher value is better, by the monitor in the config, else by the name."""
    own = own_name(metric.removeprefix("best "))
    for group in groups:
        config = group.members[0].run.config
        monitor, mode = (config.get(f"train.checkpoint.{key}") for key in ("monitor", "mode"))
        if isinstance(monitor, str) and own_name(monitor) == own and mode in ("min", "max"):
            return mode
    return mode_by_name(own)


def _compare_metric(a: Group, b: Group, metric: str, by: float | None) -> Row:
    values_a, values_b = a.values(metric), b.values(metric)
    one, two = np.array([*values_a.values()]), np.array([*values_b.values()])
    mean_a, mean_b = evidence.mean_interval(one), evidence.mean_interval(two)
    row = Row(
        metric,
        _mode(metric, a, b),
        *(mean_a.center, mean_b.center, len(one), len(two)),
        *(mean_a.low, mean_a.high, mean_b.low, mean_b.high),
        mean_b.center - mean_a.center,
    )
    pairs = [key for key in values_a if key in values_b]
    is_paired = len(pairs) >= 2 and 2 * len(pairs) >= min(len(one), len(two))
    if is_paired:
        one, two = (np.array([values[key] for key in pairs]) for values in (values_a, values_b))
        row.pairs, row.difference = len(pairs), float((two - one).mean())
    if min(len(one), len(two)) < 2:
        return row
    row.g = evidence.hedges_g(one, two)
    if is_paired:
        interval, effect = evidence.paired_interval(two - one), evidence.paired_effect(two - one)
    else:
        interval, effect = evidence.unpaired_interval(one, two), row.g
    if effect is None or _is_rounding(interval, one, two):  # no spread: the interval would be a point
        return row
    row.low, row.high = interval.low, interval.high
    row.state = _state(interval, by)
    if row.state == "open":
        shifted = two - two.mean() + one.mean() + (row.difference if by is None else by)
        target = evidence.paired_effect(shifted - one) if is_paired else evidence.hedges_g(one, shifted)
        needed = evidence.runs_needed(target or 0.0, is_paired)
        row.more = max(1, needed - min(len(one), len(two))) if needed is not None else None
    return row


def _is_rounding(interval: Interval, one: np.ndarray, two: np.ndarray) -> bool:
    """Return whether the spread consists of rounding errors only."""
    return interval.high - interval.low <= 1e-12 * max(np.abs(one).max(), np.abs(two).max())


def _state(interval: Interval, by: float | None) -> State:
    if by is not None and -by < interval.low and interval.high < by:
        return "same"
    if interval.excludes_zero:
        return "higher" if interval.low > 0 else "lower"
    return "open"


def _missing_value_notes(a: Group, b: Group, metric: str) -> list[str]:
    """Return notes on runs without a finite value: a run that diverged is a result too."""
    notes = []
    for side, group in (("A", a), ("B", b)):
        lacking = sum(not math.isfinite(member.metrics.get(metric, math.nan)) for member in group.members)
        if lacking:
            notes.append(f"{side}: {lacking} of {len(group.members)} runs have no finite {metric} and are left out")
    return notes


def _compare_samples(a: Group, b: Group) -> tuple[Samples | None, str]:
    """Return the comparison by test sample, or the reason why there is none."""
    sides = [{m.key: m.sample_scores for m in group.members} for group in (a, b)]
    found = [{key: each for key, each in side.items() if each is not None} for side in sides]
    if not all(found):
        return None, "both sides need a test_predictions.csv whose samples can be compared"
    sets = {(each.digest, each.score) for side in found for each in side.values()}
    if len(sets) > 1:  # data split by the seed: each pair of runs may have its own test set
        pairs = [key for key in found[0] if key in found[1]]
        found = [{key: side[key] for key in pairs} for side in found]
        one, two = found
        if not pairs or any((one[key].digest, one[key].score) != (two[key].digest, two[key].score) for key in pairs):
            return None, "the runs were not tested on the same samples; their metrics are from different test sets"
    one, two = found
    first = next(iter(one.values()))
    if len(sets) == 1 or len(one) == 1:
        means = [np.mean([each.values for each in side.values()], 0) for side in found]
        interval = evidence.sample_interval(means[1] - means[0])
    else:  # the dependence between samples of several sets is unknown
        means = [np.array([each.values.mean() for each in side.values()]) for side in found]
        interval = Interval(float((means[1] - means[0]).mean()), math.nan, math.nan)
    samples = Samples(
        first.score, first.mode, len(first.values), float(means[0].mean()), float(means[1].mean()), *interval
    )
    if set(np.unique(first.values)) <= {0.0, 1.0}:
        _add_mcnemar(samples, one, two)
    elif not math.isfinite(samples.low):
        return None, ""
    why = "A and B have other seeds; if the seed divides the data, they were not tested on the same samples"
    return samples, why if len(sets) == 1 and one.keys() != two.keys() else ""


def _add_mcnemar(samples: Samples, one: dict[Any, SampleScores], two: dict[Any, SampleScores]) -> None:
    if len(one) == len(two) == 1:
        (first,), (second,) = one.values(), two.values()
        samples.only_a, samples.only_b, samples.p = evidence.mcnemar(first.values == 1, second.values == 1)
        return
    pairs = [key for key in one if key in two]
    tests = [evidence.mcnemar(one[key].values == 1, two[key].values == 1) for key in pairs]
    if tests:
        samples.pairs, samples.significant = len(tests), sum(test.p < 0.05 for test in tests)


# ---- sentences


def _sentences(row: Row, by: float | None, samples: Samples | None) -> list[str]:
    if row.state == "unknown":
        return _sentences_without_interval(row, samples)
    size = max(abs(row.low), abs(row.high))
    how = (
        f"{count(row.pairs, 'pair')} of runs with the same seed" if row.pairs else f"{row.runs_a} and {row.runs_b} runs"
    )
    interval = f"95 % interval {number(row.low, size)} to {number(row.high, size)}, bootstrap over {how}"
    gap = f"{number(abs(row.difference), size)} {'higher' if row.difference > 0 else 'lower'}"
    effect = f"; effect size g = {row.g:.1f}" if row.g is not None else ""
    if row.state == "same":
        assert by is not None
        return [
            f"A and B are the same within {by:g}: {row.metric} of B is {gap} ({interval}).",
            "The evidence is enough: the whole interval is smaller than the difference that matters.",
        ]
    if row.state == "open":
        return [
            f"{_undecided(row)}: {row.metric} of B is {gap}, and the interval contains 0 ({interval}{effect}).",
            f"The evidence is not enough, the difference may be luck: {_seeds_needed(row, by)}",
        ]
    judged = f"{_winner(row)}: {row.metric} of B is {gap} ({interval}{effect})."
    sentence = "The evidence is enough: chance alone gives such an interval in fewer than 5 of 100 comparisons"
    if by is not None and min(abs(row.low), abs(row.high)) < by:
        return [judged, f"{sentence}; whether the difference is at least {by:g} is open."]
    return [judged, f"{sentence}."]


def _winner(row: Row) -> str:
    if row.mode is None:
        return f"B is {row.state} than A"
    is_better = (row.difference > 0) == (row.mode == "max")
    return "B is better than A" if is_better else "A is better than B"


def _undecided(row: Row) -> str:
    return "Whether A and B differ is open" if row.mode is None else "Whether A or B is better is open"


def _seeds_needed(row: Row, by: float | None) -> str:
    if row.more is None:
        return f"{evidence.MAX_RUNS:,} seeds for each would not show a difference as small as this one."
    size = f"of {by:g}" if by is not None else "as large as this one"
    return f"a difference {size} takes about {count(row.more, 'more seed')} for each of A and B (power 0.8)."


def _sentences_without_interval(row: Row, samples: Samples | None) -> list[str]:
    """Return sentences for runs without a spread, or for a single run on a side."""
    size = abs(row.difference) or None
    gap = f"{row.metric} is {number(row.a, size)} in A and {number(row.b, size)} in B"
    if row.pairs or min(row.runs_a, row.runs_b) >= 2:
        if row.difference == 0:
            first = f"A and B have the same {row.metric} ({number(row.a)}) with every seed."
        else:
            first = f"{gap}, with the same difference for every seed: without a spread there is no interval."
        return [first, "The seeds give no evidence: runs that do not differ say nothing about other seeds."]
    sides = [side for side, runs in (("A", row.runs_a), ("B", row.runs_b)) if runs < 2]
    seeds = "A and B have one seed each" if len(sides) == 2 else f"{sides[0]} has one seed"
    first = f"{_undecided(row)}: {gap}, but {seeds}, and another seed may reverse the order."
    remedy = "train both with `--seeds 5` and compare again."
    if samples is None:
        return [first, f"One run does not show the spread between seeds: {remedy}"]
    return [first, f"{_samples_clause(samples)}; this is about these networks, not about other seeds: {remedy}"]


def _samples_clause(samples: Samples) -> str:
    """Describe the comparison by test sample, without a full stop."""
    if not math.isfinite(samples.low):
        pairs = f"{samples.significant} of {count(samples.pairs, 'pair')} of runs, each with its own test set"
        return f"By test sample, McNemar's p is below 0.05 in {pairs} of {samples.samples:,} test samples"
    size = max(abs(samples.low), abs(samples.high))
    interval = f"{number(samples.low, size)} to {number(samples.high, size)}"
    gap = f"{samples.score[0].upper()}{samples.score[1:]} of B is {number(abs(samples.difference), size)}"
    gap += f" {'higher' if samples.difference > 0 else 'lower'} on the {samples.samples:,} test samples"
    test = ""
    if samples.p is not None:
        test = f"; only A answers {samples.only_a} of them correctly and only B {samples.only_b}, McNemar's p = "
        test += f"{samples.p:.2g}"
    elif samples.significant is not None:
        test = f"; McNemar's p is below 0.05 in {samples.significant} of {count(samples.pairs, 'pair')} of runs"
    verdict = "more than" if samples.excludes_zero else "no more than"
    return f"{gap} (95 % interval {interval}{test}), {verdict} the choice of the test samples explains"


def samples_sentence(samples: Samples) -> str:
    """Return the sentence about the comparison by test sample."""
    return f"{_samples_clause(samples)}."
