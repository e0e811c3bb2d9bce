"""Plants faults into copies of the code and counts after how many cases the storm finds each.

    .venv/bin/python tests/storm/planted.py [--minutes 3] [--seed 1] [NAME …]

prints a row for each fault. Ends with 0 when all are found, with 1 when one is not, with 2 for an unknown name.
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
    """A fault of the kind that the storm is made for.

    Attributes:
        what: in words.
        file: that it is planted in, below the root.
        right, wrong: a piece of that file, which it has once, and what takes its place.
        kind: of the cases that are to find it.
    """

    what: str
    file: str
    right: str
    wrong: str
    kind: str


FAULTS = {
    "unsynced": Fault(
        "a checkpoint gets its name without an fsync of its content",
        "deeplightning/runfolder.py",
        "            file.flush()\n            os.fsync(file.fileno())\n        temporary.replace(path)",
        "            file.flush()\n        temporary.replace(path)",
        "power",
    ),
    "in-place": Fault(
        "a small file is written in its place, and not beside it and renamed",
        "deeplightning/runfolder.py",
        'temporary = path.with_name(f".{path.name}.{os.getpid()}")\n    try:',
        "temporary = path\n    try:",
        "power",
    ),
    "replayed": Fault(
        "what was left is sent from the start with the time at which it is, whatever of it is in the store",
        "deeplightning/tracking/unsent.py",
        "    delivery.position, delivery.is_leftover = start, True\n",
        "    delivery.position, delivery.is_leftover = 0, True\n"
        "    from deeplightning.tracking import delivery as sent\n"
        "    sent.points_of = lambda line, of=sent.points_of: [p._replace(time=ended) for p in of(line)]\n",
        "kills",
    ),
    "lock": Fault(
        "a run's folder is held without a lock",
        "deeplightning/runfolder.py",
        "            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n        except BlockingIOError:",
        "            pass\n        except BlockingIOError:",
        "together",
    ),
    "digest": Fault(
        "the check sums of a checkpoint are not checked",
        "deeplightning/engine/checkpoint_reading.py",
        "            damaged = archive.testzip()",
        "            damaged = None",
        "mutations",
    ),
    "temporary": Fault(
        "what a process that was killed has left beside its checkpoint is believed",
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
        "a signal is forgotten",
        "deeplightning/callbacks/signals.py",
        "        self._received = number\n",
        "        pass\n",
        "kills",
    ),
    "child": Fault(
        "a process that was started lives on when its parent is gone",
        "deeplightning/process/die_with_parent.py",
        "        forward(signal.SIGTERM)\n",
        "        pass\n",
        "search",
    ),
    "key": Fault(
        "the cache keeps pictures without the way in which they were fitted",
        "deeplightning/data/cache.py",
        "spec.mode, spec.resize, max_pixels, code,",
        "spec.mode, max_pixels, code,",
        "together",
    ),
}


def plant(fault: Fault, copy: Path) -> None:
    """Copies the files of the working tree, and puts the fault in."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    file = copy / fault.file
    text = file.read_text()
    if text.count(fault.right) != 1:
        raise SystemExit(f"error: {fault.file} has {text.count(fault.right)} times, and not once:\n{fault.right}")
    file.write_text(text.replace(fault.right, fault.wrong))


def find(fault: Fault, minutes: float, seed: int) -> tuple[bool, int, int, str]:
    """Whether the storm finds it, after how many cases and things tried, and the first words that it says."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "copy"
        plant(fault, copy)
        command = [sys.executable, "tests/storm", "--only", fault.kind, "--minutes", str(minutes), "--seed", str(seed)]
        done = subprocess.run(
            [*command, "--until-broken"],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
        row = re.search(rf"^\| {fault.kind} .*$", done.stdout, re.MULTILINE)
        if row is None:
            raise SystemExit(f"error: the storm has no table:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        tried, cases, broken = (int(cell.strip().replace(",", "") or 0) for cell in row[0].split("|")[3:6])
        words = re.search(r": BROKEN: (.*)", done.stdout)
        return broken > 0, cases, tried, words[1][:100] if words else ""


def main() -> int:
    words = argparse.ArgumentParser(description="Plants faults, and counts the cases after which the storm finds them.")
    words.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAULTS)}; default: all")
    words.add_argument("--minutes", type=float, default=3.0, help="of the storm for each (default 3)")
    words.add_argument("--seed", type=int, default=1)
    asked = words.parse_args()
    if unknown := [name for name in asked.names if name not in FAULTS]:
        print(f"error: {unknown[0]}: no such fault; there are {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    missed = 0
    print(
        "| planted | kind | found | cases | things tried | what it says |\n| --- | --- | --- | ---: | ---: | --- |",
        flush=True,
    )
    for name in asked.names or FAULTS:
        fault = FAULTS[name]
        found, cases, tried, says = find(fault, asked.minutes, asked.seed)
        missed += not found
        print(f"| {fault.what} | {fault.kind} | {'yes' if found else 'NO'} | {cases} | {tried} | {says} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
