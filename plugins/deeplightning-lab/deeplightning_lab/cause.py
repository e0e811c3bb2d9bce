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
from deeplightning_lab.trials import RunLimitReached, Trial, Trials

MAX_NAMED = 5
"""Maximum number of differences that a message lists."""


def listed(items: Sequence[object]) -> str:
    """Join the first few items, and state how many more there are."""
    more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return ", ".join(map(str, items[:MAX_NAMED])) + more


class Bisection:
    """Search for the cause among the differences of two runs."""

    def __init__(
        self,
        parts: Sequence[Parts],
        differences: list[Difference],
        unswitchable: list[str],
        trials: Trials,
        metric: str,
        by: float | None,
        seeds: int,
        recorded: tuple[float, float],
    ):
        self.good, self.bad = parts
        self.differences, self.unswitchable, self.trials, self.metric = differences, unswitchable, trials, metric
        self.by, self.seeds, self.recorded, self.say = by, seeds, recorded, trials.say
        self.sign = 1 if recorded[0] > recorded[1] else -1  # 1: a larger value is better
        self.values: tuple[list[float], list[float]] = ([], [])  # of GOOD and of BAD
        self.threshold = math.nan
        self.smallest = differences  # the smallest set that is known to be bad, and its metric
        self.value = recorded[1]
        self.unresolved = 0
        self.state = "the ends are not checked"
        self.extra: dict[str, Any] = {}

    def run(self) -> None:
        """Check the ends, search, and print the result."""
        self.say(
            f"bisect     {count(len(self.differences), 'difference')}; {self.metric} {self.recorded[0]:.6g} → "
            f"{self.recorded[1]:.6g}; {self.trials.home}"
        )
        for number, difference in enumerate(self.differences, start=1):
            self.say(f"{number:>10} {difference}")
        if self.unswitchable:
            self.say(f"warning: further differences cannot be switched here: {listed(self.unswitchable)}")
        try:
            self._check_ends()
            self.state = "not finished"
            cause = ddmin(self.differences, self._test)
            self.smallest, self.state = cause, "found"
            self._check_without(cause)
        except RunLimitReached:
            if self.state == "found":  # only the counter-check is missing
                self.extra["without"] = None
            else:
                self.say(
                    f"stopped after {count(self.trials.started, 'run')} (--max-runs): {self.state}; the same command "
                    "continues"
                )
        finally:
            self._write()
        if self.state != "the ends are not checked":
            say(printable(self.trials.cfg.redact(self.sentence())))

    def _check_ends(self) -> None:
        """Run both ends with several seeds, and set the threshold between good and bad.

        All n values of one sample exceed those of another from the same distribution with probability 1 / C(2n, n):
        1 in 20 for n = 3.

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
                raise RunError(self._noise_message())
        means = [fmean(values) for values in self.values]
        by = abs(means[0] - means[1]) / 2 if self.by is None else self.by
        self.threshold = means[0] - self.sign * by
        self.value = self.values[1][0]
        if any(map(self._is_bad, self.values[0])) or not all(map(self._is_bad, self.values[1])):
            raise RunError(self._noise_message(f", compared with --by {by:.6g}"))

    def _noise_message(self, compared: str = "") -> str:
        good, bad = (", ".join(f"{value:.6g}" for value in values) for values in self.values)
        found = (
            f"the difference in {self.metric} is noise, as far as {count(len(self.values[0]), 'run')} of each end can "
            f"show{compared}: GOOD gave {good} and BAD gave {bad}; the original runs have {self.recorded[0]:.6g} and "
            f"{self.recorded[1]:.6g}. Nothing was bisected"
        )
        if len(self.values[0]) == 1 and self.unswitchable:
            return f"{found}. Differences that cannot be switched here may explain it: {listed(self.unswitchable)}"
        return f"{found}. Another --metric, more epochs or a larger validation set can show smaller differences"

    def _is_bad(self, value: float) -> bool:
        return self.sign * value <= self.sign * self.threshold

    def _trial(self, switched: Sequence[Difference], name: str, seed: int | None = None) -> Trial:
        before = self.trials.started
        trial = self.trials.run(mix(self.good, self.bad, switched), name, seed)
        record, value = trial.record, trial.value(self.metric)
        shown = f"{self.metric} {value:.6g}" if value is not None else f"unresolved: {trial.reason(self.metric)}"
        if value is not None and not math.isnan(self.threshold):
            shown = f"{'bad' if self._is_bad(value) else 'good'}, {shown}"
        duration = f"{record.get('seconds', 0):.0f} s" if self.trials.started > before else "run before"
        self.say(f"{'run ' + str(record['number']):<10} {name}: {shown} ({duration})")
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

    def _check_without(self, cause: Sequence[Difference]) -> None:
        """Run BAD without the cause, to find out whether something else makes it worse too."""
        rest = [difference for difference in self.differences if difference not in cause]
        name = f"BAD without {listed([difference.name for difference in cause])}" if rest else "GOOD"
        trial = self._trial(rest, name)
        value = trial.value(self.metric)
        self.extra["without"] = value
        if value is not None and self._is_bad(value):
            self.say(
                f"warning: without it BAD still gives {self.metric} {value:.6g}: something else makes it worse too"
            )

    def sentence(self) -> str:
        """Describe the result in one sentence."""
        names = [str(difference) for difference in self.smallest]
        text = f"{' and '.join(names)} together" if len(names) > 1 else names[0]
        if self.state != "found":
            return f"{self.metric}: the cause is among {count(len(names), 'difference')}: {', '.join(names)}"
        text = f"{text}: {self.metric} {self.values[0][0]:.6g} → {self.value:.6g}"
        if [difference.name for difference in self.smallest] == ["seed"]:
            text += " (the seed alone, so the difference is luck)"
        if self.unresolved:
            text += f" ({count(self.unresolved, 'mixture')} could not be run, so a smaller set is not excluded)"
        return text

    def _write(self) -> None:
        """Write the table of all runs and the result into the folder of the bisection."""
        rows = [["run", "outcome", "value", "seed", "differences", "folder"]]
        for trial, name, seed in self.trials.history:
            value, record = trial.value(self.metric), trial.record
            outcome = "unresolved" if value is None else "" if math.isnan(self.threshold) else "bad"
            if outcome == "bad" and value is not None and not self._is_bad(value):
                outcome = "good"
            number, path = "" if value is None else f"{value:.6g}", record.get("folder") or record.get("log") or ""
            rows.append([str(record["number"]), outcome, number, str(seed or ""), name, str(path)])
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(rows)
        result = {
            "metric": self.metric,
            "state": self.state,
            "good": self.values[0],
            "bad": self.values[1],
            "limit": None if math.isnan(self.threshold) else self.threshold,
            "cause": [{"name": d.name, "good": d.good, "bad": d.bad} for d in self.smallest],
            "value": self.value,
            "most_runs": most_tests(len(self.differences)),
            "unresolved": self.unresolved,
            "runs": len({trial.file for trial, _, _ in self.trials.history}),
            "started": self.trials.started,
            "left": self.unswitchable,
            **self.extra,
        }
        redact = self.trials.cfg.redact
        folder = self.trials.parent.folder
        write_whole(folder / "bisect.csv", redact(out.getvalue()))
        write_whole(folder / "bisect.json", redact(json.dumps(result, indent=2)))
