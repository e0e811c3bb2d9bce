"""Start the processes of a run, connect them, and report the first cause when one of them fails.

Before `init_process_group` they wait for each other and check that they run the same config, through torch's store at
the address of rank 0. Torch itself would wait half an hour for a missing process, and would not report two processes
with the same rank or with different configs.

Torch is imported only when a run starts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from deeplightning.faults import Fault, SetupError, seconds_of
from deeplightning.private.lightning import set_launcher, share_threads, subprocess_launcher
from deeplightning.private.messages import ErrorText, matches
from deeplightning.process import member
from deeplightning.process.identity import AGENT_PORT, identity
from deeplightning.process.ranks import final_error
from deeplightning.process.streams import Interrupted, Terminated
from deeplightning.words import first_line

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from lightning_fabric.plugins.environments import ClusterEnvironment

WAIT_VARIABLE = "DEEPLIGHTNING_MEET_SECONDS"
"""The environment variable that sets how long a process waits for the others."""
WAIT_SECONDS = 60.0  # without that variable
STORE_SECONDS = 5.0  # in which a torch store answers
FAULT_SECONDS = 1.0  # for the others to read why rank 0 ends
KEY = "deeplightning"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
POLL_SECONDS = 0.05


def connect(trainer: pl.Trainer, alike: Mapping[str, str]) -> None:
    """Make the processes of a trainer end together and report the first cause once.

    Args:
        alike: values that must be equal in all processes, by name; processes started externally compare them.
    """
    strategy: Any = trainer.strategy

    class Launcher(subprocess_launcher()):  # type: ignore[misc]
        """Lightning's launcher without its observer, which kills the main process before that can report a failure."""

        _store: tuple[object] | None = None  # keeps torch's store alive

        def launch(self, function: Any, *args: object, trainer: Any = None, **kwargs: Any) -> Any:
            """Call the function in all processes; an error it raises is traced to its first cause."""
            environment = self.cluster_environment
            starts_others = not environment.creates_processes_externally
            rank = environment.node_rank() * self.num_processes + environment.local_rank()
            if (here := identity()) is not None and here.is_binding:
                rank = here.rank  # machines may have different numbers of processes
            group = member.supervise(rank, starts_others and self.num_processes > 1)
            group.watch_signals()
            try:
                environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
                if self._store is None:
                    self._store = (join(self, rank, alike),)
                share_threads(self.num_processes)
                return function(*args, **kwargs)
            except KeyboardInterrupt as error:  # Lightning would exit with code 1
                how = ("SIGTERM", 143) if isinstance(error, Terminated) else ("SIGINT", 130)
                raise group.cause_of(Interrupted(*how, at_once=True)) from None
            except BaseException as error:
                cause = group.cause_of(error)
                if cause is error:
                    raise
                raise final_error(cause) from error

        def start_others(self) -> None:
            """Start the other processes of this machine."""
            group = member.current()
            assert group is not None
            os.environ["LOCAL_WORLD_SIZE"] = str(self.num_processes)
            try:
                self._call_children_scripts()
            except OSError as error:
                started = f"{1 + len(self.procs)} of {self.num_processes} processes could be started"
                for child in self.procs:
                    child.kill()
                raise SetupError(Fault(f"only {started}: {error.strerror}", "engine.processes")) from error
            finally:
                group.children = self.procs

    set_launcher(strategy, Launcher(strategy.cluster_environment, strategy.num_processes, trainer.num_nodes))


# ---- the rendezvous


def wait_seconds() -> float:
    """Return how many seconds to wait for processes that are started elsewhere."""
    return seconds_of(WAIT_VARIABLE, WAIT_SECONDS, low=0.001)


def join(launcher: Any, rank: int, alike: Mapping[str, str]) -> Any:
    """Connect this process to the others, and start those of this machine if that is its task.

    Args:
        launcher: Lightning's, with the cluster environment and the numbers of machines and of processes on each.
        rank: of this process.
        alike: values that must be equal in all processes, by name.

    Returns:
        Torch's store, if this process has one. Rank 0's store keeps its port open, so no other program can take the
        port; torch uses the same store.

    Raises:
        SetupError: the port is invalid or in use, the address is unreachable, a process is missing, two have the same
            number, or their values differ.
    """
    environment, processes, nodes = launcher.cluster_environment, launcher.num_processes, launcher.num_nodes
    launches = not environment.creates_processes_externally
    alone = launches and nodes == 1  # supervision notices a process that exits
    address, port = environment.main_address, _port(environment, alone)
    elastic = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # its agent listens and supervises
    is_child = member.current().parent is not None  # type: ignore[union-attr]
    node, store = environment.node_rank(), None
    if elastic and member.AGENT not in os.environ and (nodes > 1 or os.environ.get(_RESTARTS, "0") != "0"):
        if nodes > 1:
            _set_gloo_interface(interface(address), loopback=node != 0)
        return _new_store(address, _port(environment, False), rank, processes * nodes)
    if rank == 0 and not elastic:
        store = _listen(address, port, processes * nodes)
        os.environ["MASTER_PORT"] = str(store.port)
    if not (elastic or alone or is_child):
        from torch.distributed import PrefixStore

        store = store or _connect_store(address, port, processes * nodes)
        numbered: Any = PrefixStore(str(next(_run_numbers)), store)  # the same processes may train a second time
        values = {"engine.num_nodes": str(nodes), "engine.processes": str(processes), **alike}
        card = {"host": socket.gethostname(), "pid": os.getpid(), "node": node, "alike": values}
        own = ("node", node, nodes) if launches else ("rank", rank, processes * nodes)
        _choose_gloo_interface(_gather(numbered, card, address, *own), node, address)
    if launches:
        launcher.start_others()
    return store


def _port(environment: ClusterEnvironment, any_port: bool) -> int:
    """Return the port of the rendezvous; 0 for any free port, if `any_port` allows it."""
    given = os.environ.get("MASTER_PORT")
    if given is None:
        return 0 if any_port else environment.main_port
    if not given.isascii() or not given.strip().isdigit() or not 0 < int(given) < 2**16:
        raise SetupError(f"MASTER_PORT={given!r} is not a port: a whole number from 1 to 65535")
    return int(given)


# ---- a store


_run_numbers = itertools.count()


def _listen(address: str, port: int, world: int) -> Any:
    """Create the store of rank 0."""
    from torch.distributed import DistError, TCPStore

    until = time.monotonic() + (wait_seconds() if WAIT_VARIABLE in os.environ else 0)
    while True:  # the name of a pod may be known later than the pod runs
        try:
            socket.getaddrinfo(address, None)
            break
        except OSError as error:
            if time.monotonic() >= until:
                message = f"MASTER_ADDR={address}: cannot resolve this address: {error.strerror or error}"
                raise SetupError(message) from error
            time.sleep(POLL_SECONDS)
    limit = timedelta(seconds=wait_seconds())
    try:
        return TCPStore(address, port, world, timeout=limit, is_master=True, wait_for_workers=False, multi_tenant=True)
    except DistError as error:
        if not matches(error, ErrorText.ADDRESS_IN_USE):
            reason = first_line(error)
            raise SetupError(f"MASTER_ADDR={address}: rank 0 cannot listen on port {port} there: {reason}") from error
        whose = "another program, or by another process with this rank"
        raise SetupError(f"MASTER_PORT: port {port} is in use by {whose}; set it to one that is free") from error


def _new_store(address: str, port: int, rank: int, world: int) -> object:
    """Create a store for processes that torchrun may have restarted, and connect to it.

    torchrun's own store still has the addresses of the former processes, and with torch 2.15 the new ones would connect
    to those. Each machine counts only its own restarts, so a process may first find the store of a former rank 0.
    """
    from torch.distributed import TCPStore

    theirs, key, store, came = _connect_store(address, port, world), f"{KEY}/port", None, 0
    if rank == 0:
        store = TCPStore(address, 0, world, is_master=True, wait_for_workers=False, multi_tenant=True)
        theirs.set(key, str(store.port))
    options: dict[str, Any] = {"timeout": timedelta(seconds=STORE_SECONDS), "is_master": False}
    until, found = time.monotonic() + wait_seconds(), ""
    while came != 1:  # the first process of this rank in that store
        if time.monotonic() > until:
            raise SetupError(f"MASTER_ADDR={address}: rank 0 did not start there within {wait_seconds():g} s")
        with contextlib.suppress(RuntimeError):  # the store does not exist yet, or has ended
            found = theirs.get(key).decode()
            came = TCPStore(address, int(found), world, wait_for_workers=False, **options).add(f"{KEY}/came/{rank}", 1)
        time.sleep(POLL_SECONDS)
    os.environ |= {AGENT_PORT: str(port), "MASTER_PORT": found, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return store


def _connect_store(address: str, port: int, world: int) -> Any:
    """Connect to the store of rank 0, which may start later.

    torch 2.15 waits forever for a program that accepts connections and does not answer; the connecting thread is then
    abandoned.
    """
    from torch.distributed import TCPStore

    found: list[Any] = []
    limit = wait_seconds()

    def connect() -> None:
        try:
            options: dict[str, Any] = {"is_master": False, "wait_for_workers": False}
            found.append(TCPStore(address, port, world, timeout=timedelta(seconds=limit), **options))
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=connect, name="rendezvous", daemon=True)
    thread.start()
    thread.join(limit + STORE_SECONDS)
    if not found or isinstance(found[0], Exception):
        reason = f": {first_line(found[0])}" if found else "; another program listens on this port"
        where = f"MASTER_ADDR={address}, MASTER_PORT={port}"
        raise SetupError(f"{where}: rank 0 does not answer there after {limit:g} s{reason}; correct the two variables")
    return found[0]


def _gather(store: Any, card: dict[str, Any], address: str, noun: str, number: int, of: int) -> list[dict[str, Any]]:
    """Wait for all `of` members, which are machines or processes, and check that their values agree; return their
    cards. A card describes a member: host, process id, machine and values. `noun`, `node` or `rank`, is the name of a
    member's `number`; `address` is rank 0's."""

    def fail(message: str) -> NoReturn:
        store.set(f"{KEY}/fault", message)
        if number == 0:
            time.sleep(FAULT_SECONDS)  # the store ends with this process
        raise SetupError(message)

    own, limit = interface(address), wait_seconds()
    until = time.monotonic() + limit
    try:
        if store.add(f"{KEY}/came/{number}", 1) > 1:
            here = f"{card['host']} (process {card['pid']})"
            message = f"{noun} {number} started twice, also on {here}: each needs its own number, from 0 to {of - 1}"
            fail(f"{message}; another run needs another MASTER_PORT")
        store.set(f"{KEY}/is/{number}", json.dumps({**card, "address": own and own[1]}))
        store.add(f"{KEY}/count", 1)
        while store.add(f"{KEY}/count", 0) < of:
            if store.check([f"{KEY}/fault"]):
                fail(store.get(f"{KEY}/fault").decode())
            if time.monotonic() > until:
                missing = [str(n) for n in range(of) if not store.check([f"{KEY}/is/{n}"])]
                named = ", ".join(missing[:20]) + (" …" if len(missing) > 20 else "")
                message = f"waiting for {noun} {named}: {len(missing)} of {of} missing after {limit:g} s"
                fail(f"{message}; start with the same MASTER_ADDR and MASTER_PORT, or set {WAIT_VARIABLE}")
            time.sleep(POLL_SECONDS)
        cards = [json.loads(each) for each in store.multi_get([f"{KEY}/is/{n}" for n in range(of)])]
        for other, first, theirs in ((n, cards[0]["alike"], each["alike"]) for n, each in enumerate(cards)):
            if differ := [key for key in {**first, **theirs} if first.get(key) != theirs.get(key)]:
                values = "; ".join(
                    f"{key} is {_short(first.get(key))} on {noun} 0, {_short(theirs.get(key))} on {noun} {other}"
                    for key in differ[:3]
                )
                fail(f"the configs differ: {values}. Start all processes with the same config")
    except RuntimeError as error:  # torch's error for a closed connection
        raise SetupError("rank 0 ended while this process was waiting for the others; see its message") from error
    return cards


def _short(text: str | None) -> str:
    return "not set" if text is None else text if len(text) < 60 else f"{text[:50]} …"


# ---- the network


def interface(address: str) -> tuple[str, str] | None:
    """Return the name and own address of the network interface on the route to an address; None if unknown."""
    import psutil

    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as made:  # nothing is sent
            made.connect(target)
            own = made.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return name, own
    return ("lo", own) if _is_loopback(own) else None  # 127.0.0.2 and others belong to the interface too


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _choose_gloo_interface(cards: list[dict[str, Any]], node: int, address: str) -> None:
    """Make gloo use the interface on the route to the other machines, if there are any."""
    if len({card["node"] for card in cards}) > 1:
        own = interface(address)
        others = [card["address"] for card in cards if card["node"] != node and card["address"]]
        far = [other for other in others if not _is_loopback(other)]
        if own is not None and _is_loopback(own[1]) and far:
            own = interface(far[0])
        _set_gloo_interface(own, loopback=True)


def _set_gloo_interface(own: tuple[str, str] | None, loopback: bool) -> None:
    """Make gloo use a network interface, unless the user chose one. Between machines gloo's default, the interface that
    the host name resolves to, is often wrong."""
    if own is not None and (loopback or not _is_loopback(own[1])):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", own[0])
