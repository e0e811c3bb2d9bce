"""Plant faults in copies of the code, and count the cases that the storm needs to find each.

    .venv/bin/python tests/storm/planted.py [--minutes 3] [--seed 1] [NAME …]

prints a row for each fault. Exit code 0: all are found. 1: one is not. 2: unknown name.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """A fault that the storm must find.

    Attributes:
        what: description.
        file: path of the file that gets the fault, relative to the root.
        right, wrong: text that occurs once in the file, and its replacement.
        kind: kind of case that must find it.
    """

    what: str
    file: str
    right: str
    wrong: str
    kind: str


FAULTS = {
    "unsynced": Fault(
        "a checkpoint is renamed without an fsync of its content",
        "deeplightning/runfolder.py",
        "            file.flush()\n            os.fsync(file.fileno())\n        temporary.replace(path)",
        "            file.flush()\n        temporary.replace(path)",
        "power",
    ),
    "in-place": Fault(
        "a small file is overwritten instead of written to a temporary file and renamed",
        "deeplightning/runfolder.py",
        'temporary = path.with_name(f".{path.name}.{os.getpid()}")\n    try:',
        "temporary = path\n    try:",
        "power",
    ),
    "replayed": Fault(
        "unsent points are sent from the start of the file, with a new time, even if they are in the store",
        "deeplightning/tracking/unsent.py",
        "    delivery.position, delivery.is_leftover = start, True\n",
        "    delivery.position, delivery.is_leftover = 0, True\n"
        "    from deeplightning.tracking import delivery as sent\n"
        "    sent.points_of = lambda line, of=sent.points_of: [p._replace(time=ended) for p in of(line)]\n",
        "kills",
    ),
    "lock": Fault(
        "a run's folder is used without a lock",
        "deeplightning/runfolder.py",
        "            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n        except BlockingIOError:",
        "            pass\n        except BlockingIOError:",
        "together",
    ),
    "digest": Fault(
        "checksums of a checkpoint are not verified",
        "deeplightning/engine/checkpoint_reading.py",
        "            damaged = archive.testzip()",
        "            damaged = None",
        "mutations",
    ),
    "temporary": Fault(
        "a temporary checkpoint of a killed process is used",
        "deeplightning/runfolder.py",
        "        return last + sorted(kept,",
        '        return list(self.path.glob(".last.ckpt.*")) or last + sorted(kept,',
        "power",
    ),
    "twice": Fault(
        "points are sent twice, with a new time",
        "deeplightning/tracking/delivery.py",
        "        self.params |= batch.params\n",
        "        self.params |= batch.params\n"
        "        again = [p._replace(time=p.time + 1) for p in batch.points]\n"
        "        self.client.log_batch(self.run_id, Batch(points=again))\n",
        "kills",
    ),
    "signal": Fault(
        "a signal is ignored",
        "deeplightning/callbacks/signals.py",
        "        self._received = number\n",
        "        pass\n",
        "kills",
    ),
    "child": Fault(
        "a child process survives its parent",
        "deeplightning/process/die_with_parent.py",
        "        forward(signal.SIGTERM)\n",
        "        pass\n",
        "search",
    ),
    "key": Fault(
        "the cache key lacks the resize mode",
        "deeplightning/data/cache.py",
        "spec.mode, spec.resize, max_pixels, code,",
        "spec.mode, max_pixels, code,",
        "together",
    ),
}


def plant(fault: Fault, copy: Path) -> None:
    """Copy the files of the working tree, and plant the fault."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    file = copy / fault.file
    text = file.read_text()
    if text.count(fault.right) != 1:
        raise SystemExit(f"error: {fault.file} has {text.count(fault.right)} times instead of once:\n{fault.right}")
    file.write_text(text.replace(fault.right, fault.wrong))


def find(fault: Fault, minutes: float, seed: int) -> tuple[bool, int, int, str]:
    """Return whether the storm finds the fault, after how many cases and tries, and its first message."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "copy"
        plant(fault, copy)
        command = [sys.executable, "tests/storm", "--only", fault.kind, "--minutes", str(minutes), "--seed", str(seed)]
        env = os.environ | {"PYTHONPATH": str(copy)}
        done = subprocess.run([*command, "--until-broken"], cwd=copy, env=env, capture_output=True, text=True)
        row = re.search(rf"^\| {fault.kind} .*$", done.stdout, re.MULTILINE)
        if row is None:
            raise SystemExit(f"error: the storm prints no table:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        tried, cases, broken = (int(cell.strip().replace(",", "") or 0) for cell in row[0].split("|")[3:6])
        message = re.search(r": BROKEN: (.*)", done.stdout)
        return broken > 0, cases, tried, message[1][:100] if message else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Plants faults and counts the cases that the storm needs to find them")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAULTS)}; default: all")
    parser.add_argument("--minutes", type=float, default=3.0, help="duration of the storm for each (default 3)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in FAULTS]:
        print(f"error: {unknown[0]}: no such fault; there are {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    missed = 0
    print("| planted | kind | found | cases | tried | message |\n| --- | --- | --- | ---: | ---: | --- |", flush=True)
    for name in args.names or FAULTS:
        fault = FAULTS[name]
        found, cases, tried, message = find(fault, args.minutes, args.seed)
        missed += not found
        cells = [fault.what, fault.kind, "yes" if found else "NO", cases, tried, message]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
