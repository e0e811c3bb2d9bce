"""A training comes up against the machine: few open files, small files, little memory, a full disk, a full /tmp, no
home, a clock that jumps, a process that is stopped for a while.

It ends as one that nothing disturbed, or with a note and exit code 3 or 5; then the same command without the limit
resumes, and ends so.
"""

import ctypes
import json
import os
import random
import signal
import time
from pathlib import Path

from storm.ended import end_of, folder_of, names_of, statuses, undisturbed
from storm.place import Place, expect

WHAT = (
    "few open files, small files, little memory, a full disk, a full /tmp, no home or one that cannot be written, "
    "a clock that jumps, SIGSTOP for up to a minute"
)
HOUR = 200
LIMIT = 240

NEW_MOUNTS, PRIVATE = 0x00020000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE
READ_ONLY, REMOUNT = 0x1, 0x20  # MS_RDONLY, MS_REMOUNT
EXPERIMENT = "limits"
SETTINGS = [
    f"logger.params.experiment_name={EXPERIMENT}",
    "logger.log_every_n_steps=1",
    "train.resume_ckpt=auto",
    "train.checkpoint={monitor: val_loss, every_n_steps: 4}",
    "stages=[train,test]",
]
KINDS = ("files", "size", "memory", "disk", "disk", "tmp", "home", "closed home", "clock", "stop")


def case(draw: random.Random, place: Place) -> str:
    """One limit, at one moment."""
    whole = undisturbed(
        place, EXPERIMENT, lambda folder: [place.run("train", place.config(folder=folder), *SETTINGS, cwd=folder)]
    )
    what = draw.choice(KINDS)
    if what in ("disk", "tmp", "closed home") and not _can_mount(place.folder / "probe"):
        place.count = 0
        return f"{what}: not tried, since mounting needs the rights of root"
    after = round(draw.uniform(0, whole.seconds), 2)
    store, config = place.folder / "mlruns", place.config()
    told = f"{what} after {after} s"
    variables: dict[str, str] = {}
    limit = {"what": what, "after": after, "value": 0}
    if what in ("files", "size", "memory", "clock"):
        limit["value"] = {
            "files": draw.randint(0, 12),
            "size": draw.choice([0, 1_000, 20_000, 40_000, 600_000, 800_000]),
            "memory": draw.randint(0, 100) * 10**6,
            "clock": draw.choice([-1, 1]) * draw.randint(60, 10**6),
        }[what]
        told = f"{what} {limit['value']:+,} after {after} s"
        variables = {"LIMIT": json.dumps(limit), "main": "storm.limited:main"}
    elif what == "disk":
        kilobytes = draw.randint(4, 1500)
        _mount(store, kilobytes)
        told = f"a disk of {kilobytes} kB"
    elif what == "tmp":
        _mount(place.folder / "tmp", 4)
        (place.folder / "tmp" / "full").write_bytes(bytes(4096))
        variables = {"TMPDIR": str(place.folder / "tmp")}
        told = "a full /tmp"
    elif what == "home":
        variables = {"HOME": "/proc/nowhere", "XDG_STATE_HOME": ""}
        told = "no home"
    elif what == "closed home":
        home = place.folder / "home"
        _mount(home, 4)
        _mount(home, 4, READ_ONLY | REMOUNT)
        variables = {"HOME": str(home), "XDG_STATE_HOME": ""}
        told = "a home that cannot be written"
    running = place.start("train", config, *SETTINGS, **variables)
    if what == "stop":
        running.ended(after)
        stopped = draw.choice([draw.uniform(0.2, 3), draw.uniform(0.2, 3), 60.0])
        told = f"stopped for {stopped:.1f} s after {after} s"
        for number, pause in ((signal.SIGSTOP, stopped), (signal.SIGCONT, 0)):
            if running.processes():
                running.signal(number)
            time.sleep(pause)
    done = running.end()
    if what == "size":  # what it wrote last is still on its way through a pipe
        time.sleep(0.5)
        done = running.end()
    codes = (
        {0}
        if what in ("tmp", "home", "closed home", "clock", "stop")
        else {0, 3, 5} | ({-6} if what == "memory" else set())
    )
    expect(done.code in codes, f"{told}: it ends with {done.code}", done)
    expect("Traceback" not in done.err, f"{told}: it shows a traceback", done)
    expect(done.code == 0 or "error" in done.err or done.code < 0, f"{told}: it fails without a note", done)
    if what == "disk":
        _mount(store, 100_000, REMOUNT)
    again = place.run("train", config, *SETTINGS)
    expect(again.code == 0, f"{told}: it does not resume", done, again)
    place.run("runs", "--sync", "--tracking-uri", store)
    for run, status in statuses(store, EXPERIMENT).items():  # one that could record nothing of itself stays FAILED
        if run != again.folder.parent.name:
            names = names_of(folder_of(store, run))
            recorded = [name for name in names if name == "cfg.yaml" or name.endswith(".ckpt")]
            expect(status == "FAILED" and not recorded, f"{told}: another run is {status}", names, done, again)
    differs = end_of(store, EXPERIMENT, again.folder.parent.name).differs(whole.end)
    expect(not differs, f"{told}: the end is another: {differs}", done, again)
    return f"{told}: {'held' if done.code == 0 else f'exit code {done.code}, resumed'}"


def _can_mount(folder: Path) -> bool:
    if (child := os.fork()) == 0:
        try:
            _mount(folder, 4)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _mount(folder: Path, kilobytes: int, flags: int = 0) -> None:
    """A disk of its own for a folder, in a namespace of this case: it goes with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir(exist_ok=True)
    if not flags and (libc.unshare(NEW_MOUNTS) or libc.mount(b"none", b"/", None, PRIVATE, None)):
        raise PermissionError(ctypes.get_errno(), "unshare")
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", flags, f"size={kilobytes}k".encode()):
        raise PermissionError(ctypes.get_errno(), "mount")
