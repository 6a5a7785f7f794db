"""What one gateway knows of the load of each pool: legs sent, prompts whose first token is awaited, latencies. No I/O.

Counts only ever grow, so whoever reads them now and then loses nothing; a gateway that restarts begins again at 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.gateway.latencies import FAILED, bucket_of
from coordinator.routing.views import Role
from protos.splitpoint.v1 import common_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """One pool's part at one gateway.

    `queued_tokens` is a level: prompt tokens of choices whose first token is awaited. `legs` and the latencies, by bucket of
    `latencies`, are counts since the gateway's start. TTFT belongs to the pool that computed the prompt, TPOT to the one that
    decoded. `prompt_tokens` and `output_tokens` are those of the choices in `ttft` and `tpot`, all together.
    """

    queued_tokens: int = 0
    legs: int = 0
    ttft: dict[int, int] = field(default_factory=dict)
    tpot: dict[int, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0


class PoolLoads:
    """Belongs to the gateway's event loop."""

    def __init__(self) -> None:
        self._legs: Counter[str] = Counter()
        self._ttft: dict[str, Counter[int]] = {}
        self._tpot: dict[str, Counter[int]] = {}
        self._prompt_tokens: Counter[str] = Counter()
        self._output_tokens: Counter[str] = Counter()
        self.lacking: Counter[Role] = Counter()
        """Choices that asked for a leg of which no worker was there, since the gateway's start."""

    def sent(self, pool: str) -> None:
        """A worker of `pool` was given a leg."""
        self._legs[pool] += 1

    def ended(
        self,
        prompt_pool: str,
        output_pool: str,
        ledger: common_pb2.StageLedger,
        status: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
    ) -> None:
        """A choice ended: `status` "ok", "error" or "cancelled". The pools are "" for legs that it never had. One that failed
        kept no goal; one that its client ended says nothing but what it had."""
        if prompt_pool and (output_tokens or status == "error"):
            self._ttft.setdefault(prompt_pool, Counter())[bucket_of(ledger.ttft_s) if output_tokens else FAILED] += 1
            self._prompt_tokens[prompt_pool] += prompt_tokens
        if output_pool and status == "error":
            self._tpot.setdefault(output_pool, Counter())[FAILED] += 1
            self._output_tokens[output_pool] += output_tokens
        elif output_pool and output_tokens > 1:
            gap_s = (ledger.e2e_s - ledger.ttft_s) / (output_tokens - 1)
            self._tpot.setdefault(output_pool, Counter())[bucket_of(gap_s)] += 1
            self._output_tokens[output_pool] += output_tokens

    def snapshot(self, waiting: Iterable[tuple[str, int]]) -> dict[str, PoolLoad]:
        """Every pool that was ever used; `waiting` are the pools and prompt tokens of the choices without a first token."""
        queued: Counter[str] = Counter()
        for pool, tokens in waiting:
            queued[pool] += tokens
        return {
            pool: PoolLoad(
                queued_tokens=queued[pool],
                legs=self._legs[pool],
                ttft=dict(self._ttft.get(pool, {})),
                tpot=dict(self._tpot.get(pool, {})),
                prompt_tokens=self._prompt_tokens[pool],
                output_tokens=self._output_tokens[pool],
            )
            for pool in self._legs
        }
