"""Verbs that take a RUN. Heavy imports are inside them, so `--help` answers at once."""

import json
import os
import sys
from pathlib import Path

import click

from deeplightning.cli.group import (
    LOOSE,
    OVERRIDES,
    cli,
    complete_run,
    folder_of,
    newest_run,
    no_files,
    with_allow,
    with_code,
    with_overrides,
    with_run,
)
from deeplightning.faults import count
from deeplightning.process import streams
from deeplightning.process.terminal import is_interactive, say, say_path, width
from deeplightning.words import printable


@cli.command(context_settings=LOOSE, epilog=OVERRIDES)
@with_run
@with_overrides
@with_allow
@with_code
def test(run: str, overrides: tuple[str, ...], allow: tuple[str, ...], code: str | None) -> None:
    """Test the best weights of RUN; record the results in it, or in a new run if it still trains or is not yours."""
    from deeplightning.run.train import evaluate

    streams.ignore_closed_stdout()
    evaluate(folder_of(run, code, allow), "test", list(overrides), allow)


@cli.command()
@with_run
@click.argument("files", metavar="[FILE|FOLDER]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--out", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="A .csv or .jsonl file.")
@with_allow
@with_code
def predict(run: str, files: tuple[Path, ...], out: Path | None, allow: tuple[str, ...], code: str | None) -> None:
    """Write the predictions of RUN for files, as CSV; a FOLDER means its files, at any depth.

    RUN takes one of: pictures; tables in .csv, .tsv, .json, .jsonl, .ndjson or .parquet; texts in .txt, one per line,
    .csv, .tsv, .json, .jsonl or .ndjson; arrays and signals in .npy, .csv, .wav or .json. Tables and texts in .csv,
    .tsv, .jsonl and .ndjson may be compressed (.gz, .bz2, .zst). --out writes CSV or JSON lines, depending on its
    extension, and puts masks and pictures into a folder next to it. Unreadable files are listed at the end, with exit
    code 3. Without files, predict uses the test set of RUN and writes a row per sample to predictions.csv.
    """
    if out is not None and not files:
        raise click.UsageError("--out requires files or folders; the test set's rows go to predictions.csv")
    if not files:
        from deeplightning.run.train import evaluate

        streams.ignore_closed_stdout()
        evaluate(folder_of(run, code, allow), "predict", [], allow)
        return
    from deeplightning.run.predict import FORMATS, predict_files

    if out is not None and out.suffix.lower() not in FORMATS:
        raise click.UsageError(f"--out {out}: the extension sets the format: .csv, or .jsonl for JSON lines")
    answered = predict_files(folder_of(run, code, allow), files, out, allow)
    if out is not None:
        say(f"{count(answered, 'answer')} in {out}", err=True)


@cli.command()
@with_run
@with_allow
@with_code
def export(run: str, allow: tuple[str, ...], code: str | None) -> None:
    """Write the bundle of RUN that the server answers from."""
    streams.ignore_closed_stdout()
    folder = folder_of(run, code, allow)
    from deeplightning.run.make_bundle import export_run

    say_path(export_run(folder, allow))


@cli.command(context_settings=LOOSE, epilog="serve.KEY=VALUE sets a key of the server; for example serve.max_batch=32")
@with_run
@click.argument("overrides", nargs=-1, metavar="[serve.key=value …]", callback=no_files)
@click.option("--host", help="Address to listen on; default: serve.host of the run's config.")
@click.option("--port", help="Port to listen on; default: serve.port of the run's config.")
@click.option("--device", help="auto, cpu, cuda or cuda:N; default: serve.device of the run's config.")
@click.option("--precision", help="fp32, int8 or fp16; default: serve.precision of the run's config.")
@with_allow
def serve(run: str, overrides: tuple[str, ...], allow: tuple[str, ...], **options: str | None) -> None:
    """Serve RUN, or the folder of a bundle, over HTTP.

    If there is no bundle, one is exported first; a network that ONNX cannot express runs in torch.
    """
    from deeplightning.cli.deploy import command
    from deeplightning.config.tree import line, scalar

    environment = dict(os.environ)  # from before the export, whose imports may change it
    given = [f"serve.{name}={line(scalar(value))}" for name, value in options.items() if value is not None]
    program = command(run, [*overrides, *given], allow)
    os.execve(program[0], program, environment)


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[FILE …] [--text TEXT …] [--url URL]")
def ask(arguments: tuple[str, ...]) -> None:
    """Ask the running server about FILEs: pictures, .json, .csv or .txt; or about TEXTs.

    --url, or the variable PREDICT_URL, names another server than that of this machine. `ask --help` has more.
    """
    os.execv(sys.executable, [sys.executable, "-P", "-m", "serve.predict", *arguments])


@cli.command()
@click.option("--tracking-uri", help="The store, a folder or a URI; default: MLFLOW_TRACKING_URI, else mlruns.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=5001, show_default=True, help="Port to listen on.")
def monitor(tracking_uri: str | None, host: str, port: int) -> None:
    """Show the runs and their charts in the browser, with MLflow's user interface."""
    from deeplightning.tracking.monitor import monitor as show

    streams.ignore_closed_stdout()
    show(tracking_uri, host, port)


@cli.command(context_settings=LOOSE, epilog=OVERRIDES)
@with_run
@with_overrides
@click.option("--any-data", is_flag=True, help="Run it even if data files have changed.")
@click.option("--trust", is_flag=True, help="Execute the code of a RUN that you did not make on this machine.")
def reproduce(run: str, overrides: tuple[str, ...], any_data: bool, trust: bool) -> None:
    """Run RUN again from its saved files, and compare the results.

    Config and saved code are copied to a clean folder and run there; the code is listed first. The code of a run that
    you did not make on this machine is not executed without --trust: exit code 4. Exit code 0 if metrics, results and
    weights are the same, 5 with the first difference if they are not, 3 if a data file has changed.
    """
    from deeplightning.reproduce.again import reproduce as run_again

    streams.ignore_closed_stdout()
    again = run_again(run, overrides, any_data=any_data, trust=trust, say=note)
    say(f"reproduced: all that was compared is equal in {again.path}", err=True)


@cli.command()
@click.argument("first", metavar="RUN", callback=newest_run, shell_complete=complete_run)
@click.argument("second", metavar="RUN", callback=newest_run, shell_complete=complete_run)
@click.option("--patch", is_flag=True, help="Show differences in code files line by line.")
@click.option("--format", type=click.Choice(["text", "json"]), default="text", help="The format of the output.")
@click.option("--exit-code", is_flag=True, help="Exit with code 1 if there are differences, instead of 0.")
def diff(first: str, second: str, patch: bool, format: str, exit_code: bool) -> None:
    """Print where two runs differ: config, code, data, environment, hardware and metrics.

    Values that are the same, or always differ (times, ids, folders), are not printed. `compare` judges whether a
    difference of metrics is luck; `report` shows a run as a page.
    """
    from deeplightning.reproduce.differences import as_text, differences
    from deeplightning.reproduce.past import past_run

    found = differences(past_run(first), past_run(second), patch)
    if format == "json":
        named = {g: [{"name": n, "first": a, "second": b} for n, a, b in items] for g, items in found.items()}
        say(json.dumps(json.loads(json.dumps(named), parse_constant=str), indent=2))
    elif text := as_text(found):
        say(text)
    if exit_code and any(found.values()):
        sys.exit(1)


def note(line: str) -> None:
    """Print a line to stderr, with line ends inside names escaped."""
    say(printable(line), err=True)


@cli.command()
@with_run
@click.option("--out", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Write only this file.")
def report(run: str, out: Path | None) -> None:
    """Write an HTML page about RUN that needs no network.

    It has curves, pictures of the answers, metrics, mistakes, config and environment. Without --out it is report.html
    in RUN, or in the working directory if RUN was not made on this machine. No code of RUN is executed.
    """
    from deeplightning.config.own_runs import is_own
    from deeplightning.report.facts import facts
    from deeplightning.report.write import report as report_of
    from deeplightning.report.write import write_report, write_run
    from deeplightning.reproduce.past import past_run

    past = past_run(run, remote=False)
    found = facts(past.folder, past.series)
    found.name, found.status = past.name or "", past.status or ""
    if out is None and is_own(found.folder):
        say_path(write_run(found.folder, found))
        return
    path = out or Path(found.folder.report.name)
    write_report(path, report_of(found))
    say_path(path.absolute())


_STATUS = click.Choice(["running", "finished", "failed", "killed", "pruned"], case_sensitive=False)


@cli.command()
@click.option("--tracking-uri", help="The store; default: MLFLOW_TRACKING_URI, else mlruns.")
@click.option("--status", multiple=True, type=_STATUS, help="Only runs with this status; repeatable.")
@click.option("--metric", metavar="NAME", help="Only runs with this metric, which is shown as the result.")
@click.option("--name", metavar="TEXT", help="Only runs with this in their name or experiment; * matches anything.")
@click.option("--experiment", metavar="NAME", help="Only runs of this experiment.")
@click.option("--last", is_flag=True, help="Print only the folder of the newest one.")
@click.option("--clean", is_flag=True, help="Show which runs would be removed: unfinished ones, or those of --status.")
@click.option("--delete", is_flag=True, help="With --clean: remove these runs and their files.")
@click.option("--sync", is_flag=True, help="Send what killed runs left unsent, or what a dead server did not receive.")
def runs(
    tracking_uri: str | None,
    status: tuple[str, ...],
    metric: str | None,
    name: str | None,
    experiment: str | None,
    last: bool,
    clean: bool,
    delete: bool,
    sync: bool,
) -> None:
    """List runs, the newest first; remove unwanted ones.

    A line has id, status, start (UTC), experiment, name, result and folder; a table on a terminal omits columns that do
    not fit. Without --delete nothing is removed. Running runs are never removed, and files only for runs that this
    store keeps on this machine. Trials that a search stopped early are PRUNED; --clean alone does not remove them. A
    run whose process was killed is FAILED. --sync lists nothing: it sends what ended runs left unsent; those of other
    machines must be silent for a day. --last prints the newest run's folder, or exits with code 4 if there is none.
    """
    from deeplightning.cli import listing as of
    from deeplightning.tracking.store import locate
    from deeplightning.tracking.unsent import SILENT_SECONDS, send_leftovers, send_leftovers_quietly

    statuses = [word.upper() for word in status] + [*of.UNFINISHED] * (clean and not status)
    if delete and not clean:
        raise click.UsageError("--delete requires --clean; --clean alone shows what would be removed")
    if last and (clean or sync):
        raise click.UsageError("--last cannot be combined with --clean or --sync; it prints one folder")
    if clean and "RUNNING" in statuses:
        raise click.UsageError("a running run is never removed; end it first")
    if sync:
        line = ""
        for line in send_leftovers(locate(tracking_uri), silent=SILENT_SECONDS):
            say(line)
        if not line:
            say("nothing to send")
        return
    for line in send_leftovers_quietly(locate(tracking_uri)):
        say(line, err=True)
    if last:
        from deeplightning.tracking import resolve_run

        say_path(resolve_run(of.newest(tracking_uri, statuses, metric, name, experiment), tracking_uri))
        return
    rows = of.listing(tracking_uri, statuses, metric, name, experiment)
    for line in of.lines(rows, width() if is_interactive(sys.stdout) else None):
        print(line)  # noqa: T201  (with the style of the header)
    if clean and not delete:
        say(f"{count(len(rows), 'run')} would be removed, with all files; --delete removes them", err=True)
    if delete:
        gone = of.remove(tracking_uri, rows, statuses, note)
        say(f"{count(len(gone), 'run')} deleted", err=True)
