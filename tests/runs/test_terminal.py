"""Output of `train` on a real terminal of 80 columns."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from shlex import quote

import pytest
from commands import environment, read_terminal

ROOT = Path(__file__).parents[2]
COLUMNS = 80

pytestmark = pytest.mark.slow


def on_a_terminal(*words: str, cwd: Path, **variables: str) -> str:
    """Run `deeplightning` on a terminal; return its output after exit code 0."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    env = {**environment(), "TERM": "xterm", **variables}
    for name in ("COLUMNS", "LINES", *(["NO_COLOR"] if "NO_COLOR" not in variables else [])):
        env.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "deeplightning", *words], cwd=cwd, env=env,
        stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    shown = read_terminal(leader)
    assert process.wait(60) == 0, shown.decode()
    return shown.decode()


def test_a_terminal_shows_ten_lines_a_bar_and_the_epochs(tmp_path):
    """The terminal shows the config's file, the run's page, one wrapped line per epoch and the command to serve it."""
    config = str(ROOT / "configs" / "base.yaml")
    text = on_a_terminal("train", config, "train.num_epochs=2", "data.batch_size=8", cwd=tmp_path)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line.rpartition("\r")[2] for line in plain.replace("\r\n", "\n").split("\n")[:-1]]
    start = next(number for number, line in enumerate(lines) if line.startswith("first loss"))
    assert 8 <= start <= 14, plain
    assert "model:" not in plain
    assert f"config {config}" in " ".join(plain.split())
    page = re.compile(r"  http://127.0.0.1:5001/#/experiments/0/runs/[0-9a-f]{32}")
    assert len([line for line in lines if page.fullmatch(line)]) == 1
    first, second = (number for number, line in enumerate(lines) if re.match(r"epoch \d of 2 ", line))
    value = r"(train|val)_(acc|loss) \d\.\d{4}"
    for number in (first, second):
        assert re.fullmatch(rf"epoch \d of 2(  {value}){{3}}", lines[number]), plain
        assert re.fullmatch(rf" {{11}}{value}  best  \(\d+\.\d s, [\d,]+ samples/s\)", lines[number + 1]), plain
    assert "\x1b[" in text
    assert re.search(r"loss \d\.\d{4}  [\d,]+ samples/s", plain)  # the bar
    run = Path(lines[-1].removeprefix("Artifact storage path: "))
    assert lines[-2] == f"next       bash {quote(str(ROOT / 'deploy.sh'))} {run.relative_to(tmp_path)}"


def test_the_config_is_shown_where_it_is_asked_for(tmp_path):
    """`--show-config` prints the config on a terminal; NO_COLOR turns colours off."""
    words = ("train", "--show-config", str(ROOT / "configs" / "base.yaml"), "train.fast=true", "train.export=false")
    text = on_a_terminal(*words, cwd=tmp_path, NO_COLOR="1")
    assert "total_steps: auto" in text
    assert not re.search(r"\x1b\[[0-9;]*3\d", text)
