"""Define the verbs `deeplightning bisect` and `deeplightning compare`. Heavy imports are inside the functions."""

import json
from typing import Any

import click

from deeplightning.cli.commands_run import note
from deeplightning.cli.group import LOOSE, OVERRIDES, PATH, newest_run, with_overrides
from deeplightning.process import streams
from deeplightning.process.terminal import say


@click.command(context_settings=LOOSE, epilog=OVERRIDES)
@click.argument("good", metavar="GOOD", callback=newest_run, type=PATH)
@click.argument("bad", metavar="BAD", callback=newest_run, type=PATH)
@with_overrides
@click.option("--metric", metavar="NAME", help="The metric to compare; default: the best value of the monitored one.")
@click.option(
    "--by",
    metavar="NUMBER",
    type=click.FloatRange(min=0, min_open=True),
    help="How much worse than GOOD counts as bad; default: half of the difference.",
)
@click.option(
    "--seeds",
    metavar="N",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Runs of GOOD and of BAD, each with another seed, for the check.",
)
@click.option(
    "--max-runs",
    metavar="N",
    type=click.IntRange(min=1),
    help="Start at most N runs; the same command continues.",
)
@click.option(
    "--environment",
    metavar="PYTHON",
    help="An interpreter with the packages of one run, if this one has those of the other.",
)
@click.option("--any-data", is_flag=True, help="Run even if data files have changed.")
@click.option("--trust", is_flag=True, help="Execute the code of a RUN that you did not make on this machine.")
def bisect(good: str, bad: str, overrides: tuple[str, ...], **options: Any) -> None:
    """Find which differences make the run BAD worse than the run GOOD, by training mixtures of both.

    The differences are those of `diff`: config keys, code files, threads, and with --environment packages. First both
    ends run again, each with several seeds; if their difference is noise, the command ends with exit code 5. Then
    delta debugging chooses mixtures until no difference can be removed. All runs have one parent; after Ctrl-C
    or a kill the same command continues. As for reproduce, code from elsewhere needs --trust.
    """
    from deeplightning_lab.bisect import bisect as find

    streams.ignore_closed_stdout()
    find(good, bad, overrides, say=note, **options)


@click.command()
@click.argument("first", metavar="A", type=PATH)
@click.argument("second", metavar="B", type=PATH)
@click.option("--metric", metavar="NAME", help="The metric to judge; default: the monitored one, of the test.")
@click.option("--by", type=click.FloatRange(0, min_open=True), help="The smallest relevant difference, such as 0.01.")
@click.option("--format", type=click.Choice(["text", "json"]), default="text", help="The format of the output.")
def compare(first: str, second: str, metric: str | None, by: float | None, format: str) -> None:
    """Judge whether the metrics of runs B are better than those of runs A, or whether it may be luck.

    A and B are each a group made by `train --seeds` or `--multirun` (folder, name or id), a RUN, several of these
    separated by commas, or filters as for `runs`, separated by commas: name=wide*, experiment=NAME, metric=val_acc,
    status=finished. For each metric the output has the difference, its 95 % interval by bootstrap (paired by seed if A
    and B share seeds), Hedges' g and the estimated number of further seeds needed. Runs with the same test set are also
    compared by sample, classifiers by McNemar's test. Nothing is trained.
    """
    from deeplightning_lab.compared import as_text, resolve_side
    from deeplightning_lab.significance import compare as compare_groups

    try:
        found = compare_groups(resolve_side(first), resolve_side(second), metric, by)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    say(json.dumps(found.to_dict(), indent=2) if format == "json" else as_text(found))
