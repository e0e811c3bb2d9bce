"""Rendezvous before `init_process_group`: wait for all processes and check that they run the same config.

It uses torch's store at the address of rank 0. Torch itself would wait half an hour for a missing process, and would
not report two with the same rank or with different configs.

Torch is imported only where a run begins.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from deeplightning.faults import SetupError
from deeplightning.private.messages import Sentence, says
from deeplightning.process import ranks
from deeplightning.process.identity import identity
from deeplightning.words import first_line

if TYPE_CHECKING:
    from lightning_fabric.plugins.environments import ClusterEnvironment
    from torch.distributed import Store

WAIT_VARIABLE = "DEEPLIGHTNING_MEET_SECONDS"
"""The environment variable that sets how long a process waits for the others."""
WAIT_SECONDS = 60.0  # without that variable
STORE_SECONDS = 10.0  # in which a torch store answers
KEY = "deeplightning"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
POLL_SECONDS = 0.05


def wait_seconds() -> float:
    """Return how many seconds processes started elsewhere may come later than this one.

    Raises:
        SetupError: the variable is not a number of seconds.
    """
    text = os.environ.get(WAIT_VARIABLE) or str(WAIT_SECONDS)
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < 1e6:
            return seconds
    raise SetupError(f"{WAIT_VARIABLE}={text!r} is no time in seconds")


@dataclass(frozen=True)
class Member:
    """A participant of the rendezvous: a process, or a machine if machines are started by hand.

    Attributes:
        number: among the members, from 0 to `of` - 1.
        word: what its number is called: node or rank.
        variable: the environment variable that sets it.
    """

    number: int
    of: int
    word: str
    variable: str


def join(
    environment: Any, rank: int, processes: int, nodes: int, alike: Mapping[str, str], start_others: Callable[[], None]
) -> Any:
    """Connect this process to the others, and start those of this machine that it has to start.

    Args:
        environment: Lightning's cluster environment.
        rank: of this process.
        processes: on each machine.
        nodes: the number of machines.
        alike: values that must be equal in all processes, by name.
        start_others: starts the other processes of this machine, if that is ours to do.

    Returns:
        Torch's store, if this process has one. Rank 0's store keeps its port open, so no other program can take it;
        torch uses the same store.

    Raises:
        SetupError: the port is invalid or taken, the address is unreachable, a process is missing, two have the same
            number, or their values differ.
    """
    launches = not environment.creates_processes_externally
    alone = launches and nodes == 1  # a missing process has exited, which is noticed
    address, port = environment.main_address, _port(environment, alone)
    elastic = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # its agent listens and supervises
    is_child = ranks.here().parent is not None  # type: ignore[union-attr]
    if elastic and os.environ.get(_RESTARTS, "0") != "0" and ranks.AGENT not in os.environ:
        return _anew(address, _port(environment, False), rank, processes * nodes)
    node, store = environment.node_rank(), None
    member = Member(node, nodes, "node", "NODE_RANK") if launches else Member(rank, processes * nodes, "rank", "RANK")
    if rank == 0 and not elastic:
        store = _listen(address, port, processes * nodes, None if alone or not launches else member)
        os.environ["MASTER_PORT"] = str(store.port)
    if not (elastic or alone or is_child):
        if store is None:
            _reach(address, port)
            store = _join(address, port, processes * nodes)
        sizes = {"engine.num_nodes": str(nodes), "engine.processes": str(processes)}
        _gather(_of_rendezvous(store, next(_numbers)), member, sizes | dict(alike), node, address)
    elif nodes > 1 and not is_child:
        _go_by(interface(address), loopback=node != 0)
    if launches:
        start_others()
    return store


def _port(environment: ClusterEnvironment, any_port: bool) -> int:
    """Return the port of the rendezvous; 0 for any free one, if we may choose it."""
    given = os.environ.get("MASTER_PORT")
    if given is None:
        return 0 if any_port else environment.main_port
    if not given.isascii() or not given.strip().isdigit() or not 0 < int(given) < 2**16:
        raise SetupError(f"MASTER_PORT={given!r} is no port: a whole number from 1 to 65535")
    return int(given)


# ---- a store


_numbers = itertools.count()


def _of_rendezvous(store: Store, number: int) -> Any:
    """Return a store for one rendezvous: the same processes may need another for a second training."""
    from torch.distributed import PrefixStore

    return PrefixStore(str(number), store)


def _listen(address: str, port: int, world: int, member: Member | None) -> Any:
    """Create the store of rank 0."""
    from torch.distributed import DistError, TCPStore

    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        raise SetupError(f"MASTER_ADDR={address}: this address is not known: {error.strerror or error}") from error
    limit = wait_seconds()
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    try:
        return TCPStore(address, port, world, timeout=timedelta(seconds=limit), **options)
    except DistError as error:
        if not says(error, Sentence.ADDRESS_IN_USE):
            reason = first_line(error)
            raise SetupError(f"MASTER_ADDR={address}: rank 0 cannot listen at port {port} there: {reason}") from error
        if member is not None and (twice := _is_taken_by_ours(address, port, world, member)):
            raise SetupError(twice) from error
        hint = "set MASTER_PORT to one that is free"
        if "MASTER_PORT" in os.environ and (identity() is None or member is None):
            hint += ", or leave it away and a free one is taken"
        raise SetupError(f"MASTER_PORT: port {port} is in use by another program; {hint}") from error


def _anew(address: str, port: int, rank: int, world: int) -> object:
    """Create a store for processes that torchrun restarted.

    torchrun's own store outlives them and still has the addresses of the former processes, to which they would connect
    with torch 2.15.
    """
    from torch.distributed import TCPStore

    theirs, key, store = _join(address, port, world), f"{KEY}/port/{os.environ[_RESTARTS]}", None
    if rank == 0:
        store = TCPStore(address, 0, world, is_master=True, wait_for_workers=False, multi_tenant=True)
        theirs.set(key, str(store.port))
    os.environ |= {"MASTER_PORT": theirs.get(key).decode(), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return store


def _join(address: str, port: int, world: int) -> Any:
    """Connect to the store of rank 0.

    torch 2.15 waits forever for a program that accepts connections and does not answer; the connecting thread is then
    abandoned.
    """
    from torch.distributed import TCPStore

    found: list[Any] = []

    def connect() -> None:
        try:
            limit = timedelta(seconds=min(STORE_SECONDS, wait_seconds()))
            found.append(TCPStore(address, port, world, timeout=limit, is_master=False, wait_for_workers=False))
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=connect, name="rendezvous", daemon=True)
    thread.start()
    thread.join(2 * min(STORE_SECONDS, wait_seconds()))
    if not found or isinstance(found[0], Exception):
        what = "what listens there is no torch store, or does not answer"
        raise SetupError(f"MASTER_ADDR={address}, MASTER_PORT={port}: {what}; set both to where rank 0 is started")
    found[0].set_timeout(timedelta(seconds=wait_seconds()))
    return found[0]


def _is_taken_by_ours(address: str, port: int, world: int, member: Member) -> str | None:
    """Return the error if another process with the same rank listens at the port; that one is notified if it waits."""
    with contextlib.suppress(SetupError, RuntimeError):
        store = _of_rendezvous(_join(address, port, world), 0)
        if store.check([f"{KEY}/come/{member.number}"]):
            return _twice(store, member)
    return None


def _reach(address: str, port: int) -> None:
    """Wait until an address accepts connections."""
    limit = wait_seconds()
    until, wait = time.monotonic() + limit, POLL_SECONDS
    while True:
        try:
            socket.create_connection((address, port), timeout=limit / 4).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                waited = f"waiting for node 0: rank 0 does not answer there after {limit:g} s"
                what = f"MASTER_ADDR={address}, MASTER_PORT={port}: {waited}"
                raise SetupError(f"{what}: {error.strerror or error}") from error
        time.sleep(wait)
        wait = min(1.0, 2 * wait)


# ---- messages


def _gather(store: Store, member: Member, ours: Mapping[str, str], node: int, address: str) -> None:
    """Wait for all members and check that their values agree."""
    own = interface(address)
    card = {"host": socket.gethostname(), "pid": os.getpid(), "node": node, "alike": ours, "address": own and own[1]}
    try:
        if store.add(f"{KEY}/come/{member.number}", 1) > 1:
            raise SetupError(_twice(store, member))
        store.set(f"{KEY}/is/{member.number}", json.dumps(card))
        cards = _all(store, member) if member.number == 0 else _wait_for_start(store, member)
    except RuntimeError as error:  # torch's error for a closed connection
        raise SetupError("rank 0 has ended while this process was waiting for the others; it says why") from error
    if len({each["node"] for each in cards}) > 1:
        others = [each["address"] for each in cards if each["node"] != node and each["address"]]
        if own is not None and _is_loopback(own[1]) and not all(map(_is_loopback, others)):
            own = interface(next(other for other in others if not _is_loopback(other)))
        _go_by(own, loopback=True)


def _all(store: Store, member: Member) -> list[dict[str, Any]]:
    """Wait for all members, as member 0; return their cards, after telling them to start or why not."""
    limit = wait_seconds()
    until = time.monotonic() + limit
    while missing := [n for n in range(member.of) if not store.check([f"{KEY}/is/{n}"])]:
        _heed(store, member)
        if time.monotonic() > until:
            named = ", ".join(map(str, missing[:20])) + (" …" if len(missing) > 20 else "")
            of = "machines" if member.word == "node" else "processes"
            message = (
                f"waiting for {member.word} {named}: of {member.of} {of} {len(missing)} did not come in {limit:g} s"
            )
            _end(store, member, f"{message}; start with the same MASTER_ADDR and MASTER_PORT, or set {WAIT_VARIABLE}")
        time.sleep(POLL_SECONDS)
    cards = [json.loads(store.get(f"{KEY}/is/{n}")) for n in range(member.of)]
    first = cards[0]["alike"]
    for number, card in enumerate(cards):
        other = card["alike"]
        differ = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        differences = [
            f"{key} is {_short(first.get(key))} on {member.word} 0, {_short(other.get(key))} on {member.word} {number}"
            for key in differ[:3]
        ]
        if differ:
            more = f", and {len(differ) - 3} more keys differ" if len(differ) > 3 else ""
            _end(store, member, f"the configs differ: {'; '.join(differences)}{more}. Give all of them the same config")
    _heed(store, member)
    store.set(f"{KEY}/go", "go")
    return cards


def _wait_for_start(store: Store, member: Member) -> list[dict[str, Any]]:
    """Wait until rank 0 starts the run; return the cards of rank 0 and of this member."""
    until = time.monotonic() + wait_seconds() + STORE_SECONDS  # rank 0 reports who is missing
    while not store.check([f"{KEY}/go"]):
        _heed(store, member)
        if time.monotonic() > until:
            raise SetupError(f"waiting for {member.word} 0: there is a store at its address, and it says nothing")
        time.sleep(POLL_SECONDS)
    return [json.loads(store.get(f"{KEY}/is/{n}")) for n in (0, member.number)]


def _heed(store: Store, member: Member) -> None:
    """Raise the error that a member has reported, if there is one."""
    if store.check([f"{KEY}/fault"]):
        fault = store.get(f"{KEY}/fault").decode()
        if member.number == 0:
            _end(store, member, fault)
        store.add(f"{KEY}/heard", 1)
        raise SetupError(fault)


def _end(store: Store, member: Member, fault: str) -> None:
    """Report an error to all waiting members and raise it; rank 0 keeps its store until they have read it."""
    store.set(f"{KEY}/fault", fault)
    until = time.monotonic() + ranks.EXIT_SECONDS
    waiting = sum(store.check([f"{KEY}/is/{number}"]) for number in range(1, member.of))
    while store.add(f"{KEY}/heard", 0) < waiting and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    raise SetupError(fault)


def _twice(store: Store, member: Member) -> str:
    """Return the error for two members with one number; notify members that still wait, not a running run."""
    here = f"{socket.gethostname()} (process {os.getpid()})"
    there = "another"
    if store.check([f"{KEY}/is/{member.number}"]):
        card = json.loads(store.get(f"{KEY}/is/{member.number}"))
        there = f"{card['host']} (process {card['pid']})"
    what = "machine" if member.word == "node" else "process"
    fault = (
        f"{member.variable}={member.number} is set twice, on {there} and on {here}: each {what} needs its own, from 0 "
        f"to {member.of - 1}; another run needs another MASTER_PORT"
    )
    if not store.check([f"{KEY}/go"]):
        store.set(f"{KEY}/fault", fault)
    return fault


def _short(text: str | None) -> str:
    return "not set" if text is None else text if len(text) < 60 else f"{text[:50]} …"


# ---- the network


def interface(address: str) -> tuple[str, str] | None:
    """Return name and own address of the network interface that leads to an address; None if unknown."""
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
    return ("lo", own) if _is_loopback(own) else None  # 127.0.0.2 and others belong to it


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _go_by(own: tuple[str, str] | None, loopback: bool) -> None:
    """Make gloo use a network interface, unless the user chose one: between machines its default, the one that the
    machine's name resolves to, is often wrong."""
    if own is not None and (loopback or not _is_loopback(own[1])):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", own[0])
