"""Complete config files and runs in a shell; click completes verbs and options.

Whatever fails, a shell gets fewer words, never a message.
"""

import re
import sqlite3
from collections import Counter
from pathlib import Path

import click
from click.shell_completion import CompletionItem

_MAX_RUNS = 200  # the newest ones, which are offered


def complete_config(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return YAML files, and folders to look for some in; behind `pkg:` those that ship with Deep Lightning."""
    if incomplete.startswith("pkg:"):
        from deeplightning.config.packages import shipped

        return [CompletionItem(address) for address in shipped() if address.startswith(incomplete)]
    folder, slash, start = incomplete.rpartition("/")
    try:
        names = sorted(entry.name for entry in Path(folder + slash or ".").expanduser().iterdir() if entry.is_file())
    except (OSError, RuntimeError, ValueError):
        return []
    files = [
        CompletionItem(f"{folder}{slash}{name}")
        for name in names
        if name.endswith((".yaml", ".yml")) and name.startswith(start) and (start or not name.startswith("."))
    ]
    return [*files, CompletionItem(incomplete, type="dir")]


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return `last`, the names of runs in the store that is in use here, of runs that share a name their ids, and
    folders."""
    last = CompletionItem("last", help="the newest run")
    items = [item for item in (last, *_runs()) if str(item.value).startswith(incomplete)]
    return [*items, CompletionItem(incomplete, type="dir")]


def _runs() -> list[CompletionItem]:
    from datetime import UTC, datetime

    from deeplightning.faults import UserError
    from deeplightning.tracking.sqlite import recent
    from deeplightning.tracking.store import locate

    try:
        store = locate(None)
        found = recent(store.database, _MAX_RUNS) if store.database is not None else []
    except (UserError, OSError, sqlite3.Error):
        return []
    often = Counter(name for _, name, *_ in found)
    items = []
    for run_id, name, status, started in found:
        begun = datetime.fromtimestamp(started / 1000, UTC).strftime("%Y-%m-%d %H.%M")  # a colon ends a word in zsh
        shown = name if re.fullmatch(r"[A-Za-z0-9][\w-]*", name) and often[name] == 1 else run_id
        items.append(CompletionItem(shown, help=f"{status.lower()}, {begun} UTC"))
    return items
