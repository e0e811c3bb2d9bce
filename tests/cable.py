"""Connect two network namespaces of this machine by a virtual cable that can be cut and mended, with root and `ip`."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile

ADDRESS = "10.77.0.1"
"""Address of the first namespace; the second one has the next."""


class NoCable(Exception):
    """Raised if this machine cannot create the cable; the message gives the reason."""


def in_namespace() -> None:
    """Run the command in the network namespace that NAMESPACE names, instead of `deeplightning.cli:main`.

    If HIDDEN names a folder, the command sees an empty file system there.
    """
    from deeplightning import cli

    handle = os.open(f"/var/run/netns/{os.environ['NAMESPACE']}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "setns")
    if hidden := os.environ.get("HIDDEN"):
        private, folder = 0x20000, hidden.encode()  # CLONE_NEWNS; then MS_REC | MS_PRIVATE
        if libc.unshare(private) or libc.mount(None, b"/", None, 0x44000, None):
            raise OSError(ctypes.get_errno(), "unshare")
        if libc.mount(b"none", folder, b"tmpfs", 0, None):
            raise OSError(ctypes.get_errno(), "mount")
    tempfile.tempdir = None  # the parent process has set it
    cli.main()


class Cable:
    """Two network namespaces, and the cable between them.

    Attributes:
        names: of the namespaces.

    Raises:
        NoCable: this machine or its user cannot create them.
    """

    def __init__(self) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise NoCable("two network namespaces need root and `ip` (Debian: iproute2)")
        self.names = [f"dl{os.getpid()}{letter}" for letter in "ab"]
        self._made: list[str] = []
        try:
            self._make()
        except subprocess.SubprocessError as error:
            self.remove()
            words = getattr(error, "stderr", None) or error
            raise NoCable(f"network namespaces cannot be made here: {words}") from error

    def _make(self) -> None:
        for name in self.names:
            self._ip("netns", "add", name)
            self._made.append(name)
        one, two = self.names
        self._ip("link", "add", "va", "netns", one, "type", "veth", "peer", "name", "vb", "netns", two)
        for number, (name, end) in enumerate(zip(self.names, ("va", "vb"), strict=True), start=1):
            self._ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            self._ip("-n", name, "link", "set", "lo", "up")
            self._ip("-n", name, "link", "set", end, "up")

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)

    def cut(self) -> None:
        """Drop all packets between the namespaces."""
        self._ip("-n", self.names[1], "link", "set", "vb", "down")

    def mend(self) -> None:
        """Restore the link; stalled connections continue."""
        self._ip("-n", self.names[1], "link", "set", "vb", "up")

    def remove(self) -> None:
        """Remove the namespaces."""
        for name in self._made:
            with contextlib.suppress(subprocess.SubprocessError):
                self._ip("netns", "del", name)
        self._made.clear()
