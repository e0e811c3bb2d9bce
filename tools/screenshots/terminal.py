"""What a terminal shows, as SVG: set-up, `check` and its errors, `explain`, `train` while and after it trains, `runs`.

    bash tools/screenshots.sh FOLDER terminal

The commands run in tmux, which is a terminal of a known size: its screen is read with its colours, and rich draws it.
Each is shown at 80 and 200 columns, `train` without colour (NO_COLOR) too. Set-up installs into a clone of this clone
from uv's cache and is left out where there is none.
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
LONGEST = 600  # seconds that a command may take
PROMPT = "$ "
ALTERED = {"COLUMNS", "DEEPLIGHTNING_PYTHON", "LINES", "MLFLOW_TRACKING_URI", "NO_COLOR", "PYTHONDONTWRITEBYTECODE"}
ALTERED |= {"PYTHONPATH", "TERM", "TMUX", "VIRTUAL_ENV"}
"""Variables of this process that the terminal's shell does not get."""
SHORT = ["train.num_epochs=4", "data.batch_size=8"]  # seconds, and some epochs to look at


class Terminal:
    """A tmux session with a shell in it.

    Args:
        columns: of the terminal.
        folder: working directory of the shell.
        socket: of a tmux server that is not there yet.
        variables: of the shell's environment.
    """

    def __init__(self, columns: int, folder: Path, socket: Path, **variables: str):
        self.columns, self.socket = columns, socket
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ALTERED},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "ENV": "",
            **variables,
        }
        shell = f"exec env TERM=tmux-256color 'PS1={PROMPT}' bash --norc --noprofile -i"
        size = ["-x", str(columns), "-y", str(ROWS)]
        # A server of its own, which has the environment of this call.
        command = ["tmux", "-S", str(socket), "-f", "/dev/null", "new-session", "-d", "-s", "terminal", *size]
        subprocess.run([*command, "-c", str(folder), shell], env=environment, check=True)
        self.wait(lambda screen: screen.rstrip().endswith(PROMPT.strip()))

    def tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-S", str(self.socket), *words], capture_output=True, text=True, check=True)
        return done.stdout

    def screen(self, colour: bool = False) -> str:
        """All that was printed so far, with ANSI codes if `colour`."""
        return self.tmux("capture-pane", "-t", "terminal", "-p", "-S", "-", *(["-e"] if colour else [])).rstrip()

    def wait(self, happened: Callable[[str], bool]) -> None:
        """Waits until the screen is as it should be.

        Raises:
            TimeoutError: it never was.
        """
        end = time.monotonic() + LONGEST
        while not happened(screen := self.screen()):
            if time.monotonic() > end:
                raise TimeoutError(f"the terminal still shows:\n{screen}")
            time.sleep(0.1)

    def type(self, command: str) -> None:
        """Clears the screen and starts a command."""
        self.tmux("send-keys", "-t", "terminal", "clear", "Enter")
        self.wait(lambda screen: screen.strip() == PROMPT.strip())
        self.tmux("clear-history", "-t", "terminal")
        self.tmux("send-keys", "-t", "terminal", "-l", command)
        self.tmux("send-keys", "-t", "terminal", "Enter")

    def has_ended(self, screen: str) -> bool:
        lines = screen.splitlines()
        return len(lines) > 1 and lines[-1].strip() == PROMPT.strip()

    def run(self, command: str) -> None:
        """Runs a command to its end."""
        self.type(command)
        self.wait(self.has_ended)

    def picture(self, file: Path, title: str) -> None:
        """Writes the screen as SVG."""
        text = Text.from_ansi(self.screen(colour=True).removesuffix(PROMPT.strip()).rstrip())
        with Path(os.devnull).open("w") as nothing:
            console = Console(
                record=True, width=self.columns, file=nothing, force_terminal=True, color_system="truecolor"
            )
            console.print(text, no_wrap=True, overflow="crop", highlight=False)
            # A fixed id, or every picture differs from the one before.
            console.save_svg(str(file), title=title, unique_id=file.stem)
        print(file)

    def close(self) -> None:
        subprocess.run(["tmux", "-S", str(self.socket), "kill-server"], capture_output=True, check=False)


def commands(terminal: Terminal, out: Path, suffix: str) -> None:
    """The verbs of a first hour."""

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


def set_up(out: Path, place: Path) -> None:
    """The first start in a fresh clone, at its beginning, on its way and at its end."""
    cache = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv")
    if not cache.is_dir():
        print(f"no picture of the set-up: there is no cache of uv in {cache}", file=sys.stderr)
        return
    for columns in WIDTHS:
        clone = place / f"clone{columns}" / "deeplightning"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        terminal = Terminal(columns, clone, place / f"socket-set-up-{columns}")
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
            "tmux is needed to take pictures of a terminal; install it, for example: apt-get install tmux",
            file=sys.stderr,
        )
        return 3
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as name:
        place = Path(name)
        clone = place / "deeplightning"
        # Runs go into a clone of their own, which uses this one's environment.
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        for columns in WIDTHS:
            for suffix, variables in ((f"{columns}", {}), (f"{columns}-plain", {"NO_COLOR": "1"})):
                own = {"DEEPLIGHTNING_PYTHON": sys.executable, "PYTHONPATH": str(clone), **variables}
                terminal = Terminal(columns, clone, place / f"socket-{suffix}", **own)
                try:
                    commands(terminal, out, suffix)
                finally:
                    terminal.close()
        set_up(out, place)
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(Path(sys.argv[1]).absolute()))
