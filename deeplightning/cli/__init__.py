"""`deeplightning VERB`: words from the shell become one call; errors become notes and exit codes.

Heavy imports stand inside the verbs, so that `--help` answers at once.
"""

import contextlib
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from deeplightning.cli.completion import complete_config, complete_key, complete_overrides
from deeplightning.faults import FREE_SOME, UserError, count, is_full, no_room
from deeplightning.process import streams
from deeplightning.process.identity import TOLD, own_rank
from deeplightning.version import __version__
from deeplightning.words import first_line

OVERRIDES = "key=value sets, ~key removes, +list=[x] appends; for example model.optimizer.params.lr=0.1"


@dataclass
class Session:
    """What one call of the command knows.

    Attributes:
        redact: takes the secrets of the config that was read out of a message.
    """

    redact: Callable[[str], str] = str


class _Verbs(click.Group):
    """Verbs in the order of a user's journey."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="deeplightning")
def cli() -> None:
    """A YAML file becomes a tracked training run, and the run an HTTP endpoint.

    RUN is a run folder, an MLflow run id, runs:/ID, models:/NAME/VERSION, or last, the newest. Exit codes: 0 done, 2
    config, 3 machine, data or tracking, 4 checkpoint or bundle, 5 the run failed, 130 or 143 interrupted, 1 a fault of
    ours.
    """


_overrides = click.argument("overrides", nargs=-1, metavar="[key=value …]", shell_complete=complete_overrides)
_config = click.argument("config", type=click.Path(path_type=Path), shell_complete=complete_config)
_loose = {"ignore_unknown_options": True}
_allow = click.option(
    "--allow", metavar="ROOT", multiple=True, help="A module to import for a RUN that was not made here; repeatable."
)


def _newest(ctx: click.Context, param: click.Parameter, run: str) -> str:
    """`last` in place of a RUN is the newest one; a folder of that name is `./last`."""
    if run != "last" or ctx.resilient_parsing:
        return run
    from deeplightning.cli.runs import newest

    return newest(None)


_run_argument = click.argument("run", callback=_newest)
_code = click.option(
    "--code", type=click.Choice(["run"]), help="`run`: use the code that RUN has kept, where your own is gone."
)


def _load(config: Path, overrides: tuple[str, ...]) -> Any:
    from deeplightning.checks.examine import load_config

    cfg = load_config(config, list(overrides))
    _session().redact = cfg.redact_message
    return cfg


def _session() -> Session:
    return click.get_current_context().ensure_object(Session)


@cli.command(context_settings=_loose, epilog=OVERRIDES)
@_config
@_overrides
def train(config: Path, overrides: tuple[str, ...]) -> None:
    """Run the stages of CONFIG and export what was trained.

    The last line on stdout is the run's folder.
    """
    from deeplightning.launch import Job, launcher_of

    streams.outlive_reader()
    cfg = _load(config, overrides)
    if (launcher := launcher_of(cfg)) is not None:
        sys.exit(launcher.run(Job(cfg, config.absolute(), overrides)))
    from deeplightning.run.stages import launch

    launch(cfg)


@cli.command(hidden=True)
def worker() -> None:
    """Train as one of the processes of a launcher that sends the config to standard input."""
    from deeplightning.launch.handover import receive

    streams.outlive_reader()
    cfg = receive()
    _session().redact = cfg.redact_message
    from deeplightning.run.stages import work

    sys.exit(work(cfg))


@cli.command(context_settings=_loose, epilog=OVERRIDES)
@_config
@_overrides
def plan(config: Path, overrides: tuple[str, ...]) -> None:
    """Print what `train CONFIG` would start: processes, their environment, commands.

    Nothing is started.
    """
    from deeplightning.checks.explain import show
    from deeplightning.config.tree import dump
    from deeplightning.launch import Job, plan_of

    report = _examine(config, overrides, importing=False)
    cfg = report.checked()
    _say(report)
    show(dump(plan_of(Job(cfg, config.absolute(), overrides))))


@cli.command(context_settings=_loose, epilog=OVERRIDES)
@_config
@_overrides
def tune(config: Path, overrides: tuple[str, ...]) -> None:
    """Search for the best values of what CONFIG's `tune.space` names.

    Each trial is a run. The same command goes on with a search that was interrupted. The last line on stdout is the
    folder with best.yaml, the table of trials and pictures.
    """
    from deeplightning.tune.search import search

    streams.outlive_reader()

    def train_here(words: Sequence[str]) -> int:
        sys.argv[1:] = ["train", *words]  # Lightning starts further processes with these
        return _run()

    search(config, overrides, train_here)


@cli.command(context_settings=_loose, epilog=OVERRIDES)
@_config
@_overrides
@click.option("--import", "importing", is_flag=True, help="Import what CONFIG names; settles what its source cannot.")
@click.option(
    "--dry-run", is_flag=True, help="Also pass one made-up batch through training and validation, on the CPU."
)
@click.option("--format", type=click.Choice(["text", "json"]), default="text", help="What is said on stdout.")
def check(config: Path, overrides: tuple[str, ...], importing: bool, dry_run: bool, format: str) -> None:
    """Report every fault of CONFIG, or print it whole.

    Nothing is run, and without options nothing is imported.
    """
    from deeplightning.checks.explain import show
    from deeplightning.config.tree import dump

    with _stdout_for_the_result():
        report = _examine(config, overrides, importing)
        if dry_run and not importing and not report.faults:
            report = _examine(config, overrides, importing=True)
        if dry_run and not report.faults:
            from deeplightning.dry_run.trial import dry_run as try_out

            gc.enable()
            faults, report.unchecked = try_out(report.config)
            report.add(*faults)
    if format == "json":
        click.echo(json.dumps(report.to_dict(), indent=2))
        sys.exit(report.exit_code)
    cfg = report.checked()
    _say(report)
    show(dump(cfg.public()))


@cli.command(context_settings=_loose, epilog=OVERRIDES)
@_config
@click.argument("words", nargs=-1, metavar="[KEY …] [key=value …]", shell_complete=complete_key)
def explain(config: Path, words: tuple[str, ...]) -> None:
    """Print the complete config that CONFIG means on this machine, with who set each value.

    For a KEY: its value, type and meaning, who set it, and what that replaced.
    """
    from deeplightning.checks import explain as of

    keys: list[str] = [word for word in words if "=" not in word and not word.startswith(("~", "+"))]
    report = _examine(config, tuple(word for word in words if word not in keys), importing=False)
    report.checked()
    for key in keys or [""]:
        of.show(of.explain(report, key))


def _examine(config: Path, overrides: tuple[str, ...], importing: bool) -> Any:
    from deeplightning.checks.examine import examine

    gc.disable()  # what source files become is thrown away in the end; to look through it costs 0.04 CPU seconds
    report = examine(config, list(overrides), importing=importing)
    _session().redact = report.redact
    return report


@contextlib.contextmanager
def _stdout_for_the_result() -> Iterator[None]:
    """What imported code prints goes to stderr, also what it writes past Python: stdout is for the result alone."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _say(report: Any) -> None:
    """What a report holds beside faults, on stderr."""
    redact = _session().redact
    for notice in report.notices:
        click.echo(f"{'warning: ' if notice.unasked else ''}{redact(notice.text)}", err=True)
    for fault in report.at_start:
        click.echo(f"warning: {redact(str(fault))}", err=True)
    for fault in report.unchecked:
        click.echo(f"unchecked: {redact(str(fault))}", err=True)


@cli.command(context_settings=_loose, epilog=OVERRIDES)
@_config
@_overrides
def stats(config: Path, overrides: tuple[str, ...]) -> None:
    """Print what CONFIG's training set is like, as YAML.

    Its number of samples, how many each class has, and the mean and std of its pictures to normalise by. No network is
    built.
    """
    from deeplightning.cli.stats import statistics

    with _stdout_for_the_result():
        text = statistics(_load(config, overrides))
    click.echo(text, nl=False)


@cli.command()
def schema() -> None:
    """Print the JSON Schema of a config, for editors that complete and check YAML."""
    from deeplightning.checks.json_schema import json_schema

    click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@cli.command(context_settings=_loose, epilog=OVERRIDES)
@_run_argument
@_overrides
@_allow
@_code
def test(run: str, overrides: tuple[str, ...], allow: tuple[str, ...], code: str | None) -> None:
    """Test the best weights of RUN, into the same run; of a run that was not made here, into a new one."""
    from deeplightning.run.stages import evaluate

    streams.outlive_reader()
    evaluate(_folder(run, code, allow), "test", list(overrides), allow)


@cli.command()
@_run_argument
@click.argument("images", metavar="[IMAGE|FOLDER]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--out", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="A .csv or .jsonl file.")
@_allow
@_code
def predict(run: str, images: tuple[Path, ...], out: Path | None, allow: tuple[str, ...], code: str | None) -> None:
    """Say what RUN's network sees in pictures, as CSV; of a FOLDER in those that lie in it, at any depth.

    With --out into a file: CSV, or JSON lines, as its ending says. Pictures that cannot be read are named at the end,
    with exit code 3. Without pictures, in RUN's test set: a row per sample in predictions.csv.
    """
    if out is not None and not images:
        raise click.UsageError("--out goes with pictures or folders; the test set's rows go to predictions.csv")
    if not images:
        from deeplightning.run.stages import evaluate

        streams.outlive_reader()
        evaluate(_folder(run, code, allow), "predict", [], allow)
        return
    from deeplightning.run.predict import FORMATS, predict_files

    if out is not None and out.suffix.lower() not in FORMATS:
        raise click.UsageError(f"--out {out}: the ending says the format: .csv, or .jsonl for JSON lines")
    answered = predict_files(_folder(run, code, allow), images, out, allow)
    if out is not None:
        click.echo(f"{count(answered, 'picture')} in {out}", err=True)


@cli.command()
@_run_argument
@_allow
@_code
def export(run: str, allow: tuple[str, ...], code: str | None) -> None:
    """Write the bundle of RUN that the server answers from."""
    from deeplightning.run.finished import export_run

    streams.outlive_reader()
    click.echo(export_run(_folder(run, code, allow), allow))


@cli.command(context_settings=_loose, epilog="serve.KEY=VALUE sets a key of the server; for example serve.max_batch=32")
@_run_argument
@click.argument("overrides", nargs=-1, metavar="[serve.key=value …]")
@click.option("--host", help="Address to listen on; default: serve.host of the run's config.")
@click.option("--port", help="Port to listen on; default: serve.port of the run's config.")
@click.option("--device", help="auto, cpu, cuda or cuda:N; default: serve.device of the run's config.")
@click.option("--precision", help="fp32, int8 or fp16; default: serve.precision of the run's config.")
@_allow
def serve(run: str, overrides: tuple[str, ...], allow: tuple[str, ...], **options: str | None) -> None:
    """Answer HTTP from RUN, or from the folder of a bundle.

    Where there is no bundle, one is exported first; a network that ONNX cannot express is answered by torch.
    """
    from deeplightning.cli.deploy import command
    from deeplightning.config.tree import line, scalar

    environment = dict(os.environ)  # of what is imported for an export, nothing reaches the server
    given = [f"serve.{name}={line(scalar(value))}" for name, value in options.items() if value is not None]
    program = command(run, [*overrides, *given], allow)
    os.execve(program[0], program, environment)


@cli.command(context_settings=_loose, epilog=OVERRIDES)
@_run_argument
@_overrides
@click.option("--any-data", is_flag=True, help="Run it also where data files have changed.")
@click.option("--trust", is_flag=True, help="Execute the code of a RUN that you did not make on this machine.")
def reproduce(run: str, overrides: tuple[str, ...], any_data: bool, trust: bool) -> None:
    """Run RUN once more, from what it left, and compare.

    Config and kept code are put into a clean folder and run there; the code is named before. That of a run that you did
    not make on this machine is named and not executed without --trust: exit code 4. Exit code 0 if metrics,
    results and weights are the same, 5 with the first difference if not, 3 if a data file has changed.
    """
    from deeplightning.reproduce.again import reproduce as run_again

    streams.outlive_reader()
    again = run_again(run, overrides, any_data=any_data, trust=trust, say=lambda text: click.echo(text, err=True))
    click.echo(f"reproduced: the same weights and results in {again.path}", err=True)


@cli.command()
@click.argument("first", metavar="RUN", callback=_newest)
@click.argument("second", metavar="RUN", callback=_newest)
@click.option("--patch", is_flag=True, help="Show what differs in files of code line by line.")
@click.option("--format", type=click.Choice(["text", "json"]), default="text", help="What is said on stdout.")
@click.option("--exit-code", is_flag=True, help="End with 1 if there are differences; else that is no fault.")
def diff(first: str, second: str, patch: bool, format: str, exit_code: bool) -> None:
    """Show where two runs differ: config, code, data, environment, hardware and metrics.

    Nothing is printed of what is the same. What cannot be the same twice, such as times, ids and folders, is no
    difference.
    """
    from deeplightning.reproduce.differences import as_text, differences
    from deeplightning.reproduce.past import past_run

    found = differences(past_run(first), past_run(second), patch)
    if format == "json":
        named = {g: [{"name": n, "first": a, "second": b} for n, a, b in items] for g, items in found.items()}
        click.echo(json.dumps(named, indent=2))
    elif text := as_text(found):
        click.echo(text)
    if exit_code and any(found.values()):
        sys.exit(1)


_STATUS = click.Choice(["running", "finished", "failed", "killed", "pruned"], case_sensitive=False)


@cli.command()
@click.option("--tracking-uri", help="The store; default: MLFLOW_TRACKING_URI, else mlruns.")
@click.option("--status", multiple=True, type=_STATUS, help="Only runs that ended so, or are running; repeatable.")
@click.option("--unfinished", is_flag=True, help="Only runs that failed or were killed.")
@click.option("--metric", metavar="NAME[>NUMBER]", help="Only runs with this metric, or where it compares so.")
@click.option("--name", metavar="TEXT", help="Only runs with this in their name or experiment; * is anything.")
@click.option("--experiment", metavar="NAME", help="Only runs of the experiment of this name.")
@click.option("--last", is_flag=True, help="Only the folder of the newest of them.")
@click.option("--clean", is_flag=True, help="Show which of them would be removed: unfinished ones, or of --status.")
@click.option("--delete", is_flag=True, help="With --clean: remove them, and their files.")
@click.option("--sync", is_flag=True, help="Write what killed runs and dead servers have left unwritten.")
def runs(
    tracking_uri: str | None,
    status: tuple[str, ...],
    unfinished: bool,
    metric: str | None,
    name: str | None,
    experiment: str | None,
    last: bool,
    clean: bool,
    delete: bool,
    sync: bool,
) -> None:
    """List runs, the newest first; remove those that are not wanted.

    A line has id, status, start (UTC), experiment, name, result and folder. A trial that its search has given up is
    PRUNED, which is an end as good as any: --clean alone leaves it. Running ones are never removed, and nothing
    is without --delete; files only of runs that this store keeps on this machine. A run whose process was killed on
    this machine is written as FAILED first, or shown as DEAD where the store cannot be written. With --sync nothing is
    listed: the journals of runs that ended before their store had all of their points are written into it, those of
    other machines too once they were silent for a day.

    --last prints the folder of the newest run and nothing else: exit code 4 if there is none. Wherever a verb takes a
    RUN, the word `last` stands for the newest one.
    """
    from deeplightning.cli import runs as of

    statuses = [word.upper() for word in status] + [*of.UNFINISHED] * (unfinished or (clean and not status))
    if delete and not clean:
        raise click.UsageError("--delete goes with --clean; --clean alone shows what would be removed")
    if last and (clean or sync):
        raise click.UsageError("--last goes with neither --clean nor --sync; it prints one folder")
    if clean and "RUNNING" in statuses:
        raise click.UsageError("a running run is never removed; end it first")

    if sync:
        line = ""
        for line in of.sync(tracking_uri):
            click.echo(line)
        if not line:
            click.echo("nothing was left unwritten")
        return
    for line in of.settled(tracking_uri):
        click.echo(line, err=True)
    try:
        if last:
            from deeplightning.tracking import resolve_run

            run = of.newest(tracking_uri, statuses, metric, name, experiment)
            click.echo(resolve_run(run, tracking_uri))
            return
        rows = of.listing(tracking_uri, statuses, metric, name, experiment)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    for row in rows:
        click.echo("  ".join(row.values()))
    if clean and not delete:
        click.echo(f"{len(rows)} runs and their files would be removed; --delete does it", err=True)
    if delete:
        gone = of.remove(tracking_uri, rows, statuses, lambda text: click.echo(text, err=True))
        click.echo(f"{len(gone)} runs deleted", err=True)


def _folder(run: str, code: str | None = None, allow: tuple[str, ...] = ()) -> Any:
    from deeplightning.runfolder import RunFolder
    from deeplightning.tracking import resolve_run

    folder = RunFolder(resolve_run(run, None))
    if code == "run":
        from deeplightning.run.finished import use_code

        use_code(folder, allow)
    return folder


def main() -> None:
    """The command's entry: runs a verb and ends the process with its exit code."""
    streams.prepare()
    # Threads that wait must not spin; read when torch is imported. Two spinning OpenMP threads beside a busy neighbour
    # ran 9 to 23 times slower than one (November 2026).
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    try:
        if any(name in os.environ for name in TOLD):  # perhaps one of several processes
            from deeplightning.process import supervisor

            supervisor.follow()
        code = _run()
    except KeyboardInterrupt:
        code = _interrupted()
    streams.release()
    sys.exit(code)


def _run() -> int:
    session = Session()
    try:
        cli.main(standalone_mode=False, prog_name="deeplightning", obj=session)
        sys.stdout.flush()  # here a reader that has gone is noticed in time
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        return _interrupted()
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning ends with 1 where it is interrupted
            return _interrupted()
        return error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        if streams.heard and getattr(error, "exit_code", None) is None:  # a library made an error of its own of it
            return _interrupted()
        return _report(error, session.redact)
    return 0


def _interrupted() -> int:
    if streams.heard:
        print("error: interrupted by SIGTERM", file=sys.stderr)
        return streams.TERMINATED_CODE
    print("interrupted", file=sys.stderr)
    return 130


def _report(error: BaseException, redact: Callable[[str], str] = str) -> int:
    """Shows an error as notes, with a traceback only where it is ours; returns the exit code.

    Of several processes one shows the first cause, and all end with its exit code.
    """
    from deeplightning.config.target import needs
    from deeplightning.engine.gpus import unusable
    from deeplightning.process import supervisor

    code = getattr(error, "exit_code", None)
    notes = [str(fault) for fault in error.faults] if isinstance(error, UserError) else [str(error)]
    if code is None and type(error).__name__ == "OutOfMemoryError":
        first = first_line(error).rstrip(".")
        remedy = "A smaller data.batch_size helps, so do engine.precision=bf16 and engine.activation_checkpointing"
        code, notes = 5, [f"the device has no memory left: {first}. {remedy}"]
    if code is None and (note := unusable(error)) is not None:
        code, notes = 3, [note]
    if code is None and isinstance(error, OSError) and is_full(error):
        where = Path(os.fsdecode(error.filename)).absolute().parent if error.filename else Path.cwd()
        code, notes = 3, [f"the disk is full: {error}. {no_room(where)}; {FREE_SOME}"]
    if code is None and (lacks := needs(error)) is not None:
        code, notes = 3, [f"the run {lacks}"]
    rank, place = f" [rank {own_rank()}]" if own_rank() else "", ""
    if (group := supervisor.here()) is not None:
        reason = supervisor.reason_of(error) if code is None else "; ".join(notes)
        cause, is_ours_to_tell = group.verdict(error, reason, 1 if code is None else code)
        if not is_ours_to_tell:
            return cause.exit_code
        rank, place = f" [{cause.whose}]" if cause.whose else "", f"{supervisor.place_of(error)}: "
        if isinstance(error, supervisor.RankError) or cause.rank != group.rank or supervisor.is_lost(error):
            code, notes = cause.exit_code, [cause.reason + (group.kept() if cause.lost else "")]
    if code is None or os.environ.get("DEEPLIGHTNING_DEBUG") == "1":
        print(redact("".join(traceback.format_exception(error))), file=sys.stderr)
    word = ("\x1b[31merror\x1b[0m" if sys.stderr.isatty() else "error") + rank
    if code is None:
        print(
            f"{word}: {place}a fault of Deep Lightning or of your own code; the lines above say where", file=sys.stderr
        )
        return 1
    for note in notes:
        print(f"{word}: {redact(note)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
