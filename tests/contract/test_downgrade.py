"""A pair whose UCX fails goes on over gRPC, says so everywhere, and returns to UCX when a probe gets through."""

from __future__ import annotations

import pytest

from coordinator.routing.breaker import PairKey
from coordinator.routing.views import Role
from protos.errors import Code
from tests.support.cores import CoreUnderTest, Reader, scripted
from tests.support.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.timeout(60)


class Pair:
    def __init__(self, under_test: CoreUnderTest, p: ScriptedWorker, d: ScriptedWorker) -> None:
        self.under_test, self.p, self.d = under_test, p, d
        self.served = 0

    async def request(self, *, arrives: bool) -> tuple[str, Reader]:
        """One split request; the transport that it asked for. `arrives` False: its KV does not come, decode computes."""
        self.served += 1
        reader = self.under_test.run(max_tokens=3)
        prefill, prepare = await self.p.leg("prefill", self.served), await self.d.leg("prepare", self.served)
        self.p.sealed(prefill, 1)
        decode = await self.d.leg("decode", self.served)
        if arrives:
            self.d.staged(prepare)
        else:
            self.d.failed(prepare, Code.TRANSFER_FAILED)
        self.d.finished(decode, 2, 3, recomputed=not arrives)
        await reader.end()
        assert reader.tokens == [1, 2, 3]
        transport: str = prepare.transport
        return transport, reader


async def test_downgrade_and_return() -> None:
    p, d = ScriptedWorker("p0", Role.PREFILL), ScriptedWorker("d0", Role.DECODE)
    async with scripted(p, d) as under_test:
        pair, core = Pair(under_test, p, d), under_test.core
        for _ in range(core.settings.routing.breaker_failures):
            assert (await pair.request(arrives=False))[0] == "ucx"
        assert core.open_circuits() == ["p0 to d0 over ucx"]
        assert under_test.metric("breaker_opened_total", code="transfer_failed") == 1

        transport, reader = await pair.request(arrives=True)
        assert transport == reader.ledger.transport == "grpc"
        assert reader.ledger.transport_downgraded
        assert under_test.metric("events_total", event="transport_downgraded") == 1

        key = PairKey(p.view.incarnation, d.view.incarnation, "ucx")
        core.router.breakers._circuits[key].open_until_s = core.clock()  # its pause is over
        transport, reader = await pair.request(arrives=True)
        assert transport == "ucx"
        assert not reader.ledger.transport_downgraded
        assert under_test.metric("events_total", event="transport_probed") == 1
        assert under_test.metric("events_total", event="breaker_closed") == 1
        assert core.open_circuits() == []
        assert (await pair.request(arrives=True))[0] == "ucx"
