"""A config by address, such as `https://HOST/PATH`, `s3://BUCKET/PATH` or `runs:/ID`, becomes a local file.

What is fetched is kept in `deeplightning/configs` of the user's cache folder, in a folder for its address and its
content; so a command, its processes and its launcher read the same bytes. An address that fails is an error, never
silently the copy of another day.
"""

import datetime
import hashlib
import os
import posixpath
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from deeplightning.address import shown, whole
from deeplightning.config.target import find, is_installed
from deeplightning.faults import ConfigError, Fault, SetupError
from deeplightning.own_code import seal

if TYPE_CHECKING:
    from collections.abc import Callable
    from http.client import HTTPMessage
    from urllib import request

MAX_BYTES = 1_000_000
"""Of a config."""
TIMEOUT = 20.0
"""Seconds without an answer."""
FRESH = 60.0
"""Seconds in which one process does not fetch an address again: one command reads its config several times."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NOTE = "address"  # the file beside a copy that holds its address
_fetched: dict[str, tuple[float, Path]] = {}


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
    if scheme == "runs":
        content = _of_run(complete, key, place)
    elif scheme in ("http", "https"):
        content = _from_web(complete, key, place)
    else:
        content = _from_store(complete, key, place)
    if len(content) > MAX_BYTES:
        _refuse(complete, f"a config has at most {MAX_BYTES // 1000} kB; is this the right file?", key, place)
    if content.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        _refuse(
            complete, "this is a web page, not YAML; sites of repositories have an address of the raw file", key, place
        )
    path = _kept(complete, content)
    _fetched[complete] = time.monotonic(), path
    return path


def fetched() -> dict[str, str]:
    """Return the local file of each address that this process has fetched."""
    return {address: str(path) for address, (_, path) in _fetched.items()}


def missing_library(address: str) -> str | None:
    """Return why a store cannot be read here, with the command that installs its library, or None if it can, as far as
    is known without importing the library."""
    from fsspec.registry import known_implementations

    scheme = whole(address).partition("://")[0]
    for name in scheme.split("::"):
        known = known_implementations.get(name)
        if known is None:
            return f"there is no kind of store {name}://"
        module = "aiohttp" if name in ("http", "https") else str(known["class"]).partition(".")[0]
        if not is_installed(module):
            return f"{name}:// needs a library that is not installed: pip install {module}"
    return None


def address_of(path: Path) -> str | None:
    """Return the address, without its query, of a fetched local file, or None."""
    try:
        if path.parent.parent.parent != _cache():
            return None
        return (path.parent / _NOTE).read_text(encoding="utf-8")
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplightning" / "configs"


def _of_run(address: str, key: str | None, place: str | None) -> bytes:
    """Return a copy of the config of a run in the tracking store, outside its folder, which holds no code to import."""
    run_id = address.removeprefix("runs://").strip("/")
    if not run_id or "/" in run_id:
        _refuse(address, "the config of a run is runs:/ID", key, place)
    resolve_run: Callable[..., Path] = find("deeplightning.tracking.resolve.resolve_run")  # above this layer
    folder: Path = resolve_run(f"runs:/{run_id}")
    try:
        return (folder / "cfg.yaml").read_bytes()
    except OSError:
        _refuse(address, f"this run has no config: {folder / 'cfg.yaml'} is missing", key, place)


def _from_web(address: str, key: str | None, place: str | None) -> bytes:
    import http.client
    import urllib.error
    import urllib.request

    class Redirects(urllib.request.HTTPRedirectHandler):
        def redirect_request(
            self, req: "request.Request", fp: IO[bytes], code: int, msg: str, headers: "HTTPMessage", newurl: str
        ) -> "request.Request | None":
            try:
                _refuse_plain(newurl, key, place or shown(address))
            except ConfigError:
                fp.close()
                raise
            return super().redirect_request(req, fp, code, msg, headers, newurl)

    _refuse_plain(address, key, place)
    try:
        with urllib.request.build_opener(Redirects).open(address, timeout=TIMEOUT) as answer:
            content: bytes = answer.read(MAX_BYTES + 1)
            return content
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (401, 403):
                _refuse(
                    address, f"the server refuses access ({error.code}); download it, and name the file", key, place
                )
            if error.code < 500:
                _refuse(address, f"there is no such config ({error.code} {error.reason})", key, place)
            _no_answer(address, f"{error.code} {error.reason}")
    except (urllib.error.URLError, http.client.HTTPException, ValueError, OSError) as error:
        _no_answer(address, getattr(error, "reason", None) or error)


def _refuse_plain(address: str, key: str | None, place: str | None) -> None:
    """Refuse an address without TLS: anybody on the way could name the code that the config imports."""
    asked = urlsplit(address)
    if asked.scheme != "https" and asked.hostname not in _LOOPBACK:
        message = "without TLS others can change a config on its way, and it names code that is imported"
        _refuse(address, f"{message}; use https://, or download it and name the file", key, place)


def _from_store(address: str, key: str | None, place: str | None) -> bytes:
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
    try:
        if not found:
            raise TimeoutError(f"no answer in {3 * TIMEOUT:.0f} s")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]
    except (FileNotFoundError, IsADirectoryError):
        _refuse(address, "there is no such config", key, place)
    except ImportError as error:
        package = re.match(r"Install (\S+)", str(error))  # as fsspec words it
        remedy = f"pip install {package[1]}" if package else str(error)
        raise SetupError(f"{shown(address)}: a library for this address is missing: {remedy}") from None
    except ValueError as error:  # no such protocol
        schemes = "https://, an address that fsspec knows, such as s3:// or gs://, runs:/ID and pkg://PACKAGE/PATH"
        _refuse(address, f"{error}; a config is a file, or at {schemes}", key, place)
    except Exception as error:  # each store has its own
        _no_answer(address, error)


def _refuse(address: str, message: str, key: str | None, place: str | None) -> NoReturn:
    if place is not None:
        message = f"{shown(address)}: {message}"
    raise ConfigError(Fault(message, key, place or shown(address)))


def _no_answer(address: str, error: object) -> NoReturn:
    words = " ".join(str(error).split())[:200] or type(error).__name__
    kept = sorted(_folder(address).glob("*/*.y*ml"), key=lambda path: path.stat().st_mtime)
    first = "set those of the store, such as ~/.aws" if "credentials" in words.lower() else "try again later"
    remedy = f"{first}, or name a file of this machine"
    if kept:
        moment = datetime.datetime.fromtimestamp(kept[-1].stat().st_mtime).isoformat(" ", "minutes")
        remedy = f"{first}, or name the copy of {moment}: {kept[-1]}"
    raise SetupError(f"{shown(address)}: the config cannot be fetched ({words}); {remedy}") from None


def _folder(address: str) -> Path:
    return _cache() / hashlib.sha256(address.encode()).hexdigest()[:16]


def _kept(address: str, content: bytes) -> Path:
    """Return the file in the cache with this content of an address.

    Raises:
        SetupError: it cannot be written.
    """
    stem = re.sub(r"[^\w.-]", "_", posixpath.basename(urlsplit(address).path).rpartition(".")[0])[:100] or "config"
    folder = _folder(address) / hashlib.sha256(content).hexdigest()[:16]
    path = folder / f"{stem}.yaml"
    try:
        if path.is_file() and path.read_bytes() == content and (folder / _NOTE).is_file():
            os.utime(path)  # when it was last fetched
            return path
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for target, data in ((folder / _NOTE, shown(address).encode()), (path, content)):
            handle, name = tempfile.mkstemp(dir=folder)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).replace(target)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise SetupError(f"{_cache()}: the config of {shown(address)} cannot be kept here: {error}") from error
    return path
