"""The folder that the processes of a launch share on a machine: who comes, who is alive, who leaves it last."""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from deeplightning.process.identity import ATTEMPT, LAUNCH, identity

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]


PREFIX = "deeplightning-ranks-"
OLD = 600.0  # seconds after which a folder without a living process is nobody's


def is_there(folder: Path, rank: int) -> bool:
    """Whether the process of a rank is alive."""
    try:
        return is_alive(int((folder / f"{rank}.pid").read_text()))
    except (OSError, ValueError):
        return False


def shared_folder(environment: Mapping[str, str]) -> Path:
    """The folder of processes that somebody else has started, and that know only the address at which they meet."""
    names = ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", LAUNCH, ATTEMPT]
    names += ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"]
    address = " ".join(environment.get(name, "") for name in names)
    if (found := identity(environment)) is not None and found.by == "MPI":
        address += f" {found.address} {found.port}"
    digest = hashlib.sha256(f"{os.getuid()} {address}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"{PREFIX}{digest}"


def enter(rank: int) -> Path:
    """Comes to the folder of processes that somebody else has started, and makes it where nobody has."""
    folder = shared_folder(os.environ)
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return Path(tempfile.mkdtemp(prefix=PREFIX))  # somebody else's: this process is on its own
        with contextlib.suppress(FileNotFoundError), alone_in(folder):  # else the last of the others has removed it
            if not members(folder):
                for path in folder.iterdir():  # of a launch that was killed whole
                    path.unlink(missing_ok=True)
            (folder / f"{rank}.pid").write_text(str(os.getpid()))
            (folder / f"{os.getpid()}.came").touch()
            return folder


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """While this lasts, no other process comes to the folder or leaves it.

    Raises:
        FileNotFoundError: it is gone.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        if not os.path.samestat(os.fstat(held), folder.stat()):
            raise FileNotFoundError(folder)
        yield
    finally:
        os.close(held)


def members(folder: Path) -> list[int]:
    """The processes of a folder that are alive."""
    found: list[int] = []
    for path in folder.glob("*.pid"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(path.read_text()))
    return [pid for pid in found if is_alive(pid)]


def sweep() -> None:
    """Removes the folders of launches of which every process was killed, so that none could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            old = time.time() - folder.stat().st_mtime > OLD
            if old and folder.stat().st_uid == os.getuid() and not members(folder):
                shutil.rmtree(folder, ignore_errors=True)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):  # one that nobody has waited for yet has ended all the same
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return pid > 0
