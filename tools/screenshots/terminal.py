"""Draw the terminal output as SVG: set-up, `check` and its errors, `explain`, `train` during and after, `runs`.

    bash tools/screenshots.sh FOLDER terminal

The commands run in tmux, a terminal of known size: its screen is captured with colours and drawn by rich, at 80 and
200 columns, and for `train` also without colour (NO_COLOR). Set-up installs from uv's cache into a clone of this clone;
it is skipped if there is no cache.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (80, 200)  # columns
ROWS = 60
TIMEOUT_SECONDS = 600  # for one command
PROMPT = "$ "
EXCLUDED = {"COLUMNS", "DEEPLIGHTNING_PYTHON", "LINES", "MLFLOW_TRACKING_URI", "NO_COLOR", "PYTHONDONTWRITEBYTECODE"}
EXCLUDED |= {"PYTHONPATH", "TERM", "TMUX", "VIRTUAL_ENV"}
"""Variables that the terminal's shell does not inherit from this process."""
SHORT = ["train.num_epochs=4", "data.batch_size=8"]  # takes seconds, and shows some epochs


class Terminal:
    """A tmux session with a shell in it.

    Args:
        columns: width of the terminal.
        folder: working directory of the shell.
        socket: socket of the tmux server to start.
        variables: environment variables of the shell.
    """

    def __init__(self, columns: int, folder: Path, socket: Path, **variables: str):
        self.columns, self.socket = columns, socket
        environment = {
            **{name: value for name, value in os.environ.items() if name not in EXCLUDED},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "ENV": "",
            **variables,
        }
        shell = f"exec env TERM=tmux-256color 'PS1={PROMPT}' bash --norc --noprofile -i"
        size = ["-x", str(columns), "-y", str(ROWS)]
        # A separate server, which has this environment.
        command = ["tmux", "-S", str(socket), "-f", "/dev/null", "new-session", "-d", "-s", "terminal", *size]
        subprocess.run([*command, "-c", str(folder), shell], env=environment, check=True)
        self.wait(lambda screen: screen.rstrip().endswith(PROMPT.strip()))

    def tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-S", str(self.socket), *words], capture_output=True, text=True, check=True)
        return done.stdout

    def screen(self, colour: bool = False) -> str:
        """Return all output so far, with ANSI codes if `colour`."""
        return self.tmux("capture-pane", "-t", "terminal", "-p", "-S", "-", *(["-e"] if colour else [])).rstrip()

    def wait(self, condition: Callable[[str], bool]) -> None:
        """Wait until a condition on the screen holds.

        Raises:
            TimeoutError: it does not hold within `TIMEOUT_SECONDS`.
        """
        end = time.monotonic() + TIMEOUT_SECONDS
        while not condition(screen := self.screen()):
            if time.monotonic() > end:
                raise TimeoutError(f"the terminal still shows:\n{screen}")
            time.sleep(0.1)

    def type(self, command: str) -> None:
        """Clear the screen and start a command."""
        self.tmux("send-keys", "-t", "terminal", "clear", "Enter")
        self.wait(lambda screen: screen.strip() == PROMPT.strip())
        self.tmux("clear-history", "-t", "terminal")
        self.tmux("send-keys", "-t", "terminal", "-l", command)
        self.tmux("send-keys", "-t", "terminal", "Enter")

    def has_ended(self, screen: str) -> bool:
        lines = screen.splitlines()
        return len(lines) > 1 and lines[-1].strip() == PROMPT.strip()

    def run(self, command: str) -> None:
        """Run a command to its end."""
        self.type(command)
        self.wait(self.has_ended)

    def picture(self, file: Path, title: str) -> None:
        """Write the screen as SVG."""
        text = Text.from_ansi(self.screen(colour=True).removesuffix(PROMPT.strip()).rstrip())
        with Path(os.devnull).open("w") as nothing:
            console = Console(
                record=True, width=self.columns, file=nothing, force_terminal=True, color_system="truecolor"
            )
            console.print(text, no_wrap=True, overflow="crop", highlight=False)
            # With a fixed id, an unchanged screen gives an unchanged file.
            console.save_svg(str(file), title=title, unique_id=file.stem)
        print(file)

    def close(self) -> None:
        subprocess.run(["tmux", "-S", str(self.socket), "kill-server"], capture_output=True, check=False)


def commands(terminal: Terminal, out: Path, suffix: str) -> None:
    """Draw the verbs that a new user runs first."""

    def of(name: str) -> Path:
        return out / f"terminal-{name}-{suffix}.svg"

    config = "configs/base.yaml"
    train = f"bash train.sh {' '.join(SHORT)}"
    terminal.type(train)
    terminal.wait(lambda screen: re.search(r"^epoch 3/4 .* [1-9]\d+/", screen, re.MULTILINE) is not None)
    terminal.picture(of("train-bar"), "train.sh, in its third epoch")
    terminal.wait(terminal.has_ended)
    terminal.picture(of("train"), "train.sh")
    if "plain" in suffix:
        return
    terminal.run(f"deeplightning train {config} {SHORT[0]} train.num_epoch=3 data.batch_size=many")
    terminal.picture(of("error"), "train: two mistakes")
    terminal.run(f"deeplightning check {config}")
    terminal.picture(of("check"), "check")
    terminal.run(f"deeplightning explain {config} model.optimizer.params.lr train.gradient_clip.value")
    terminal.picture(of("explain"), "explain")
    terminal.run("deeplightning runs")
    terminal.picture(of("runs"), "runs")
    terminal.run("deeplightning --help")
    terminal.picture(of("help"), "--help")


def set_up(out: Path, folder: Path) -> None:
    """Draw the set-up in a fresh clone, in progress and at its end."""
    cache = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv")
    if not cache.is_dir():
        print(f"skipped the set-up: uv has no cache in {cache}", file=sys.stderr)
        return
    for columns in WIDTHS:
        clone = folder / f"clone{columns}" / "deeplightning"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        terminal = Terminal(columns, clone, folder / f"socket-set-up-{columns}")
        try:
            terminal.type("bash env.sh")
            terminal.wait(lambda screen: "2/3 packages" in screen)
            terminal.picture(out / f"terminal-set-up-way-{columns}.svg", "env.sh, on its way")
            terminal.wait(terminal.has_ended)
            terminal.picture(out / f"terminal-set-up-{columns}.svg", "env.sh")
        finally:
            terminal.close()
            shutil.rmtree(clone.parent)


def main(out: Path) -> int:
    if shutil.which("tmux") is None:
        print(
            "tmux is needed to draw a terminal; install it, for example: apt-get install tmux",
            file=sys.stderr,
        )
        return 3
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as name:
        folder = Path(name)
        clone = folder / "deeplightning"
        # Runs go into a separate clone, which uses the environment of this one.
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        for columns in WIDTHS:
            for suffix, variables in ((f"{columns}", {}), (f"{columns}-plain", {"NO_COLOR": "1"})):
                own = {"DEEPLIGHTNING_PYTHON": sys.executable, "PYTHONPATH": str(clone), **variables}
                terminal = Terminal(columns, clone, folder / f"socket-{suffix}", **own)
                try:
                    commands(terminal, out, suffix)
                finally:
                    terminal.close()
        set_up(out, folder)
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(Path(sys.argv[1]).absolute()))
