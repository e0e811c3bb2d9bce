"""Run verbs under an audit hook, for `command("", main="watched:each", WATCHED=FILE, WORDS=LINES)`.

The process runs the verbs of the JSON list LINES one after the other. FILE gets a JSON object for each: exit code,
output, and events (files opened, processes started, connections, imports, environment variables read).
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty")
STARTS += ("os.posix_spawn", "os.spawn", "pty.spawn")
CONNECTS = ("socket.connect", "socket.sendto", "socket.getaddrinfo", "urllib.Request")


def each() -> None:
    """Run each verb of WORDS; record its exit code, its output, and its events."""
    from deeplightning import cli

    done = []
    for words in json.loads(os.environ["WORDS"]):
        sys.argv = ["deeplightning", *words]
        errors, printed, code = io.StringIO(), io.TextIOWrapper(io.BytesIO()), None
        with watching() as seen, contextlib.redirect_stderr(errors), contextlib.redirect_stdout(printed):
            try:
                cli.main()
            except SystemExit as end:
                code = end.code
        printed.flush()
        out = printed.buffer.getvalue().decode()
        done.append({"code": code, "out": out, "err": errors.getvalue(), "seen": [*dict.fromkeys(seen)]})
    Path(os.environ["WATCHED"]).write_text(json.dumps(done))


@contextlib.contextmanager
def watching() -> Iterator[list[tuple[str, str]]]:
    """Yield the list of events in the block, each (kind, what)."""
    seen: list[tuple[str, str]] = []
    before, watching = set(sys.modules), True

    def hook(event: str, arguments: tuple) -> None:
        if not watching:
            return
        opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        if (opens and not isinstance(arguments[0], int)) or event in CHANGES:  # a number is a file descriptor
            seen.append(("writes", str(arguments[0])))
        elif event == "open" and not isinstance(arguments[0], int):
            seen.append(("reads", os.path.abspath(os.fsdecode(arguments[0]))))  # noqa: PTH100
        elif event in STARTS:
            seen.append(("starts", str(arguments)))
        elif event in CONNECTS:
            seen.append(("connects", str(arguments)))
        elif event == "import":  # also a module that is missing or was removed
            seen.append(("imports", arguments[0]))

    kind = type(os.environ)
    get = kind.__getitem__

    def recorded(variables: os._Environ, name: str) -> str:
        seen.append(("variables", os.fsdecode(name)))
        return get(variables, name)

    sys.dont_write_bytecode = True
    sys.addaudithook(hook)
    kind.__getitem__ = recorded
    try:
        yield seen
    finally:
        watching = False
        kind.__getitem__ = get
        seen += [("imports", name) for name in sorted(set(sys.modules) - before)]
