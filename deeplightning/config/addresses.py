"""A config by address, such as `https://HOST/PATH`, `s3://BUCKET/PATH` or `runs:/ID`, becomes a local file.

What is fetched is kept in `deeplightning/configs` of the user's cache folder, in a folder for its address and its
content; so a command, its processes and its launcher read the same bytes. An address that fails is an error, never
silently the copy of another day.
"""

import hashlib
import os
import posixpath
import re
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from deeplightning.address import shown, whole
from deeplightning.config.target import find
from deeplightning.faults import ConfigError, Fault, SetupError
from deeplightning.own_code import seal
from deeplightning.runfolder import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_BYTES = 1_000_000
"""Of a config."""
TIMEOUT = 20.0
"""Seconds without an answer."""
FRESH = 60.0
"""Seconds in which one process does not fetch an address again: one command reads its config several times."""

_OPEN = (
    "without TLS others can change a config on its way, and it names code that is imported; use https://, or download "
    "it and name the file"
)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NOTE = "address"  # the file beside a copy that holds its address
_fetched: dict[str, tuple[float, Path]] = {}


class _Refused(Exception):
    """An address is wrong, or there is no config at it; the arguments are the address and why."""


def fetch(address: str | os.PathLike[str], key: str | None = None, place: str | None = None) -> Path:
    """Return the local file of a config; for `runs:/ID`, that of the run.

    Args:
        key, place: of the address, for notes.

    Raises:
        ConfigError: the address is wrong, or there is no config at it.
        SetupError: it does not answer, or a library for it is missing.
        CheckpointError: there is no such run.
    """
    complete = whole(address)
    if (kept := Path(seal().get("addresses", {}).get(complete, ""))).is_file():
        return kept
    before = _fetched.get(complete)
    if before is not None and time.monotonic() - before[0] < FRESH and before[1].exists():
        return before[1]
    scheme, _, rest = complete.partition("://")
    if "@" in rest.partition("/")[0]:
        message = "a user name or a password in an address ends up in histories and logs; leave it out"
        hint = "A store such as s3:// takes credentials from its own settings"
        raise ConfigError(Fault(f"{message}. {hint}", key, place or f"{scheme}://…@{rest.partition('@')[2]}"))
    read = {"runs": _of_run, "http": _from_web, "https": _from_web}.get(scheme, _from_store)
    try:
        content = read(complete)
        if len(content) > MAX_BYTES:
            raise _Refused(complete, f"a config has at most {MAX_BYTES // 1000} kB; is this the right file?")
    except _Refused as refused:
        of, why = refused.args
        message = f"{shown(of)}: {why}" if place or of != complete else why
        raise ConfigError(Fault(message, key, place or shown(complete))) from None
    path = _kept(complete, content)
    _fetched[complete] = time.monotonic(), path
    return path


def fetched() -> dict[str, str]:
    """Return the local file of each address that this process has fetched."""
    return {address: str(path) for address, (_, path) in _fetched.items()}


def address_of(path: Path) -> str | None:
    """Return the address, without its query, of a fetched local file, or None."""
    try:
        if path.parent.parent.parent != _cache():
            return None
        return (path.parent / _NOTE).read_text(encoding="utf-8")
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplightning" / "configs"


def _of_run(address: str) -> bytes:
    """Return a copy of the config of a run in the tracking store, outside its folder, which holds no code to import."""
    run_id = address.removeprefix("runs://").strip("/")
    if not run_id or "/" in run_id:
        raise _Refused(address, "the config of a run is runs:/ID")
    resolve_run: Callable[..., Path] = find("deeplightning.tracking.resolve.resolve_run")  # above this layer
    path = resolve_run(f"runs:/{run_id}") / "cfg.yaml"
    try:
        return path.read_bytes()
    except OSError:
        raise _Refused(address, f"this run has no config: {path} is missing") from None


def _from_web(address: str) -> bytes:
    import http.client
    import urllib.error
    import urllib.request

    class Redirects(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> Any:
            if _is_open(newurl):
                fp.close()
                raise _Refused(newurl, _OPEN)
            return super().redirect_request(req, fp, code, msg, headers, newurl)

    try:
        if _is_open(address):
            raise _Refused(address, _OPEN)
        with urllib.request.build_opener(Redirects).open(address, timeout=TIMEOUT) as answer:
            content: bytes = answer.read(MAX_BYTES + 1)
            return content
    except urllib.error.HTTPError as error:
        with error:
            what = f"{error.code} {error.reason}"
            refusal = _Refused(address, f"there is no such config here for you ({what})")
            raise refusal if error.code < 500 else _no_answer(address, what) from None
    except (urllib.error.URLError, http.client.HTTPException, ValueError, OSError) as error:
        raise _no_answer(address, getattr(error, "reason", None) or error) from None


def _is_open(address: str) -> bool:
    """Return whether anybody on the way can change what an address gives."""
    asked = urlsplit(address)
    return asked.scheme != "https" and asked.hostname not in _LOOPBACK


def _from_store(address: str) -> bytes:
    import fsspec

    def read() -> None:
        try:
            with fsspec.open(address, "rb") as file:
                found.append(file.read(MAX_BYTES + 1))
        except Exception as error:
            found.append(error)

    # A store's client waits for minutes, and tries again: botocore five times 60 seconds.
    found: list[bytes | Exception] = []
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(3 * TIMEOUT)
    content = found[0] if found else TimeoutError(f"no answer in {3 * TIMEOUT:.0f} s")
    if isinstance(content, bytes):
        return content
    if isinstance(content, FileNotFoundError | IsADirectoryError):
        raise _Refused(address, "there is no such config")
    if isinstance(content, ImportError):
        raise SetupError(f"{shown(address)}: a library for this address is missing: {content}")
    if isinstance(content, ValueError):  # no such protocol
        raise _Refused(address, str(content))
    raise _no_answer(address, content)  # each store has errors of its own


def _no_answer(address: str, error: object) -> SetupError:
    words = " ".join(str(error).split())[:200] or type(error).__name__
    return SetupError(f"{shown(address)}: the config cannot be fetched ({words}); former copies are in {_cache()}")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _kept(address: str, content: bytes) -> Path:
    """Return the file in the cache with this content of an address.

    Raises:
        SetupError: it cannot be written.
    """
    stem = re.sub(r"[^\w.-]", "_", posixpath.basename(urlsplit(address).path).rpartition(".")[0])[:100] or "config"
    folder = _cache() / _digest(address.encode()) / _digest(content)
    path = folder / f"{stem}.yaml"
    try:
        if path.is_file() and path.read_bytes() == content and (folder / _NOTE).is_file():
            return path
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(folder / _NOTE, shown(address))
        write_whole(path, content)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise SetupError(f"{_cache()}: the config of {shown(address)} cannot be kept here: {error}") from error
    return path
