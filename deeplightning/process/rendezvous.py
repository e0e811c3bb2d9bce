"""The processes of a run find each other before torch lets them, and see that they are of one run.

torch's store at the address of rank 0 is where they come together. Torch itself would wait there for half an hour for
one that does not come, and say nothing of two that come with the same number or with different configs.

Torch is imported only where a run begins.
"""

from __future__ import annotations

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
from deeplightning.process import ranks, supervisor
from deeplightning.process.identity import identity
from deeplightning.words import first_line

if TYPE_CHECKING:
    from lightning_fabric.plugins.environments import ClusterEnvironment
    from torch.distributed import Store

PATIENCE = "DEEPLIGHTNING_MEET_SECONDS"
"""The variable that says how long a process waits for the others."""
MISSING = 60.0  # seconds that it waits where the variable is not set
ANSWER = 10.0  # seconds in which a store answers that is one
KEY = "deeplightning"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
STEP = 0.05  # seconds between two looks into the store


def patience() -> float:
    """Seconds that processes which somebody else has started may come later than this one.

    Raises:
        SetupError: the variable is no number of seconds.
    """
    text = os.environ.get(PATIENCE)
    if not text:
        return MISSING
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise SetupError(f"{PATIENCE}={text!r} is no time in seconds")
    return seconds


@dataclass(frozen=True)
class Member:
    """Who comes to the meeting: of several machines by hand one process of each, else every process.

    Attributes:
        number: among the members, who are `of`.
        word: what its number is called: node, or rank.
        variable: who tells it.
    """

    number: int
    of: int
    word: str
    variable: str


def join(
    environment: Any, rank: int, processes: int, nodes: int, alike: Mapping[str, str], start_others: Callable[[], None]
) -> Any:
    """Lets the processes find each other.

    Args:
        environment: Lightning's cluster environment.
        rank: of this process.
        processes: on each of the machines.
        nodes: how many machines there are.
        alike: what must be the same in all of them, by its name.
        start_others: starts the other processes of this machine, where they are ours to start.

    Returns:
        Torch's store, if this process has one. That of rank 0 listens at a port that nobody else can take meanwhile;
        torch uses it as well.

    Raises:
        SetupError: the port is no number or taken, the address cannot be reached, a process does not come, two come
            with the same number, or they do not agree.
    """
    launches = not environment.creates_processes_externally
    address, port = environment.main_address, _port(environment, launches and nodes == 1)
    elastic = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # its agent listens, and sees to the rest
    alone = launches and nodes == 1  # whoever does not come has ended, and that is seen
    is_child = supervisor.here().parent is not None  # type: ignore[union-attr]
    if elastic and os.environ.get(_RESTARTS, "0") != "0" and supervisor.AGENT not in os.environ:
        return _anew(address, _port(environment, False), rank, processes * nodes)
    store = None
    if rank == 0 and not elastic:
        member = Member(environment.node_rank(), nodes, "node", "NODE_RANK")
        store = _listen(address, port, processes * nodes, None if alone or not launches else member)
        os.environ["MASTER_PORT"] = str(store.port)
    if not (elastic or alone or is_child):
        if store is None:
            _reach(address, port)
            store = _join(address, port, processes * nodes)
        if launches:
            member = Member(environment.node_rank(), nodes, "node", "NODE_RANK")
        else:
            member = Member(rank, processes * nodes, "rank", "RANK")
        sizes = {"engine.num_nodes": str(nodes), "engine.processes": str(processes)}
        _gather(_of_rendezvous(store, next(_meetings)), member, sizes | dict(alike), environment.node_rank(), address)
    elif nodes > 1 and not is_child:
        _go_by(interface(address), loopback=environment.node_rank() != 0)
    if launches:
        start_others()
    return store


def _port(environment: ClusterEnvironment, any_port: bool) -> int:
    """The port at which the processes meet; 0, any that is free, where it is ours to choose."""
    given = os.environ.get("MASTER_PORT")
    if given is None:
        return 0 if any_port else environment.main_port
    if not given.isascii() or not given.strip().isdigit() or not 0 < int(given) < 2**16:
        raise SetupError(f"MASTER_PORT={given!r} is no port: a whole number from 1 to 65535")
    return int(given)


# ---- a store


_meetings = itertools.count()


def _of_rendezvous(store: Store, number: int) -> Any:
    """A store of one meeting: the same processes may meet again, for a second training, at the same store."""
    from torch.distributed import PrefixStore

    return PrefixStore(str(number), store)


def _listen(address: str, port: int, world: int, member: Member | None) -> Any:
    """The store that rank 0 keeps."""
    from torch.distributed import DistError, TCPStore

    _reach(address, None)
    limit = patience()
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    try:
        return TCPStore(address, port, world, timeout=timedelta(seconds=limit), **options)
    except DistError as error:
        if not says(error, Sentence.ADDRESS_IN_USE):
            reason = first_line(error)
            raise SetupError(f"MASTER_ADDR={address}: rank 0 cannot listen at port {port} there: {reason}") from error
        if member is not None and (twice := _is_taken_by_ours(address, port, world, member)):
            raise SetupError(twice) from error
        hint = "set MASTER_PORT to another"
        if os.environ.get("MASTER_PORT") is None:
            hint = "set MASTER_PORT to one that is free"
        elif identity() is None or member is None:
            hint += ", or leave it away and a free one is taken"
        raise SetupError(f"MASTER_PORT: port {port} is in use by another program; {hint}") from error


def _anew(address: str, port: int, rank: int, world: int) -> object:
    """A store for processes that torchrun has started again.

    In torchrun's own, which outlives them, there is still where the former ones were, and with torch 2.15 they would
    connect to those.
    """
    from torch.distributed import TCPStore

    theirs, key, store = _join(address, port, world), f"{KEY}/port/{os.environ[_RESTARTS]}", None
    if rank == 0:
        store = TCPStore(address, 0, world, is_master=True, wait_for_workers=False, multi_tenant=True)
        theirs.set(key, str(store.port))
    os.environ |= {"MASTER_PORT": theirs.get(key).decode(), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return store


def _join(address: str, port: int, world: int) -> Any:
    """The store of rank 0, from another process.

    torch 2.15 waits without end for the answer of a program that accepts connections and says nothing: the thread in
    which it does is left to itself.
    """
    from torch.distributed import TCPStore

    found: list[Any] = []

    def connect() -> None:
        try:
            limit = timedelta(seconds=min(ANSWER, patience()))
            found.append(TCPStore(address, port, world, timeout=limit, is_master=False, wait_for_workers=False))
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=connect, name="meeting", daemon=True)
    thread.start()
    thread.join(2 * min(ANSWER, patience()))
    if not found or isinstance(found[0], Exception):
        what = "what listens there is no torch store, or does not answer"
        raise SetupError(f"MASTER_ADDR={address}, MASTER_PORT={port}: {what}; set both to where rank 0 is started")
    found[0].set_timeout(timedelta(seconds=patience()))
    return found[0]


def _is_taken_by_ours(address: str, port: int, world: int, member: Member) -> str | None:
    """Whether another process with the same rank listens at a port; it is notified, if it still waits."""
    try:
        store = _of_rendezvous(_join(address, port, world), 0)
        if not store.check([f"{KEY}/come/{member.number}"]):
            return None
        return _twice(store, member)
    except (SetupError, RuntimeError):
        return None


def _reach(address: str, port: int | None) -> None:
    """Waits until an address can be reached; with no port, until its name is known."""
    limit = patience()
    until, wait = time.monotonic() + limit, STEP
    while True:
        try:
            if port is None:
                socket.getaddrinfo(address, None)
            else:
                socket.create_connection((address, port), timeout=limit / 4).close()
            return
        except OSError as error:
            if time.monotonic() > until or (port is None and isinstance(error, socket.gaierror)):
                what = f"MASTER_ADDR={address}" + (f", MASTER_PORT={port}" if port else "")
                reason = error.strerror or str(error)
                waited = f"waiting for node 0: rank 0 does not answer there after {limit:g} s"
                raise SetupError(f"{what}: {waited if port else 'this address is not known'}: {reason}") from error
        time.sleep(wait)
        wait = min(1.0, 2 * wait)


# ---- what they say to each other


def _gather(store: Store, member: Member, ours: Mapping[str, str], node: int, address: str) -> None:
    """Waits until all members are there, and sees that they agree."""
    own = interface(address)
    card = {"host": socket.gethostname(), "pid": os.getpid(), "node": node, "alike": ours, "address": own and own[1]}
    try:
        if store.add(f"{KEY}/come/{member.number}", 1) > 1:
            raise SetupError(_twice(store, member))
        store.set(f"{KEY}/is/{member.number}", json.dumps(card))
        cards = _all(store, member) if member.number == 0 else _word_of_rank_0(store, member)
    except RuntimeError as error:  # torch's, of a connection that is gone
        raise SetupError("rank 0 has ended while this process was waiting for the others; it says why") from error
    if len({each["node"] for each in cards}) > 1:
        others = [each["address"] for each in cards if each["node"] != node and each["address"]]
        if own is not None and _is_loopback(own[1]) and not all(map(_is_loopback, others)):
            own = interface(next(other for other in others if not _is_loopback(other)))
        _go_by(own, loopback=True)


def _all(store: Store, member: Member) -> list[dict[str, Any]]:
    """What all members have sent, once they are there; the others get the signal to start, or the reason not to."""
    limit = patience()
    until = time.monotonic() + limit
    while missing := [n for n in range(member.of) if not store.check([f"{KEY}/is/{n}"])]:
        _heed(store, member)
        if time.monotonic() > until:
            named = ", ".join(map(str, missing[:20])) + (" …" if len(missing) > 20 else "")
            of = "machines" if member.word == "node" else "processes"
            message = (
                f"waiting for {member.word} {named}: of {member.of} {of} {len(missing)} did not come in {limit:g} s"
            )
            _end(store, member, f"{message}; start with the same MASTER_ADDR and MASTER_PORT, or set {PATIENCE}")
        time.sleep(STEP)
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


def _word_of_rank_0(store: Store, member: Member) -> list[dict[str, Any]]:
    until = time.monotonic() + patience() + ANSWER  # rank 0 says it who is missing
    while not store.check([f"{KEY}/go"]):
        _heed(store, member)
        if time.monotonic() > until:
            raise SetupError(f"waiting for {member.word} 0: there is a store at its address, and it says nothing")
        time.sleep(STEP)
    return [json.loads(store.get(f"{KEY}/is/{n}")) for n in (0, member.number)]


def _heed(store: Store, member: Member) -> None:
    """Ends with the fault that a member has reported, if one has."""
    if store.check([f"{KEY}/fault"]):
        fault = store.get(f"{KEY}/fault").decode()
        if member.number == 0:
            _end(store, member, fault)
        store.add(f"{KEY}/heard", 1)
        raise SetupError(fault)


def _end(store: Store, member: Member, fault: str) -> None:
    """Rank 0 tells all who wait why nothing begins, and ends with it; its store stays until they have heard."""
    store.set(f"{KEY}/fault", fault)
    until = time.monotonic() + ranks.SOON
    waiting = sum(store.check([f"{KEY}/is/{number}"]) for number in range(1, member.of))
    while store.add(f"{KEY}/heard", 0) < waiting and time.monotonic() < until:
        time.sleep(STEP)
    raise SetupError(fault)


def _twice(store: Store, member: Member) -> str:
    """Two have the same rank: those who wait for others are notified; a run that has begun is left alone."""
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
    """Name and own address of the network interface by which a machine reaches an address; None: not known."""
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
    return ("lo", own) if _is_loopback(own) else None  # 127.0.0.2 and the like belong to it


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _go_by(own: tuple[str, str] | None, loopback: bool) -> None:
    """Lets gloo use a network interface, unless a person has chosen one: its own choice is where the machine's name
    leads to, which between machines is often wrong."""
    if own is not None and (loopback or not _is_loopback(own[1])):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", own[0])
