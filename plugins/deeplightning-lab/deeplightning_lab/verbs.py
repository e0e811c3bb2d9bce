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
@click.option("--metric", metavar="NAME", help="What is compared; default: the best value of the monitored metric.")
@click.option(
    "--by",
    metavar="NUMBER",
    type=click.FloatRange(min=0, min_open=True),
    help="How much worse than GOOD is bad; default: half of the difference.",
)
@click.option(
    "--seeds",
    metavar="N",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Runs of each end, each with another seed, for the check.",
)
@click.option(
    "--max-runs",
    metavar="N",
    type=click.IntRange(min=1),
    help="Start at most so many runs; the next call continues.",
)
@click.option(
    "--environment",
    metavar="PYTHON",
    help="An interpreter with the packages of one run, where this one has the other's.",
)
@click.option("--any-data", is_flag=True, help="Run also where data files have changed.")
@click.option("--trust", is_flag=True, help="Execute the code of a RUN that you did not make on this machine.")
def bisect(good: str, bad: str, overrides: tuple[str, ...], **options: Any) -> None:
    """Find which differences make the run BAD worse than the run GOOD, by runs of mixtures of both.

    The differences are those of `diff`: keys of the config, files of code, threads, with --environment packages. Both
    ends run again first, each with several seeds; if their difference is noise, that is the answer: exit code 5. Then
    delta debugging chooses mixtures, until no difference can be left out. All runs have one parent; after Ctrl-C
    or a kill the same command continues. As with reproduce, code from elsewhere needs --trust.
    """
    from deeplightning_lab.bisect import bisect as find

    streams.outlive_reader()
    find(good, bad, overrides, say=note, **options)


@click.command()
@click.argument("first", metavar="A", type=PATH)
@click.argument("second", metavar="B", type=PATH)
@click.option("--metric", metavar="NAME", help="The metric to judge; default: the monitored one, of the test.")
@click.option("--by", type=click.FloatRange(0, min_open=True), help="The least difference that matters, such as 0.01.")
@click.option("--format", type=click.Choice(["text", "json"]), default="text", help="The format of the output.")
def compare(first: str, second: str, metric: str | None, by: float | None, format: str) -> None:
    """Judge whether the metrics of runs B are better than those of runs A, or whether it may be luck.

    A and B are what `train --seeds` or `--multirun` made (folder, name or id), a RUN, several of these with commas
    between them, or a choice as of `runs`: name=wide*, experiment=NAME, metric=val_acc, status=finished, with commas
    between them. Each metric has its difference, its 95 % interval by bootstrap (paired by seed where A and B
    share seeds), Hedges' g and the number of further seeds that evidence would take; answers to the same test set are
    compared by sample, classes by McNemar's test. Nothing is run.
    """
    from deeplightning_lab.compared import as_text, side
    from deeplightning_lab.significance import compare as compare_groups

    try:
        found = compare_groups(side(first), side(second), metric, by)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    say(json.dumps(found.to_dict(), indent=2) if format == "json" else as_text(found))
