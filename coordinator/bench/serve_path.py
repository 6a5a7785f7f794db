"""`splitpoint bench serve-path`: what the split path costs and gains at the gateway, on a system that is up.

One prefill and one decode worker that both serve the colocated path too give both sides of every row: `x-splitpoint-path` picks.
Unloaded requests go one at a time, alternating between the paths; loads are open loops in the order A B B A, each with prompts
that no cache has seen. Parity asks each prompt once on each path and compares tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from coordinator.compare.load import PATHS, GrpcClient, Outcome, RequestFailedError, run_one_at_a_time, run_probe
from coordinator.compare.quality.parity import first_divergence, gap_noise, top_two_gap
from coordinator.compare.stats import percentile
from coordinator.compare.undisturbed import prompt_client
from coordinator.compare.workload import PlannedRequest, Workload, WorkloadSpec, make
from protos.splitpoint.v1 import common_pb2, generation_pb2, generation_pb2_grpc

DEADLINE_S = 60.0
FLOOR_ASKS = 3
CANDIDATES = 5
PARITY_TEXTS = (
    "The capital of France is Paris.\nThe capital of England is",
    "Once upon a time there was a small",
    "Count: 1, 2, 3,",
    "Water boils at one hundred degrees. " * 40 + "Water boils at",
    "The sun rises in the east and sets in the west. " * 150 + "The sun rises in the",
)
GAP_OUTPUT_TOKENS = 16
"""Of an unloaded request: enough to see the second token's gap beside the following ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePathSpec:
    """What is sent. `busy_share`: the load of the prefill worker under which the second token's gap is measured, as a share of
    the rate at which unloaded prefills follow each other."""

    unloaded_prompt_tokens: int = 2048
    unloaded_pairs: int = 40
    busy_share: float = 0.8
    busy_output_tokens: int = 128
    loaded_tokens: tuple[int, int] = (512, 512)
    loaded_rate_per_s: float = 16.0
    seconds_per_load: float = 12.0
    warm_up: int = 6
    end_token: int = 20000
    parity_lengths: tuple[int, ...] = (1, 15, 16, 17, 100, 511, 512, 513, 1500, 3000)
    parity_output_tokens: int = 24


Say = Callable[[str], None]
Cleared = Callable[[], Awaitable[None]]


async def measure(target: str, spec: ServePathSpec, *, say: Say = lambda text: None) -> dict[str, Any]:
    """Everything but parity, as one JSON-ready record.

    Raises:
        RequestFailedError: the service serves no model, cannot be reached, or answers no unloaded request on one of the paths.
    """
    async with GrpcClient(target) as client:
        record: dict[str, Any] = {"model": await client.model(10.0), "spec": dataclasses.asdict(spec)}
        with prompt_client():
            say("warm-up")
            for tokens in dict.fromkeys((spec.unloaded_prompt_tokens, spec.loaded_tokens[0])):
                for path in PATHS:
                    requests = _requests(spec, 900, spec.warm_up, tokens, GAP_OUTPUT_TOKENS, f"warm {path}")
                    await run_one_at_a_time(client, requests, path=path, deadline_s=DEADLINE_S)
            say("unloaded")
            record["unloaded"] = await _unloaded(client, spec)
            prefill_s = record["unloaded"]["split"]["ttft_p50_s"]
            busy = (spec.unloaded_prompt_tokens, spec.busy_output_tokens)
            say(f"prefill {spec.busy_share:.0%} busy")
            record["busy"] = await _loaded(client, spec, busy, spec.busy_share / prefill_s, ("split", "colocated"))
            say(f"{spec.loaded_tokens[0]}/{spec.loaded_tokens[1]} at {spec.loaded_rate_per_s:g}/s")
            order = ("split", "colocated", "colocated", "split")
            record["loaded"] = await _loaded(client, spec, spec.loaded_tokens, spec.loaded_rate_per_s, order)
    return record


async def parity(
    target: str, spec: ServePathSpec, texts: Sequence[str] = (), *, cleared: Cleared | None = None
) -> dict[str, Any]:
    """Greedy answers of both paths to the same prompts, one at a time: `equal`, `compared`, and where answers differ.

    Random token prompts of `parity_lengths`, then `texts`. `floor`: how many prompts the colocated path answers alike when it is
    asked `FLOOR_ASKS` times, by whichever workers: below `compared`, near ties decide beside the hand-over. `moved_nats` is the
    most that the gap between two best candidates differed between the paths while they had said the same, `floor_nats` between
    colocated answers; a difference at a gap of that size is a near tie, and damaged KV would move it by far more.

    `cleared` empties the workers' prefix caches and is awaited before every answer. Without it whoever is asked first computes
    the whole prompt and the others its last block only, in matrices of another shape that round differently; `caches_emptied`
    says which it was.
    """
    prompts: list[Any] = [
        _requests(spec, 700 + length, 1, max(4, length), 1, "parity")[0].prompt_token_ids[:length]
        for length in spec.parity_lengths
    ]
    prompts += texts
    found: dict[str, Any] = {"compared": 0, "equal": 0, "floor": 0, "moved_nats": 0.0, "floor_nats": 0.0, "different": []}
    found["caches_emptied"] = cleared is not None
    async with grpc.aio.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for prompt in prompts:
            answers = []
            for path in ("split", *["colocated"] * FLOOR_ASKS):
                if cleared is not None:
                    await cleared()
                answers.append(await _answer(stub, prompt, path, spec.parity_output_tokens))
            split, *colocated = answers
            found["compared"] += 1
            found["floor"] += all(answer.token_ids == colocated[0].token_ids for answer in colocated)
            found["moved_nats"] = max(found["moved_nats"], gap_noise(split, colocated[0]))
            found["floor_nats"] = max(found["floor_nats"], *(gap_noise(answer, colocated[0]) for answer in colocated[1:]))
            if split.token_ids in [answer.token_ids for answer in colocated]:
                found["equal"] += 1
            else:
                name = prompt if isinstance(prompt, str) else f"{len(prompt)} tokens"
                found["different"].append({"prompt": name[:80], **_parting(split, colocated)})
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens and, for each, the best candidates (coordinator/compare/quality/parity.py)."""

    token_ids: list[int]
    logprobs: list[list[tuple[int, float, int]]]


def _parting(split: Answer, colocated: Sequence[Answer]) -> dict[str, Any]:
    """Where the paths part, and how near a tie that was, in nats: the gap between the two best candidates on each path."""
    position = first_divergence(split, colocated[0])
    found: dict[str, Any] = {"split": split.token_ids, "colocated": [answer.token_ids for answer in colocated]}
    if position is None:
        return found
    split_best, colocated_best = ({token for token, _, _ in side.logprobs[position][:2]} for side in (split, colocated[0]))
    return {
        **found,
        "position": position,
        "same_two_best": split_best == colocated_best,
        "split_gap_nats": top_two_gap(split, position),
        "colocated_gap_nats": top_two_gap(colocated[0], position),
        "candidates": {"split": split.logprobs[position], "colocated": colocated[0].logprobs[position]},
    }


async def _answer(stub: Any, prompt: Any, path: str, output_tokens: int) -> Answer:
    request = generation_pb2.GenerateRequest(
        sampling_params=common_pb2.SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, logprobs=CANDIDATES)
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokenized.input_ids.extend(prompt)
    replies = [r async for r in stub.Generate(request, metadata=(("x-splitpoint-path", path),), timeout=DEADLINE_S)]
    complete = replies[-1].complete
    rows = [[(e.token_id, e.logprob, e.rank) for e in row.entries] for row in complete.logprobs]
    return Answer(list(complete.output_ids), [sorted(row, key=lambda entry: -entry[1]) for row in rows])


def _requests(spec: ServePathSpec, seed: int, count: int, prompt: int, output: int, salt: str) -> tuple[PlannedRequest, ...]:
    return _workload(spec, seed, count, prompt, output, salt).requests


def _workload(spec: ServePathSpec, seed: int, count: int, prompt: int, output: int, salt: str) -> Workload:
    shape = WorkloadSpec(
        seed=seed, requests=count, prompt_tokens=(prompt, prompt), output_tokens=(output, output), end_token=spec.end_token
    )
    return make(shape).salted(salt)


async def _unloaded(client: GrpcClient, spec: ServePathSpec) -> dict[str, Any]:
    outcomes: dict[str, list[Outcome]] = {path: [] for path in PATHS}
    planned = {
        path: _requests(spec, 100, spec.unloaded_pairs, spec.unloaded_prompt_tokens, GAP_OUTPUT_TOKENS, f"unloaded {path}")
        for path in PATHS
    }
    for pair in range(spec.unloaded_pairs):
        # Which path goes first alternates, so that neither always follows the other.
        for path in PATHS if pair % 2 == 0 else PATHS[::-1]:
            outcomes[path] += await run_one_at_a_time(client, [planned[path][pair]], path=path, deadline_s=DEADLINE_S)
    rows = {path: _row(found) for path, found in outcomes.items()}
    for path, row in rows.items():
        if "ttft_p50_s" not in row:
            raise RequestFailedError(f"no unloaded request was answered on the {path} path: {row['failures'][0]}")
    return {**rows, "ttft_difference_p50_s": rows["split"]["ttft_p50_s"] - rows["colocated"]["ttft_p50_s"]}


async def _loaded(
    client: GrpcClient, spec: ServePathSpec, tokens: tuple[int, int], rate_per_s: float, order: Sequence[str]
) -> dict[str, Any]:
    outcomes: dict[str, list[Outcome]] = {path: [] for path in PATHS}
    void = []
    count = max(8, round(rate_per_s * spec.seconds_per_load))
    turns: itertools.count[int] = itertools.count()
    for path in order:
        # The n-th load of each path has the same lengths and gaps.
        turn = len(outcomes[path]) // count
        workload = _workload(spec, 200 + turn, count, *tokens, f"{path} {next(turns)} {tokens}")
        probe = await run_probe(client, workload, path=path, rate_per_s=rate_per_s, deadline_s=DEADLINE_S)
        outcomes[path] += probe.outcomes
        void += [probe.void] if probe.void else []
    return {"rate_per_s": rate_per_s, "tokens": tokens, "void": void, **{p: _row(found) for p, found in outcomes.items()}}


def _row(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Seconds. `second` is the gap from the first to the second token, `gap` any later one."""
    good = [o for o in outcomes if not o.failure]
    row: dict[str, Any] = {"requests": len(outcomes), "failures": sorted({o.failure for o in outcomes if o.failure})}
    if not good:
        return row
    ledgers = [o.ledger for o in good if o.ledger]
    values = {
        "ttft": [o.ttft_s for o in good if o.ttft_s is not None],
        "tpot": [o.tpot_s for o in good if o.tpot_s is not None],
        "second": [o.gaps_s[0] for o in good if o.gaps_s],
        "gap": [gap for o in good for gap in o.gaps_s[1:]],
        "lag": [o.lag_s for o in good],
    }
    for name, found in values.items():
        if found:
            row |= {f"{name}_p50_s": percentile(found, 0.5), f"{name}_p90_s": percentile(found, 0.9)}
    stages = sorted({name for ledger in ledgers for name, value in ledger.items() if isinstance(value, float)})
    row["stages_p50"] = {name: statistics.median(ledger[name] for ledger in ledgers) for name in stages}
    row["samples_s"] = {name: found for name, found in values.items() if name != "gap"}
    return row


def table(record: dict[str, Any]) -> str:
    """The record for people, milliseconds at p50/p90."""
    lines = [
        f"model {record['model']}",
        "                 path       requests       TTFT          2nd token gap     TPOT          failures",
    ]
    for name in ("unloaded", "busy", "loaded"):
        for path in PATHS:
            row = record[name][path]
            cells = "  ".join(
                f"{row[f'{key}_p50_s'] * 1e3:6.1f}/{row[f'{key}_p90_s'] * 1e3:6.1f}" if f"{key}_p50_s" in row else "-"
                for key in ("ttft", "second", "tpot")
            )
            rate = record[name].get("rate_per_s")
            label = name if rate is None else f"{name} {rate:.1f}/s"
            lines.append(f"{label:16} {path:10} {row['requests']:8}  {cells}  {len(row['failures'])} {row['failures'][:1]}")
    lines.append(f"unloaded TTFT, split minus colocated, p50: {record['unloaded']['ttft_difference_p50_s'] * 1e3:+.2f} ms")
    return "\n".join(lines)
