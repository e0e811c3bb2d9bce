"""Verbs that take a CONFIG. Heavy imports are inside them, so `--help` answers at once."""

import gc
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from deeplightning.cli.exit_codes import run_verb
from deeplightning.cli.group import (
    LOOSE,
    OVERRIDES,
    absolute,
    cli,
    examine_config,
    load,
    show_notices,
    stdout_for_the_result,
    with_config,
)
from deeplightning.process import streams
from deeplightning.process.identity import own_rank
from deeplightning.process.terminal import say, show


@cli.command()
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
@click.option("--kind", metavar="KIND", required=True, help="The kind of project; see above.")
@click.option("--data", metavar="PATH", type=click.Path(path_type=Path), help="Your data, to be examined.")
@click.option("--target", metavar="COLUMN", help="The column of a table that is predicted.")
@click.option("--ignore", metavar="COLUMN", multiple=True, help="A column of a table to leave out; repeatable.")
@click.option("--classification", "task", flag_value="classification", help="The target of a table holds classes.")
@click.option("--regression", "task", flag_value="regression", help="The target of a table holds numbers.")
def init(
    folder: Path, kind: str, data: Path | None, target: str | None, ignore: tuple[str, ...], task: str | None
) -> None:
    """Start a project in DIR: config.yaml, README.md, .gitignore, and modules of your own if it needs some.

    KIND is images, table, signal, text, segmentation, regression or own. Without --data the project learns from shipped
    data. --data names a folder per class (images, signal), a folder with labels.csv (images), the folders images and
    masks (segmentation), or a table with a header (table, text, regression). Classes, channels, sizes, mean, std and
    columns are filled in, and guesses are printed. Nothing is overwritten.
    """
    from deeplightning.cli.guess import Columns
    from deeplightning.cli.init import init as start_project

    notes, paths = start_project(folder, kind, data, Columns(target, ignore, task))
    for line in notes:
        say(f"guessed    {line}")
    for path in paths:
        say(f"wrote      {path}")
    place = "" if folder.absolute() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    say(f"next       {place}deeplightning train")


@cli.command(context_settings=LOOSE, epilog=OVERRIDES)
@with_config()
@click.option(
    "--multirun", "-m", is_flag=True, help="A run for each combination of values such as lr=0.1,0.01 and seed=range(3)."
)
@click.option(
    "--seeds", type=click.IntRange(1), metavar="N", help="N runs that differ by the seed: mean and 95 % interval."
)
@click.option(
    "--jobs", type=click.IntRange(1), metavar="N", help="Runs of --multirun or --seeds at the same time; default: 1."
)
@click.option("--show-config", is_flag=True, help="Print the whole config first.")
def train(
    config: Path, overrides: tuple[str, ...], multirun: bool, seeds: int | None, jobs: int | None, show_config: bool
) -> None:
    """Run the stages of CONFIG and export what was trained.

    With --seeds, or `train.seeds` in CONFIG, the runs have one parent run, and the same command continues those that
    were interrupted; `compare` compares two such groups.

    Without CONFIG, this and every verb that takes one read config.yaml of the working directory, if it exists. The last
    line on stdout is the run's folder.
    """
    from deeplightning.config.source import located

    if seeds is not None:
        if multirun:
            raise click.UsageError("--seeds cannot be combined with --multirun; use seed=range(5)")
        overrides = (*overrides, f"train.seeds={seeds}")
    if multirun:
        from deeplightning.sweep.multirun import multirun as run_grid

        streams.ignore_closed_stdout()
        options = ["--show-config"] if show_config else []
        run_grid(located(config), overrides, lambda args: train_here([*args, *options]), jobs or 1)
        return
    from deeplightning.config.tree import dump
    from deeplightning.launch import Job, apply_environment, launcher_of

    streams.ignore_closed_stdout()
    cfg = load(config, overrides)
    if show_config and own_rank() == 0:
        show(dump(cfg.public()))
    if (cfg.train.seeds or 1) > 1:
        from deeplightning.sweep.seeds import train_seeds

        train_seeds(cfg, located(config), overrides, train_here, jobs or 1)
        return
    if jobs is not None:
        raise click.UsageError("--jobs requires --multirun or --seeds")
    if (launcher := launcher_of(cfg)) is not None:
        apply_environment(cfg)
        sys.exit(launcher.run(Job(cfg, located(config).absolute(), absolute(overrides))))
    from deeplightning.run.train import launch

    launch(cfg)


def train_here(args: Sequence[str]) -> int:
    """Run `deeplightning train` with these arguments in this process, and return its exit code."""
    sys.argv[1:] = ["train", *args]  # Lightning starts further processes with these
    return run_verb(cli)


@cli.command(context_settings=LOOSE, epilog=OVERRIDES)
@with_config()
@click.option("--import", "importing", is_flag=True, help="Also import what CONFIG names and check it more fully.")
@click.option("--dry-run", is_flag=True, help="Also pass one batch through training and validation, on the CPU.")
@click.option("--format", type=click.Choice(["text", "json"]), default="text", help="The format of the output.")
def check(config: Path, overrides: tuple[str, ...], importing: bool, dry_run: bool, format: str) -> None:
    """Report every error in CONFIG before anything runs.

    Without options nothing is imported. `explain` prints the resolved config; `plan` prints what `train` would start.
    """
    from deeplightning.faults import Fault

    with stdout_for_the_result():
        report = examine_config(config, overrides, importing)
        if dry_run and not importing and not report.blocks_dry_run:
            report = examine_config(config, overrides, importing=True)
        if dry_run and not report.blocks_dry_run:
            from deeplightning.dry_run.try_config import dry_run as try_out

            gc.enable()
            faults, report.unchecked = try_out(report.config)
            report.add(*faults)
    if format == "json":
        if not dry_run:
            message = "errors of constructors and batches; `--dry-run` builds everything and passes a batch"
            report.unchecked.append(Fault(message))
        say(json.dumps(json.loads(json.dumps(report.to_dict()), parse_constant=str), indent=2))
        sys.exit(report.exit_code)
    report.checked()
    show_notices(report)
    more = "" if dry_run else "--dry-run builds everything and passes a batch; "
    say(f"no faults; {more}explain prints the config")


@cli.command(context_settings=LOOSE, epilog=OVERRIDES)
@with_config("[KEY …] [key=value …]")
def explain(config: Path, overrides: tuple[str, ...]) -> None:
    """Print the complete config that CONFIG resolves to on this machine, with the source of each value.

    For a KEY: its value, type, meaning and source.
    """
    from deeplightning.config import explain as of
    from deeplightning.config.source import is_file

    keys = [word for word in overrides if "=" not in word and not word.startswith(("~", "+")) and not is_file(word)]
    report = examine_config(config, tuple(word for word in overrides if word not in keys), importing=False)
    report.checked()
    for key in keys or [""]:
        show(of.explain(report, key), of.TEXT_COLUMN if key else None)


@cli.command()
def schema() -> None:
    """Print the JSON Schema of a config, for editors that complete and check YAML."""
    from deeplightning.config.packages import HOME

    say((HOME / "configs" / "schema.json").read_text(encoding="utf-8").rstrip())


@cli.command()
@click.argument("name", required=False)
def docs(name: str | None) -> None:
    """Print the page NAME of the manual, or the list of all pages."""
    from deeplightning.cli import manual

    say(manual.listing() if name is None else manual.page(name).rstrip("\n"))
