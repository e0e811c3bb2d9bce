"""The folder that the processes of a launch share on a machine: members enter it, check each other, and the last one
removes it."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from deeplightning.process.identity import ATTEMPT, LAUNCH, identity

PREFIX = "deeplightning-ranks-"


def is_rank_alive(folder: Path, rank: int) -> bool:
    """Return whether the process of a rank is alive."""
    try:
        return is_alive(int((folder / f"{rank}.pid").read_text()))
    except (OSError, ValueError):
        return False


def was_lost(folder: Path, rank: int, code: int) -> bool:
    """Return whether a process that exited with `code`, as in `subprocess`, failed. A process killed by a signal after
    it left the launch did not fail: threads of libraries can abort a process while Python exits."""
    return code > 0 or (code < 0 and not (folder / f"{rank}.left").exists())


def shared_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of processes that have only the address of their rendezvous in common."""
    names = ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", LAUNCH, ATTEMPT]
    names += ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"]
    address = " ".join(environment.get(name, "") for name in names)
    if (found := identity(environment)) is not None and found.by == "MPI":
        address += f" {found.address} {found.port}"
    digest = hashlib.sha256(f"{os.getuid()} {address}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"{PREFIX}{digest}"


def enter(rank: int) -> Path:
    """Enter the folder of processes that were started elsewhere; create it if this process is the first."""
    folder = shared_folder(os.environ)
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return Path(tempfile.mkdtemp(prefix=PREFIX))  # owned by somebody else: do not share
        with contextlib.suppress(FileNotFoundError), lock_folder(folder):  # the last process may just have removed it
            if not members(folder):
                for path in folder.iterdir():  # left by a launch whose processes were all killed
                    path.unlink(missing_ok=True)
            (folder / f"{rank}.pid").write_text(str(os.getpid()))
            (folder / f"{os.getpid()}.came").touch()
            return folder


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder, so that no other process enters or leaves it.

    Raises:
        FileNotFoundError: the folder is gone.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        import fcntl  # POSIX only, and every command imports this module

        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise FileNotFoundError(folder)
        yield
    finally:
        os.close(descriptor)


def members(folder: Path) -> list[int]:
    """Return the process ids of a folder's members that are alive."""
    found: list[int] = []
    for path in folder.glob("*.pid"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(path.read_text()))
    return [pid for pid in found if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):  # a zombie has ended too
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return pid > 0
