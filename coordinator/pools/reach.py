"""Whether advertised addresses lead where they should, dialled by those who will need them.

Gateways dial a worker, ranks of one worker those of another. An address that serves on its own node and leads nowhere from
another one looks healthy until the first request, so it is dialled before: from the coordinator's node, where the gateways are,
and between one worker of each pair of nodes, both ways.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

import psutil

from coordinator.pools.probe import dial
from coordinator.pools.reports import Beat
from coordinator.routing.views import WorkerState
from kvtransfer.addresses import is_loopback
from protos.errors import SplitpointError
from protos.ids import WorkerId

DIAL_TIMEOUT_S = 3.0
LASTING = 3
"""A fault that was seen so often in a row is no matter of a moment."""
HERE = "the gateways' node"

Ask = Callable[[WorkerId, Sequence[str]], Awaitable[Mapping[str, str]]]
"""Dials addresses from a worker; the faults by address. May raise `OSError` or `SplitpointError` when it is away."""

log = logging.getLogger(__name__)


async def dial_all(addresses: Iterable[str], timeout_s: float = DIAL_TIMEOUT_S) -> dict[str, str]:
    """Dial each `HOST:PORT` from this process; why not, by address, for those that cannot be reached."""
    wanted = list(dict.fromkeys(addresses))
    faults = await asyncio.gather(*(dial(address, timeout_s) for address in wanted))
    found = zip(wanted, faults, strict=True)
    return {address: str(fault) or f"no answer within {timeout_s:g} s" for address, fault in found if fault is not None}


def interfaces(addresses: Iterable[str]) -> dict[str, str]:
    """The network interface of this node that has each address; "" where none has."""
    held = {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    return {address: held.get(_host(address), "") for address in addresses}


def loopback_settings(hosts: Mapping[str, str]) -> list[str]:
    """A line for each setting, by path, whose address leads other nodes to themselves."""
    return [
        f'{path} is {host} (interface lo), which leads other nodes to themselves: set it to "auto", each node\'s own address'
        for path, host in hosts.items()
        if host != "auto" and is_loopback(host)
    ]


class Reach:
    """Belongs to the coordinator's event loop."""

    def __init__(self, ask: Ask, here: str, pause_s: float) -> None:
        self._ask = ask
        self._here = here
        self._pause_s = pause_s
        self._checked: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._counts: dict[WorkerId, int] = {}
        self.faults: dict[WorkerId, str] = {}
        """Of the last look, by the worker whose address it is."""

    def keep(self, beats: Sequence[Beat]) -> None:
        """Check each worker that serves and was not found well yet; returns at once. `beats` are all workers'."""
        serving = [beat for beat in beats if beat.view.state is WorkerState.READY]
        for gone in self.faults.keys() - {beat.view.worker_id for beat in serving}:
            self.faults.pop(gone)
            self._counts.pop(gone, None)
        for beat in serving:
            name = beat.view.incarnation
            others = list({b.node_id: b for b in serving if b.node_id != beat.node_id}.values())
            if name not in self._checked and name not in self._tasks and (others or beat.node_id != self._here):
                task = self._tasks[name] = asyncio.get_running_loop().create_task(self._check(beat, others))
                task.add_done_callback(partial(self._done, name))

    def _done(self, name: str, task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        if not task.cancelled() and task.exception() is not None:
            log.error("checking addresses failed", exc_info=task.exception())

    def lasting(self) -> list[str]:
        """Faults that have been there for a while."""
        return [fault for worker_id, fault in self.faults.items() if self._counts.get(worker_id, 0) >= LASTING]

    async def _check(self, beat: Beat, others: Sequence[Beat]) -> None:
        try:
            found = await asyncio.gather(self._from_here(beat), *(self._between(beat, other) for other in others))
        except (OSError, SplitpointError) as error:
            log.info("checking the addresses of %s: %s; trying again", beat.view.worker_id, error)
            await asyncio.sleep(self._pause_s)
            return
        faults: dict[WorkerId, str] = {}
        for part in found:
            faults.update(part)
        for well in {beat.view.worker_id, *(other.view.worker_id for other in others)} - faults.keys():
            self.faults.pop(well, None)
            self._counts.pop(well, None)
        for worker_id, fault in faults.items():
            if self.faults.get(worker_id) != fault:
                log.error("%s", fault)
            self.faults[worker_id] = fault
            self._counts[worker_id] = self._counts.get(worker_id, 0) + 1
        if faults:
            await asyncio.sleep(self._pause_s)
        else:
            self._checked.add(beat.view.incarnation)

    async def _from_here(self, beat: Beat) -> dict[WorkerId, str]:
        if beat.node_id == self._here:
            return {}
        return _told(beat, HERE, _loopbacks([beat.view.address]) or await dial_all([beat.view.address]))

    async def _between(self, one: Beat, other: Beat) -> dict[WorkerId, str]:
        """The ranks' addresses of each, dialled from the other."""
        faults: dict[WorkerId, str] = {}
        for owner, dialler in ((one, other), (other, one)):
            addresses = [rank.address for rank in owner.view.ranks]
            found = _loopbacks(addresses) or (await self._ask(dialler.view.worker_id, addresses) if addresses else {})
            faults.update(_told(owner, dialler.view.worker_id, found))
        return faults


def _told(owner: Beat, dialler: str, faults: Mapping[str, str]) -> dict[WorkerId, str]:
    for address, fault in faults.items():
        interface = owner.interfaces.get(address) or "none of its node's"
        return {
            owner.view.worker_id: f"worker {owner.view.worker_id} advertises {address} (interface {interface}), "
            f"which {dialler} cannot reach: {fault}"
        }
    return {}


def _loopbacks(addresses: Iterable[str]) -> dict[str, str]:
    return {a: "a loopback address leads other nodes to themselves" for a in addresses if is_loopback(_host(a))}


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
