"""A training hits a limit of the machine: few open files, small files, little memory, a full disk, a full /tmp, no
home, a clock that jumps, a process that is stopped for a while.

It ends like an undisturbed run, or with an error and exit code 3 or 5; then the same command without the limit resumes
and reaches the same result.
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
    """Set one limit at one moment."""
    reference = undisturbed(
        place, EXPERIMENT, lambda folder: [place.run("train", place.config(folder=folder), *SETTINGS, cwd=folder)]
    )
    what = draw.choice(KINDS)
    if what in ("disk", "tmp", "closed home") and not _can_mount(place.folder / "probe"):
        place.count = 0
        return f"{what}: not tried, since mounting requires root"
    after = round(draw.uniform(0, reference.seconds), 2)
    store, config = place.folder / "mlruns", place.config()
    message = f"{what} after {after} s"
    variables: dict[str, str] = {}
    limit = {"what": what, "after": after, "value": 0}
    if what in ("files", "size", "memory", "clock"):
        limit["value"] = {
            "files": draw.randint(0, 12),
            "size": draw.choice([0, 1_000, 20_000, 40_000, 600_000, 800_000]),
            "memory": draw.randint(0, 100) * 10**6,
            "clock": draw.choice([-1, 1]) * draw.randint(60, 10**6),
        }[what]
        message = f"{what} {limit['value']:+,} after {after} s"
        variables = {"LIMIT": json.dumps(limit), "main": "storm.limited:main"}
    elif what == "disk":
        kilobytes = draw.randint(4, 1500)
        _mount(store, kilobytes)
        message = f"a disk of {kilobytes} kB"
    elif what == "tmp":
        _mount(place.folder / "tmp", 4)
        (place.folder / "tmp" / "full").write_bytes(bytes(4096))
        variables = {"TMPDIR": str(place.folder / "tmp")}
        message = "a full /tmp"
    elif what == "home":
        variables = {"HOME": "/proc/nowhere", "XDG_STATE_HOME": ""}
        message = "no home"
    elif what == "closed home":
        home = place.folder / "home"
        _mount(home, 4)
        _mount(home, 4, READ_ONLY | REMOUNT)
        variables = {"HOME": str(home), "XDG_STATE_HOME": ""}
        message = "a read-only home"
    running = place.start("train", config, *SETTINGS, **variables)
    if what == "stop":
        running.ended(after)
        stopped = draw.choice([draw.uniform(0.2, 3), draw.uniform(0.2, 3), 60.0])
        message = f"stopped for {stopped:.1f} s after {after} s"
        for number, pause in ((signal.SIGSTOP, stopped), (signal.SIGCONT, 0)):
            if running.processes():
                running.signal(number)
            time.sleep(pause)
    done = running.end()
    if what == "size":  # its last output is still in the pipe
        time.sleep(0.5)
        done = running.end()
    codes = {"memory": (0, 3, 5, -6), "files": (0, 3, 5), "size": (0, 3, 5), "disk": (0, 3, 5)}.get(what, (0,))
    expect(done.code in codes, f"{message}: it ends with {done.code}", done)
    expect("Traceback" not in done.err, f"{message}: it shows a traceback", done)
    expect(done.code == 0 or "error" in done.err or done.code < 0, f"{message}: it fails without an error", done)
    if what == "disk":
        _mount(store, 100_000, REMOUNT)
    again = place.run("train", config, *SETTINGS)
    expect(again.code == 0, f"{message}: it does not resume", done, again)
    place.run("runs", "--sync", "--tracking-uri", store)
    for run, status in statuses(store, EXPERIMENT).items():  # a run that could not write anything stays FAILED
        if run != again.folder.parent.name:
            names = names_of(folder_of(store, run))
            recorded = [name for name in names if name == "cfg.yaml" or name.endswith(".ckpt")]
            expect(status == "FAILED" and not recorded, f"{message}: another run is {status}", names, done, again)
    differs = end_of(store, EXPERIMENT, again.folder.parent.name).differs(reference.end)
    expect(not differs, f"{message}: the result differs: {differs}", done, again)
    return f"{message}: {'held' if done.code == 0 else f'exit code {done.code}, resumed'}"


def _can_mount(folder: Path) -> bool:
    if (child := os.fork()) == 0:
        try:
            _mount(folder, 4)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _mount(folder: Path, kilobytes: int, flags: int = 0) -> None:
    """Mount a small disk at a folder, in a mount namespace that ends with this case."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir(exist_ok=True)
    if not flags and (libc.unshare(NEW_MOUNTS) or libc.mount(b"none", b"/", None, PRIVATE, None)):
        raise PermissionError(ctypes.get_errno(), "unshare")
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", flags, f"size={kilobytes}k".encode()):
        raise PermissionError(ctypes.get_errno(), "mount")
