"""The link between two hosts: the kernel's (`veth`, its rate by `tbf`), or a relay of ours where delay, loss or cuts are needed.

Not every kernel has `netem`, so delay, loss and cuts are always the relay's: it reads packets from one host's TUN device and
writes them into the other's when their time has come. What it does to a packet is known, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import heapq
import json
import multiprocessing
import os
import random
import select
import struct
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.netns import CLONE_NEWNET, Host, in_network_of

TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
DEVICE = "link0"
START_TIMEOUT_S = 30.0
PACKETS_AT_ONCE = 64


def address(index: int) -> str:
    """The address of the `index`-th host of a link, from 0."""
    return f"10.77.0.{index + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What happens to packets in one direction."""

    delay_s: float = 0.0
    loss: float = 0.0
    cut: bool = False


CLEAR = Way()
CUT = Way(cut=True)


@contextlib.asynccontextmanager
async def kernel_link(a: Host, b: Host, *, mbit: float | None = None, mtu: int = 9000) -> AsyncIterator[None]:
    """A `veth` pair that ends with the hosts. With `mbit` each direction is held to that rate by `tbf`."""
    await asyncio.to_thread(_lay, a.pid, b.pid, mbit, mtu)
    await _running(a, b)
    yield


def _lay(a: int, b: int, mbit: float | None, mtu: int) -> None:
    make = ["ip", "link", "add", DEVICE, "netns", str(a), "type", "veth", "peer", "name", DEVICE, "netns", str(b)]
    subprocess.run(make, check=True, capture_output=True)
    for index, pid in enumerate((a, b)):
        _up(pid, index, mtu)
        if mbit is not None:
            in_network_of(pid, "tc", *_tbf(mbit))


def _tbf(mbit: float) -> list[str]:
    # A bucket of 2 ms keeps the rate exact where TCP hands over large segments; 100 ms of queue is a switch's.
    burst_bytes = max(64 * 1024, int(mbit * 1e6 / 8 * 0.002))
    return ["qdisc", "add", "dev", DEVICE, "root", "tbf", "rate", f"{mbit}mbit", "burst", str(burst_bytes), "latency", "100ms"]


def _up(pid: int, index: int, mtu: int) -> None:
    in_network_of(pid, "ip", "addr", "add", f"{address(index)}/24", "dev", DEVICE)
    in_network_of(pid, "ip", "link", "set", DEVICE, "mtu", str(mtu), "txqueuelen", "5000", "up")


async def _running(*ends: Host) -> None:
    """The kernel calls a device running a moment after it is up, and UCX looks only once."""
    async with asyncio.timeout(START_TIMEOUT_S):
        for host in ends:
            while not {"UP", "LOWER_UP"} <= set((await _device(host))["flags"]):  # noqa: ASYNC110 - the kernel's
                await asyncio.sleep(0.02)


async def _device(host: Host) -> dict[str, Any]:
    text = await asyncio.to_thread(in_network_of, host.pid, "ip", "-s", "-j", "link", "show", DEVICE)
    found: dict[str, Any] = json.loads(text)[0]
    return found


def can_limit_rate() -> str:
    """Why `kernel_link` cannot hold a rate here, or "" when it can."""
    probe = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"ip link add {DEVICE} type veth && tc {' '.join(_tbf(10))}"],
        capture_output=True,
        text=True,
    )
    return "" if probe.returncode == 0 else f"no tbf: {probe.stderr.strip()}"


async def sent_bytes(host: Host) -> int:
    """What has left the host over its link so far."""
    return int((await _device(host))["stats64"]["tx"]["bytes"])


class Relay:
    """A link whose ways can be changed while packets travel. Made by `relay_link`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def set(self, *, forth: Way = CLEAR, back: Way = CLEAR) -> None:
        """From now on; returns when it holds. `forth` is from the first host to the second. What is on its way stays so."""
        await self._ask({"forth": asdict(forth), "back": asdict(back)})

    async def counters(self) -> dict[str, int]:
        """Packets so far: `forth`, `back`, `lost`, `cut`."""
        counters: dict[str, int] = await self._ask(None)
        return counters

    async def _ask(self, request: Any) -> Any:
        self._pipe.send(request)
        assert await asyncio.to_thread(self._pipe.poll, START_TIMEOUT_S), "the relay does not answer"
        return self._pipe.recv()


_processes = multiprocessing.get_context("forkserver")


@contextlib.asynccontextmanager
async def relay_link(a: Host, b: Host, *, mtu: int = 9000, seed: int = 1) -> AsyncIterator[Relay]:
    """A TUN device in each host and a process that carries packets between them, both ways clear."""
    ours, theirs = _processes.Pipe()
    process = _processes.Process(target=_carry, args=(theirs, a.pid, b.pid, seed), daemon=True)
    process.start()
    theirs.close()
    try:
        assert await asyncio.to_thread(ours.poll, START_TIMEOUT_S), "the relay has not started"
        ours.recv()
        for index, host in enumerate((a, b)):
            await asyncio.to_thread(_up, host.pid, index, mtu)
        await _running(a, b)
        yield Relay(ours)
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        ours.close()


def can_relay() -> str:
    """Why `relay_link` cannot work here, or "" when it can."""
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "no /dev/net/tun"


# ---- in the relay's process


def _tun(pid: int) -> int:
    """A TUN device in the network of process `pid`; its descriptor works from anywhere."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open() as home, Path(f"/proc/{pid}/ns/net").open() as there:
        if libc.setns(there.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
        if libc.setns(home.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    return device


def _carry(pipe: Connection, a: int, b: int, seed: int) -> None:
    ends = {_tun(a): "forth", _tun(b): "back"}
    first, second = ends
    other = {first: second, second: first}
    ways = {"forth": CLEAR, "back": CLEAR}
    counters: Counter[str] = Counter()
    chance = random.Random(seed)
    due: list[tuple[float, int, int, bytes]] = []
    """Packets on their way: when they arrive, the order they came in, the device they go to."""
    number = 0
    pipe.send(True)
    while True:
        wait_s = max(0.0, due[0][0] - time.monotonic()) if due else None
        watched: list[Any] = [*ends, pipe]
        readable, _, _ = select.select(watched, [], [], wait_s)
        if pipe in readable:
            try:
                request = pipe.recv()
            except EOFError:
                return
            if request is not None:
                ways = {direction: Way(**way) for direction, way in request.items()}
            pipe.send(dict(counters))
        for device in ends:
            if device not in readable:
                continue
            way = ways[ends[device]]
            for packet in _packets(device):
                counters[ends[device]] += 1
                if way.cut or chance.random() < way.loss:
                    counters["cut" if way.cut else "lost"] += 1
                    continue
                number += 1
                heapq.heappush(due, (time.monotonic() + way.delay_s, number, other[device], packet))
        while due and due[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(due)
            # A host that has ended or whose queue is full loses the packet, as on any network.
            with contextlib.suppress(OSError):
                os.write(device, packet)


def _packets(device: int) -> list[bytes]:
    packets: list[bytes] = []
    while len(packets) < PACKETS_AT_ONCE:
        try:
            packets.append(os.read(device, 65536))
        except OSError:
            break  # nothing more at present, or its host is gone
    return packets
