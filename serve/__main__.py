"""`python -m serve FOLDER`: check the address and the bundle, then answer HTTP until SIGTERM or Ctrl-C.

Exit codes: 0 stopped, 2 wrong arguments, 3 unusable address or device, 4 unusable bundle.
"""

import argparse
import contextlib
import ctypes
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from deeplightning.runfolder import RunFolder
from deeplightning.words import printable
from serve import device
from serve.admission import Admission, Hosts
from serve.bundle import Bundle, bundle_folders
from serve.device import Device, DeviceError, OptionError, choose_devices, device_for_precision, onnxruntime_lacks
from serve.limits import BOUNDS, Limits
from serve.log import log_event, open_streams
from serve.pool import OpenModel, Setup
from serve.supervisor import ON_CPU, ModelError, Supervisor
from serve.worker import BACKLOG
from serve.worker_count import MAX_WORKERS, Layout, usable_cores

Number = TypeVar("Number", int, float)


class AddressError(Exception):
    """Raised if the server cannot listen on host and port; the message says why and what to do."""

    exit_code = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a bundle until it is stopped. Returns the exit code."""
    parser = options_parser()
    parser.add_argument("folder", type=Path, help="a bundle, or a run folder that contains one")
    parser.add_argument("--precision", choices=["fp32", "int8", "fp16"], default="fp32", help="precision of the model")
    options = parser.parse_args(arguments)

    def open_model(device: Device) -> Bundle:
        return Bundle.open_on(device, options.folder, options.precision)

    try:
        options.device = device_for_precision(options.precision, options.device)
        return serve(open_model, options, lambda: _bundle_files(options.folder), options.folder)
    except OptionError as error:
        print(printable(f"error: {error}", "\n"), file=sys.stderr)
        return error.exit_code


def options_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that all servers share."""
    parser = argparse.ArgumentParser(
        prog="python -m serve",
        description="Answer HTTP from a bundle.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all addresses of this machine"
    )
    parser.add_argument("--port", type=_number_parser(int, 0, 65535), default=5000, help="0: any free port")
    parser.add_argument(
        "--device",
        type=_device,
        default="auto",
        metavar="auto|cpu|cuda|cuda:N",
        help="device of the model: every GPU, with one process each (cuda), one GPU (cuda:N), or the CPU; auto: every "
        "usable GPU, else the CPU",
    )
    for one in (each for each in fields(Limits) if each.metadata):
        kind, name = _number_parser(type(one.default), *one.metadata["bounds"]), one.name.replace("_", "-")
        parser.add_argument(f"--{name}", type=kind, default=one.default, help=one.metadata["meaning"])
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable that holds the key clients must send"
    )
    parser.add_argument(
        "--allowed-hosts",
        metavar="NAME,…",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        default=[],
        help="host names that the server answers to, besides localhost; *: any. Without a name, a server on a loopback "
        "address answers only to loopback names, one on any other address to every name",
    )
    return parser


def serve(
    open_model: OpenModel,
    options: argparse.Namespace,
    files: Callable[[], Sequence[Path]],
    folder: Path,
    lacks: Callable[[], str | None] = onnxruntime_lacks,
) -> int:
    """Answer HTTP until SIGTERM or Ctrl-C; return the exit code.

    Args:
        open_model: loads the model on a device; called again when its files change. Its exceptions are reported; their
            `exit_code` becomes that of the server.
        options: options from `options_parser`.
        files: returns the files of the model; none while they are being replaced.
        folder: folder of these files.
        lacks: returns why the library that runs the model cannot use a GPU, or None if it can.
    """
    open_streams()
    limits = Limits(**{name: getattr(options, name) for name in BOUNDS})
    try:
        key = _api_key(options.api_key_env)
        choice = choose_devices(options.device, lacks)
        first = _listen(options.host, options.port)
        host, port = first.getsockname()[:2]
        number = max(len(choice.devices), min(usable_cores(), MAX_WORKERS))
        # Only Linux distributes connections over several sockets of an address.
        again = first.dup if sys.platform != "linux" else lambda: _bound_socket(options.host, port, reuse_port=True)
        listeners = [first, *(again() for _ in range(number - 1))]

        def announce(model: str, layout: Layout) -> None:
            if choice.reason is not None:
                log_event(ON_CPU, reason=choice.reason)
            with contextlib.suppress(OSError):  # its reader is gone, or the disk is full
                os.write(1, f"Serving {printable(model)} on {_url(first)}: {layout}\n".encode())

        _return_memory()
        setup = Setup(open_model, folder, listeners, limits, Admission(key, Hosts(host, options.allowed_hosts)))
        return Supervisor(setup, lambda: _files_signature(files), announce, choice).run()
    except (AddressError, DeviceError, ModelError, OptionError) as error:
        print(printable(f"error: {error}", "\n"), file=sys.stderr)
        return error.exit_code


def _api_key(variable: str | None) -> str | None:
    """Return the API key from an environment variable."""
    if variable is None:
        return None
    if not (key := os.environ.get(variable, "").strip()):  # a header has no spaces or line ends around a value
        raise OptionError(
            f"The environment variable {variable}, which must contain the API key, is not set or is empty. "
            f"Set it, or omit --api-key-env (serve.api_key_env)."
        )
    return key


def _number_parser(kind: Callable[[str], Number], low: float, high: float) -> Callable[[str], Number]:
    def number(text: str) -> Number:
        if not low <= kind(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
        return kind(text)

    return number  # argparse reports "invalid number value: 'x'" if int() fails; "number" is this function's name


def _device(text: str) -> str:
    if not device.is_device_word(text):
        raise argparse.ArgumentTypeError(f"{text} is not auto, cpu, cuda or cuda:N, such as cuda:0")
    return text


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise AddressError if the host is not an address of this machine, or the port is in
    use or not allowed. Other sockets of this server may share its address; no other program can."""
    try:
        with _bound_socket(host, port) as probe:  # with SO_REUSEPORT alone, we might share another server's address
            port = probe.getsockname()[1]
        listener = _bound_socket(host, port, reuse_port=True)
        listener.listen(BACKLOG)
        return listener
    except (OSError, UnicodeError) as error:  # the latter for a name such as a..b
        reason = (getattr(error, "strerror", None) or str(error)).split(" (")[0]
        raise AddressError(
            f"The server cannot listen on {host}, port {port}: {reason}. Choose another with --host (127.0.0.1: this "
            "machine only, 0.0.0.0: all its addresses) or --port (0: any free port)."
        ) from error


def _bound_socket(host: str, port: int, reuse_port: bool = False) -> socket.socket:
    """Return a bound socket that does not listen yet."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def _bundle_files(folder: Path) -> list[Path]:
    """Return the files of the bundle in `folder`; none while it is being replaced."""
    with contextlib.suppress(OSError, RuntimeError):  # no permission, an unknown home: loading the bundle reports it
        for bundle in bundle_folders(folder.expanduser()):
            if (bundle / RunFolder("").bundle_card.name).is_file():
                return sorted(bundle.iterdir())
    return []


def _files_signature(files: Callable[[], Sequence[Path]]) -> list[tuple[str, int, int, int]] | None:
    """Return a value that changes when the files do, or None while one is missing or cannot be read."""
    try:
        stats = [(str(file), file.stat()) for file in files()]
    except OSError:
        return None
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats] or None


def _return_memory() -> None:
    """Make glibc return the memory of large pictures at once instead of keeping it per thread. After seven pictures of
    49 megapixels at a time, a process had 1.9 GB; with this, its peak is 0.8 GB (glibc 2.36, 2 cores, 2026)."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).mallopt(-3, 4_000_000)  # M_MMAP_THRESHOLD, in bytes; once set, it does not grow


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    public = "" if ipaddress.ip_address(host).is_loopback else " (public: anyone who can reach this machine can use it)"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{public}"


if __name__ == "__main__":
    sys.exit(main())
