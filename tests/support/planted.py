"""Records of a comparison whose times follow a known model, with noise: what a break-even map has to find again."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

from coordinator.compare.breakeven.model import COLOCATED, SPLIT, Coefficients, Layout, Model
from tests.support.records import comparison

LINK = 2e9
KV_BYTES = 100_000
TRUTH = Model(
    coefficients=Coefficients(
        step_s=8e-3,
        prompt_token_s=6e-5,
        decode_token_s=1.5e-4,
        context_s=4e-7,
        fixed_s=3e-3,
        queueing=0.7,
        transfer_s=2e-3,
        link_s_per_byte=1 / LINK,
        hidden=0.4,
    ),
    layout=Layout(prefill=1, decode=1, colocated=2, accelerators=2),
    kv_bytes_per_token=KV_BYTES,
)
MANIFEST = {
    "hardware": {"host": "a", "cpu": "c", "gpus": []},
    "settings": {"pools": {"p": {"role": "prefill", "replicas": 1}, "d": {"role": "decode", "replicas": 1}}, "engine": {}},
}
SLO = {"ttft_s": 0.5, "tpot_s": 0.02, "itl_p99_s": None, "ttft_s_per_token": 0.0}


def planted(
    input_tokens: int,
    output_tokens: int,
    loads: Sequence[float],
    *,
    noise: float = 0.0,
    seeds: int = 3,
    requests: int = 20,
    truth: Model = TRUTH,
) -> dict[str, Any]:
    """The JSON of one record; `loads` are requests/s and accelerator, `noise` the spread of each time's logarithm."""
    dice = random.Random(f"{input_tokens}/{output_tokens}")
    record: dict[str, Any] = json.loads(comparison().to_json())
    probes = []
    for seed, load, arm in itertools.product(range(1, seeds + 1), loads, (SPLIT, COLOCATED)):
        outcomes = []
        for index in range(requests):
            times = truth.times(arm, input_tokens, output_tokens, load)
            ttft_s = times.ttft_s * dice.lognormvariate(0, noise)
            tpot_s = (times.tpot_s or 0.0) * dice.lognormvariate(0, noise)
            moved = KV_BYTES * input_tokens if arm == SPLIT else 0
            outcomes.append(
                {
                    **record["probes"][0]["outcomes"][0],
                    "index": index,
                    "prompt_tokens": input_tokens,
                    "wanted_tokens": output_tokens,
                    "tokens": output_tokens,
                    "ttft_s": ttft_s,
                    "e2e_s": ttft_s + (output_tokens - 1) * tpot_s,
                    "gaps_s": [tpot_s] * (output_tokens - 1),
                    "cached_tokens": 0,
                    "ledger": {"transfer_wait_s": times.wait_s, "transfer_bytes": moved, "transfer_s": moved / LINK},
                }
            )
        probes.append(
            {**record["probes"][0], "path": arm, "seed": seed, "rate_per_s": 2 * load, "outcomes": outcomes, "warm_up": 0}
        )
    return record | {"probes": probes, "manifest": MANIFEST, "slo": SLO, "usage": []}


def planted_grid(noise: float = 0.0) -> list[tuple[str, dict[str, Any]]]:
    """Nine records: three prompts by three outputs, three loads each, the highest at 60 % of the busiest engine."""
    found = []
    for input_tokens, output_tokens in itertools.product((256, 1024, 4096), (16, 64, 256)):
        busy = max(TRUTH.times(arm, input_tokens, output_tokens, 1.0).busy for arm in (SPLIT, COLOCATED))
        loads = [share / busy for share in (0.1, 0.35, 0.6)]
        found.append((f"{input_tokens}-{output_tokens}", planted(input_tokens, output_tokens, loads, noise=noise)))
    return found
