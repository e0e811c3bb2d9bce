"""Find the differences that make a run worse: check both ends, then run `ddmin` over the outcomes of real runs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from deeplightning.faults import RunError, count
from deeplightning.process.terminal import say
from deeplightning.runfolder import write_whole
from deeplightning.words import printable
from deeplightning_lab.bisect_run import Difference, Parts, mix
from deeplightning_lab.ddmin import Outcome, ddmin, most_tests
from deeplightning_lab.trials import Enough, Trial, Trials

MAX_NAMED = 5
"""Most differences that a message names, of those that it counts."""


def listed(words: Sequence[object]) -> str:
    """Join the first few words, and say how many more there are."""
    more = f" and {len(words) - MAX_NAMED} more" if len(words) > MAX_NAMED else ""
    return ", ".join(map(str, words[:MAX_NAMED])) + more


class Bisection:
    """Search the cause among the differences of two runs."""

    def __init__(
        self,
        parts: Sequence[Parts],
        differences: list[Difference],
        left: list[str],
        trials: Trials,
        metric: str,
        by: float | None,
        seeds: int,
        recorded: tuple[float, float],
    ):
        self.good, self.bad = parts
        self.differences, self.left, self.trials, self.metric = differences, left, trials, metric
        self.by, self.seeds, self.recorded, self.say = by, seeds, recorded, trials.say
        self.sign = 1 if recorded[0] > recorded[1] else -1  # 1: a larger value is better
        self.values: tuple[list[float], list[float]] = ([], [])  # of GOOD and of BAD
        self.limit = math.nan
        self.smallest = differences  # the smallest set that is known to be bad, and the metric that it gives
        self.value = recorded[1]
        self.unresolved = 0
        self.state = "the ends are not checked"
        self.more: dict[str, Any] = {}

    def run(self) -> None:
        """Check the ends, search, and print the result."""
        self.say(
            f"bisect     {count(len(self.differences), 'difference')}; {self.metric} {self.recorded[0]:.6g} → "
            f"{self.recorded[1]:.6g}; {self.trials.home}"
        )
        for number, difference in enumerate(self.differences, start=1):
            self.say(f"{number:>10} {difference}")
        if self.left:
            self.say(f"warning: these differ too and cannot be switched here: {listed(self.left)}")
        try:
            self._check_ends()
            self.state = "not finished"
            cause = ddmin(self.differences, self._test)
            self.smallest, self.state = cause, "found"
            self._without(cause)
        except Enough:
            if self.state == "found":  # the answer is known, only its counter-check is missing
                self.more["without"] = None
            else:
                self.say(
                    f"stopped after {count(self.trials.begun, 'run')}, as --max-runs asks: {self.state}; the same "
                    "command continues"
                )
        finally:
            self._write()
        if self.state != "the ends are not checked":
            say(printable(self.trials.cfg.redact(self.sentence())))

    def _check_ends(self) -> None:
        """Run both ends with several seeds, and set the limit between good and bad.

        All n values of one set exceed those of another of the same distribution with probability 1 / C(2n, n): 1 of 20
        for n = 3.

        Raises:
            RunError: the difference is noise, or an end cannot be run again.
        """
        own = [parts.tree.get("seed") for parts in (self.good, self.bad)]
        base = max([seed for seed in own if isinstance(seed, int)], default=0)
        for number in range(self.seeds):
            seed = (base + number) % 2**32 if number else None
            for end, switched in enumerate(([], self.differences)):
                name = ("GOOD", "BAD")[end] + (f" with seed {seed}" if number else "")
                trial = self._trial(switched, name, seed)
                value = trial.value(self.metric)
                if value is None:
                    log = trial.file.with_suffix(".log")
                    raise RunError(f"{name} cannot be run again here: {trial.reason(self.metric)} ({log})")
                self.values[end].append(value)
            worst = min(self.sign * value for value in self.values[0])
            if worst <= max(self.sign * value for value in self.values[1]):
                raise RunError(self._noise())
        means = [fmean(values) for values in self.values]
        by = abs(means[0] - means[1]) / 2 if self.by is None else self.by
        self.limit = means[0] - self.sign * by
        self.value = self.values[1][0]
        if any(map(self._is_bad, self.values[0])) or not all(map(self._is_bad, self.values[1])):
            raise RunError(self._noise(f", compared with --by {by:.6g}"))

    def _noise(self, compared: str = "") -> str:
        good, bad = (", ".join(f"{value:.6g}" for value in values) for values in self.values)
        found = (
            f"the difference in {self.metric} is noise, as far as {count(len(self.values[0]), 'run')} of each end can "
            f"show{compared}: GOOD gave {good} and BAD gave {bad}; recorded are {self.recorded[0]:.6g} and "
            f"{self.recorded[1]:.6g}. Nothing was bisected"
        )
        if len(self.values[0]) == 1 and self.left:
            return f"{found}. What cannot be switched here may explain it: {listed(self.left)}"
        return f"{found}. Another --metric, more epochs or a larger validation set show smaller differences"

    def _is_bad(self, value: float) -> bool:
        return self.sign * value <= self.sign * self.limit

    def _trial(self, switched: Sequence[Difference], name: str, seed: int | None = None) -> Trial:
        begun = self.trials.begun
        trial = self.trials.run(mix(self.good, self.bad, switched), name, seed)
        known, value = trial.known, trial.value(self.metric)
        shown = f"{self.metric} {value:.6g}" if value is not None else f"unresolved: {trial.reason(self.metric)}"
        if value is not None and not math.isnan(self.limit):
            shown = f"{'bad' if self._is_bad(value) else 'good'}, {shown}"
        took = f"{known.get('seconds', 0):.0f} s" if self.trials.begun > begun else "run before"
        self.say(f"{'run ' + str(known['number']):<10} {name}: {shown} ({took})")
        return trial

    def _test(self, switched: list[Difference]) -> Outcome:
        trial = self._trial(switched, listed([difference.name for difference in switched]))
        value = trial.value(self.metric)
        if value is None:
            self.unresolved += 1
            return Outcome.UNRESOLVED
        if not self._is_bad(value):
            return Outcome.GOOD
        self.smallest, self.value = switched, value
        return Outcome.BAD

    def _without(self, cause: Sequence[Difference]) -> None:
        """Run BAD with the cause undone, which shows whether something else makes it worse too."""
        rest = [difference for difference in self.differences if difference not in cause]
        name = f"BAD without {listed([difference.name for difference in cause])}" if rest else "GOOD"
        trial = self._trial(rest, name)
        value = trial.value(self.metric)
        self.more["without"] = value
        if value is not None and self._is_bad(value):
            self.say(
                f"warning: without it BAD still gives {self.metric} {value:.6g}: something else makes it worse as well"
            )

    def sentence(self) -> str:
        """Describe the result in one sentence."""
        words = [str(difference) for difference in self.smallest]
        text = f"{' and '.join(words)} together" if len(words) > 1 else words[0]
        if self.state != "found":
            return f"{self.metric}: the cause is among {count(len(words), 'difference')}: {', '.join(words)}"
        text = f"{text}: {self.metric} {self.values[0][0]:.6g} → {self.value:.6g}"
        if [difference.name for difference in self.smallest] == ["seed"]:
            text += " (the seed alone, so the difference is luck)"
        if self.unresolved:
            text += f" ({count(self.unresolved, 'mixture')} could not be run, so a smaller set is not excluded)"
        return text

    def _write(self) -> None:
        """Write the table of all runs and the result to the folder of the bisection."""
        rows = [["run", "outcome", "value", "seed", "differences", "folder"]]
        for trial, name, seed in self.trials.made:
            value, known = trial.value(self.metric), trial.known
            outcome = "unresolved" if value is None else "" if math.isnan(self.limit) else "bad"
            if outcome == "bad" and value is not None and not self._is_bad(value):
                outcome = "good"
            number, place = "" if value is None else f"{value:.6g}", known.get("folder") or known.get("log") or ""
            rows.append([str(known["number"]), outcome, number, str(seed or ""), name, str(place)])
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(rows)
        result = {
            "metric": self.metric,
            "state": self.state,
            "good": self.values[0],
            "bad": self.values[1],
            "limit": None if math.isnan(self.limit) else self.limit,
            "cause": [{"name": d.name, "good": d.good, "bad": d.bad} for d in self.smallest],
            "value": self.value,
            "most_runs": most_tests(len(self.differences)),
            "unresolved": self.unresolved,
            "runs": len({trial.file for trial, _, _ in self.trials.made}),
            "started": self.trials.begun,
            "left": self.left,
            **self.more,
        }
        redact = self.trials.cfg.redact
        folder = self.trials.parent.folder
        write_whole(folder / "bisect.csv", redact(out.getvalue()))
        write_whole(folder / "bisect.json", redact(json.dumps(result, indent=2)))
