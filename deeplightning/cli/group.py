"""The group of the command's verbs, and the code that several verbs share: arguments, the config, notices."""

import contextlib
import functools
import os
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from deeplightning.cli.exit_codes import Session
from deeplightning.faults import PLUGINS, SetupError, nearest, not_installed
from deeplightning.process import garbage
from deeplightning.process.terminal import say
from deeplightning.version import __version__

if TYPE_CHECKING:
    from deeplightning.config.report import Report
    from deeplightning.runfolder import RunFolder

Verb = TypeVar("Verb", bound=Callable[..., object])

OVERRIDES = "key=value sets, ~key removes, +list=[x] appends; for example model.optimizer.params.lr=0.1"

PLUGIN_VERBS = {
    verb: plugin for plugin, names in PLUGINS.items() for verb in names if verb.isidentifier() and verb.islower()
}


class Verbs(click.Group):
    """Verbs in the order in which users need them: those that take a CONFIG, then those that take a RUN, which are
    imported on demand. Verbs of installed packages are searched only for an unknown name, so `--help` does not pay for
    the search.

    Attributes:
        import_rest: imports the module that adds the other verbs.
    """

    import_rest: Callable[[], object] = staticmethod(lambda: None)

    def list_commands(self, ctx: click.Context) -> list[str]:
        self.import_rest()
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands:
            self.import_rest()
        if cmd_name in self.commands:  # installed packages cannot replace it
            return self.commands[cmd_name]
        from deeplightning.config.plugins import VERBS, load

        found = load(VERBS, cmd_name)
        if found is not None and not isinstance(found, click.Command):
            raise click.ClickException(f"the verb {cmd_name} of an installed package is not a click.Command: {found!r}")
        if found is None and not ctx.resilient_parsing:
            if cmd_name in PLUGIN_VERBS:
                raise SetupError(not_installed(PLUGIN_VERBS[cmd_name]))
            ctx.fail(f"No such command '{cmd_name}'.{nearest(cmd_name, [*self.commands, *PLUGIN_VERBS])}")
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each verb with its complete first sentence, which click would truncate."""
        verbs = ((name, self.commands[name]) for name in self.list_commands(ctx))
        rows = [(name, verb.get_short_help_str(1000)) for name, verb in verbs if not verb.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"Verbs of plug-ins: {', '.join(f'{verb} ({plugin})' for verb, plugin in PLUGIN_VERBS.items())}.",
)
@click.version_option(__version__, prog_name="deeplightning")
def cli() -> None:
    """Turn a YAML file into a tracked training run, and the run into an HTTP endpoint.

    RUN is a run folder, a run's name or MLflow id, runs:/ID, models:/NAME/VERSION, or last, the newest. Exit codes: 0
    success, 2 config, 3 machine, data or tracking, 4 checkpoint or bundle, 5 the run failed, 130 or 143 interrupted, 1
    a bug in Deep Lightning.
    """


DEFAULT_CONFIG = "config.yaml"
"""The file in the working directory that a verb reads if the command line names no CONFIG."""


def is_override(word: str) -> bool:
    """Return whether a word is `key=value`, `~key` or `+list=[x]`, not a path such as `~/c.yaml`."""
    return "=" in word.partition("://")[0] or (word.startswith(("~", "+")) and "/" not in word)


LOOSE = {"ignore_unknown_options": True}
MAX_OFFERED_RUNS = 200
"""Maximum number of runs that a shell completes, the newest ones."""


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return completions of RUN: `last`, names of runs in this store, ids of runs that share a name, and folders."""
    from deeplightning.faults import UserError
    from deeplightning.tracking.reader import DatabaseReader
    from deeplightning.tracking.store import locate

    runs = []
    with contextlib.suppress(UserError, OSError, sqlite3.Error):
        if (database := locate(None).database) is not None:
            runs = DatabaseReader(database, 0.2).listing()
    counts = Counter(run.name for run in runs)
    is_word = re.compile(r"[A-Za-z0-9][\w-]*").fullmatch
    names = [r.name if is_word(r.name) and counts[r.name] == 1 else r.id for r in runs[:MAX_OFFERED_RUNS]]
    words = [word for word in ("last", *names) if is_word(word) and word.startswith(incomplete)]
    return [CompletionItem(incomplete, type="dir"), *map(CompletionItem, words)]  # bash drops what precedes folders


PATH = click.Path(readable=False)
"""The type of arguments that may be paths: click does not check them, and a shell completes them."""


def with_config(more: str = "[key=value …]") -> Callable[[Verb], Verb]:
    """Pass `config` and `overrides` to a verb; further config files come first in `overrides`.

    Args:
        more: the arguments after CONFIG, for the help.
    """

    def decorate(verb: Verb) -> Verb:
        @functools.wraps(verb)
        def called(words: tuple[str, ...], configs: tuple[str, ...], **options: object) -> object:
            from deeplightning.config.source import is_file

            rest, files = [*words], [*configs]
            if not files:
                first = rest[0] if rest else ""
                exists = os.path.isfile(first)  # noqa: PTH113  (Path's fails for a long name)
                if os.path.isfile(DEFAULT_CONFIG) and not exists and (not rest or is_override(first)):  # noqa: PTH113
                    files = [DEFAULT_CONFIG]
                elif not rest:
                    raise click.UsageError("Missing argument 'CONFIG'.", click.get_current_context())
                elif first.startswith("-") and not exists:
                    raise click.NoSuchOption(first)
                else:
                    files = [rest.pop(0)]
            for file in files[1:]:
                if not is_file(file):
                    raise click.UsageError(f"--config {file}: a config file must end in .yaml or .yml")
            return verb(config=Path(files[0]), overrides=(*files[1:], *rest), **options)

        argument = click.argument("words", nargs=-1, metavar=f"CONFIG [CONFIG …] {more}", type=PATH)
        option = click.option(
            "--config",
            "configs",
            metavar="CONFIG",
            multiple=True,
            type=PATH,
            help="The config, instead of the first word; repeatable. Each further CONFIG overrides those before it.",
        )
        return cast(Verb, argument(option(called)))

    return decorate


def no_files(ctx: click.Context, param: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the overrides of a run's config; refuse config files among them."""
    from deeplightning.config.source import is_file

    if file := next((word for word in words if is_file(word)), None):
        raise click.UsageError(f"{file}: a config file cannot override that of a run; give its keys as key=value")
    return words


with_overrides = click.argument("overrides", nargs=-1, metavar="[key=value …]", callback=no_files)
with_allow = click.option(
    "--allow", metavar="ROOT", multiple=True, help="A module to import for a RUN that was not made here; repeatable."
)


def newest_run(ctx: click.Context, param: click.Parameter, run: str) -> str:
    """Return `runs:/ID` of the newest run for `last`, and any other RUN unchanged; a folder called last is `./last`."""
    if ctx.resilient_parsing:
        return run
    from deeplightning.process.terminal import escape_warnings

    escape_warnings()
    if run != "last":
        return run
    from deeplightning.cli.listing import newest

    return newest(None)


with_run = click.argument("run", callback=newest_run, shell_complete=complete_run)
with_code = click.option(
    "--code", type=click.Choice(["run"]), help="`run`: use the code that RUN has kept, if yours is gone."
)


def load(config: Path, overrides: tuple[str, ...]) -> Any:
    from deeplightning.config.examine import load_config
    from deeplightning.private.lazy_imports import import_lazily

    import_lazily()
    cfg = load_config(config, list(overrides))
    session().redact = cfg.redact_message
    return cfg


def session() -> Session:
    return click.get_current_context().ensure_object(Session)


def examine_config(config: Path, overrides: tuple[str, ...], importing: bool) -> Any:
    from deeplightning.config.examine import examine

    if importing:
        from deeplightning.private.lazy_imports import import_lazily

        import_lazily()
    report = examine(config, list(overrides), importing=importing)
    garbage.freeze()  # otherwise collecting the parsed source files at exit costs 0.1 of 0.4 CPU seconds
    session().redact = report.redact
    return report


@contextlib.contextmanager
def stdout_for_the_result() -> Iterator[None]:
    """Send the output of imported code, including native code, to stderr: stdout is only for the result."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def show_notices(report: "Report") -> None:
    """Print the notices and unchecked items of a report to stderr."""
    redact = session().redact
    for notice in report.notices:
        say(f"{'warning: ' if notice.unasked else ''}{redact(notice.text)}", err=True)
    for fault in report.unchecked:
        say(f"unchecked: {redact(str(fault))}", err=True)


def folder_of(run: str, code: str | None = None, allow: tuple[str, ...] = ()) -> "RunFolder":
    from deeplightning.private.lazy_imports import import_lazily
    from deeplightning.runfolder import RunFolder
    from deeplightning.tracking import resolve_run

    import_lazily()
    folder = RunFolder(resolve_run(run, None))
    if code == "run":
        from deeplightning.run.load import use_code

        use_code(folder, allow)
    return folder


def absolute(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return the overrides with absolute paths of config files."""
    from deeplightning.config.source import is_file, located

    return tuple(str(located(word).absolute()) if is_file(word) else word for word in overrides)
