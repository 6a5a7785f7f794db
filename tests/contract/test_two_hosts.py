"""Transfers between two hosts: addresses, rate, delay and loss, partitions, death. Every transfer is byte-exact, or an explicit
error before its deadline; afterwards nothing is held on either side.

A host is a process in namespaces of its own (tests/support/netns.py). Rates are the kernel's `tbf`; delay, loss and cuts are
the relay's (tests/support/netns_link.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protos.errors import Code, SplitpointError
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.support.kv_nodes import BLOCK_BYTES
from tests.support.netns import Host, hosts, missing
from tests.support.netns_link import CUT, Way, address, can_limit_rate, can_relay, kernel_link, relay_link, sent_bytes
from tests.support.netns_node import Crossing, agent, settings, settled, status

_LACKS = missing()
pytestmark = [
    pytest.mark.ucx,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(_LACKS), reason=f"two hosts: {_LACKS}"),
]
needs_relay = pytest.mark.skipif(bool(can_relay()), reason=f"the relay: {can_relay()}")
needs_rate = pytest.mark.skipif(bool(_LACKS or can_limit_rate()), reason="the rate: no tbf")
TRANSPORTS = ("ucx", "grpc")


@contextlib.asynccontextmanager
async def two_hosts() -> AsyncIterator[tuple[Host, Host]]:
    async with hosts(agent, "prefill", "decode") as (p, d):
        yield p, d


async def start(p: Host, d: Host, **fields: Any) -> bytes:
    """A node on each; the sender's endpoint."""
    endpoints = await asyncio.gather(*(h.call("start", settings(address(i), **fields)) for i, h in enumerate((p, d))))
    for host in (p, d):
        assert set(await host.call("transports")) == set(TRANSPORTS)
    return bytes(endpoints[0])


async def outcome(crossing: Crossing, remaining_s: float) -> SplitpointError | None:
    """None: every byte arrived. Any other end than one of the two, or a later one, fails the test."""
    begin = time.monotonic()
    try:
        await crossing.whole(remaining_s)
    except SplitpointError as error:
        assert time.monotonic() - begin < remaining_s + 5, "the error came long after the deadline"
        return error
    return None


async def test_payload_crosses_the_link_between_advertised_addresses() -> None:
    blocks = 200
    async with two_hosts() as (p, d), kernel_link(p, d):
        endpoint = await start(p, d)
        assert pb.RankEndpoint.FromString(endpoint).address.startswith(f"{address(0)}:")
        for transport in TRANSPORTS:
            before = await sent_bytes(p)
            await Crossing(p, d, endpoint, transport, blocks).whole(30)
            assert await sent_bytes(p) - before > blocks * BLOCK_BYTES, f"{transport} did not use the network"
        await settled(p, d, timeout_s=10)


async def test_a_node_that_advertises_what_does_not_lead_to_it_does_not_start() -> None:
    """The peer's address, one that nobody has, one without a route, one that is no address."""
    async with two_hosts() as (p, d), kernel_link(p, d):
        await d.call("start", settings(address(1)))
        for wrong in (address(1), "10.77.0.99", "10.99.0.1", "no-such-host.invalid"):
            with pytest.raises(SplitpointError, match="advertise_host") as refused:
                await p.call("start", settings(wrong, bind_host=address(0), handshake_timeout_s=1.0))
            assert refused.value.code is Code.INTERNAL


async def test_ranks_of_one_worker_on_two_hosts_listen_each_at_its_own_address() -> None:
    """One configuration for both, and one actor, on the first host."""
    actor = f"{address(0)}:7000"
    async with two_hosts() as (p, d), kernel_link(p, d):
        auto = settings("auto", bind_host="127.0.0.1")
        ranks = [pb.RankEndpoint.FromString(await host.call("start", auto, "", actor)) for host in (p, d)]
        assert [rank.address.rpartition(":")[0] for rank in ranks] == [address(0), address(1)]
        for transport in TRANSPORTS:
            await Crossing(p, d, ranks[0].SerializeToString(), transport, 20).whole(30)
        await settled(p, d, timeout_s=10)


@needs_rate
async def test_ten_megabit_per_second() -> None:
    """What fits into the time arrives, what does not is refused at the deadline, and the next one arrives again."""
    async with two_hosts() as (p, d), kernel_link(p, d, mbit=10):
        staging = {f"{pool}_staging_bytes": 1024 * BLOCK_BYTES for pool in ("send", "receive")}
        endpoint = await start(p, d, **staging)
        for transport in TRANSPORTS:
            await Crossing(p, d, endpoint, transport, 100).whole(40)  # 0.8 MB take 0.66 s at least
            error = await outcome(Crossing(p, d, endpoint, transport, 900), 3.0)  # 7.4 MB take 5.9 s at least
            assert error is not None
            # What the one before left in the link's queues may also silence this one for its progress time-out.
            assert error.code in (Code.DEADLINE_EXCEEDED, Code.TRANSFER_FAILED), error
            await settled(p, d, timeout_s=30)
        for transport in TRANSPORTS:
            await Crossing(p, d, endpoint, transport, 20).whole(40)
        await settled(p, d, timeout_s=20)


@needs_relay
async def test_200_ms_of_delay_and_2_percent_loss() -> None:
    async with two_hosts() as (p, d), relay_link(p, d) as link:
        endpoint = await start(p, d, handshake_timeout_s=20.0, progress_timeout_s=20.0)
        bad = Way(delay_s=0.2, loss=0.02)
        await link.set(forth=bad, back=bad)
        crossings = [Crossing(p, d, endpoint, transport, 30) for transport in TRANSPORTS * 2]
        ends = await asyncio.gather(*(outcome(crossing, 40) for crossing in crossings))
        counters = await link.counters()
        assert counters["lost"] > 0, f"nothing was lost: {counters}"
        assert None in ends, f"nothing arrived: {ends}"
        await link.set()
        await settled(p, d, timeout_s=30)
        for transport in TRANSPORTS:
            await Crossing(p, d, endpoint, transport, 30).whole(40)
        await settled(p, d, timeout_s=10)


@needs_relay
async def test_a_gateway_reaches_a_distant_worker_and_not_one_that_is_cut_off() -> None:
    """A round trip of 400 ms; then a worker that hears and cannot answer."""
    prompt, patient = list(range(10, 30)), {"connect_timeout_s": 10.0}
    async with two_hosts() as (gateway, d), relay_link(gateway, d) as link:
        address_of_d, incarnation = await d.call("serve", address(1))
        near = await gateway.call("ask", address_of_d, incarnation, prompt, patient)
        far = Way(delay_s=0.2)
        await link.set(forth=far, back=far)
        assert await gateway.call("ask", address_of_d, incarnation, prompt, patient) == near
        assert len(near) == 8
        await link.set(back=CUT)
        with pytest.raises(SplitpointError) as lost:
            await gateway.call("ask", address_of_d, incarnation, prompt, {"connect_timeout_s": 1.0})
        assert lost.value.code is Code.WORKER_LOST


@needs_relay
@pytest.mark.parametrize("silent", ["prefill", "decode"])
async def test_a_partition_in_one_direction(silent: str) -> None:
    """Cut amid a transfer: its receiver gets an error by its deadline, both sides give everything back while it lasts, and
    when it is over the same nodes exchange KV again."""
    async with two_hosts() as (p, d), relay_link(p, d) as link:
        endpoint = await start(p, d, progress_timeout_s=2.0)
        for transport in TRANSPORTS:
            await Crossing(p, d, endpoint, transport, 10).whole(30)
        async with under_way(p, d, endpoint, 12) as (crossings, pulls):
            if silent == "prefill":
                await link.set(forth=CUT)
            else:
                await link.set(back=CUT)
            for crossing in crossings:
                assert await crossing.gather(20)
            for end in await asyncio.gather(*pulls, return_exceptions=True):
                assert isinstance(end, SplitpointError), end
        await settled(p, d, timeout_s=40)
        assert (await link.counters())["cut"] > 0
        await link.set()
        for transport in TRANSPORTS:
            await eventually(p, d, endpoint, transport)
        await settled(p, d, timeout_s=10)


@contextlib.asynccontextmanager
async def under_way(
    p: Host, d: Host, endpoint: bytes, remaining_s: float
) -> AsyncIterator[tuple[list[Crossing], list[asyncio.Task[float]]]]:
    """One transfer per transport whose first chunk is on its way; 80 of its 100 blocks are not gathered yet."""
    crossings = [Crossing(p, d, endpoint, transport, 100) for transport in TRANSPORTS]
    pulls = [asyncio.create_task(crossing.pull(remaining_s)) for crossing in crossings]
    try:
        for crossing in crossings:
            await crossing.reserve(remaining_s)
            assert await crossing.gather(0, 20)
        async with asyncio.timeout(20):
            while (await status(d)).session_states["receiving"] < len(crossings):  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.02)
        yield crossings, pulls
    finally:
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)


async def eventually(p: Host, d: Host, endpoint: bytes, transport: str) -> None:
    """A connection that broke takes a moment to be known as broken; until then attempts may fail, each with its reason, and are
    released, as a gateway does."""
    ends = []
    async with asyncio.timeout(40):
        while (end := await outcome(crossing := Crossing(p, d, endpoint, transport, 10), 10)) is not None:
            ends.append(end)
            await p.call("release", crossing.id)
    assert len(ends) <= 3, ends


@pytest.mark.fault
async def test_a_host_that_dies_amid_a_transfer_costs_its_peer_nothing() -> None:
    """`direct` leaves UCX's error handling off inside a host. Between hosts it stays on: the sender lives and is free again."""
    async with two_hosts() as (p, d), kernel_link(p, d):
        endpoint = await start(p, d, ucx_same_host="direct")
        async with under_way(p, d, endpoint, 20) as (crossings, pulls):
            await d.kill()
            for end in await asyncio.gather(*pulls, return_exceptions=True):
                assert isinstance(end, ConnectionError), end
            for crossing in crossings:
                await crossing.gather(20)
            await settled(p, timeout_s=40)
