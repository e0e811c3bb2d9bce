"""`deeplightning VERB` under an audit hook, for `command(…, main="watched:main", WATCHED=FILE)`: what it opened for
writing, started, connected to and imported goes to FILE as JSON."""

import json
import os
import sys
from pathlib import Path

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
STARTS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "pty.spawn",
)
CONNECTS = ("socket.connect", "socket.sendto", "urllib.Request")


def main() -> None:
    """Runs the verb in `sys.argv`."""
    seen: list[tuple[str, str]] = []
    there, watching = set(sys.modules), True

    def hook(event: str, arguments: tuple) -> None:
        if not watching:
            return
        opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        if (opens and not isinstance(arguments[0], int)) or event in CHANGES:  # a number: it is open already
            seen.append(("writes", str(arguments[0])))
        elif event in STARTS:
            seen.append(("starts", str(arguments)))
        elif event in CONNECTS:
            seen.append(("connects", str(arguments)))
        elif event == "import":  # also of what is not there, or was removed again
            seen.append(("imports", arguments[0]))

    sys.dont_write_bytecode = True
    sys.addaudithook(hook)
    from deeplightning import cli

    try:
        cli.main()
    finally:
        watching = False
        seen += [("imports", name) for name in sorted(set(sys.modules) - there)]
        seen = [*dict.fromkeys(seen)]
        Path(os.environ["WATCHED"]).write_text(json.dumps(seen))
