"""`splitpoint bench handover`: what one hand-over costs between two GPUs (or, to try it, two CPU processes) without an engine.

Two processes with a cache and a real transfer node each, told to reserve, gather, pull and scatter exactly as workers do. Timed
is a `Pull` as the decode worker's actor makes it, from the call to the answer "verified in staging", and the scatter; "rank" is
the part of it that the decode rank sees. Then the same with the pull asked for before the gather, as a request has it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any

from kvtransfer.control import RankControl
from protos.ids import new_attempt_id, new_capability, new_incarnation, new_transfer_id, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

MIB = 1024 * 1024
ANSWER_TIMEOUT_S = 120.0
TRANSFER_TIMEOUT_S = 30.0
WARM_UP = 5
TOKEN = "bench"
ENGINE_START_S = 240.0
NIXL_REPEATS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverSpec:
    """What is moved. The defaults are an 8B Llama shape: 131,072 bytes a token in 32 layers, blocks of 16 tokens."""

    device: str = "cuda"
    layers: int = 32
    layer_block_bytes: int = 65536
    block_tokens: int = 16
    cache_blocks: int = 512
    sizes_blocks: tuple[int, ...] = (32, 68, 128)
    transports: tuple[str, ...] = ("ucx",)
    checksum: str = "crc32c"
    chunk_bytes: int = 256 * MIB
    repeats: int = 50
    settings: dict[str, Any] = field(default_factory=dict)
    nixl_model: str = ""
    """A folder with the config.json and tokenizer of the shape above: vLLM's NixlConnector is measured too, on the same GPUs."""

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_block_bytes


def gpu_count() -> int:
    """GPUs that torch sees here."""
    import torch

    return int(torch.cuda.device_count())


class Child:
    """A process that answers lines of JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str, *arguments: str, gpu: int | None) -> Child:
        """With `gpu`, the process sees that GPU alone, as Ray would have it."""
        environment = {**os.environ} if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments, stdin=pipe, stdout=pipe, env=environment, limit=MIB
        )
        return cls(process)

    async def tell(self, message: dict[str, Any]) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    async def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """The next line of answer. Raises `RuntimeError` when the process ended, `TimeoutError` when it does not answer."""
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout_s):
            while line := await self._process.stdout.readline():
                if line.startswith(b"REPLY "):
                    reply: dict[str, Any] = json.loads(line.removeprefix(b"REPLY "))
                    return reply
        raise RuntimeError(f"a measuring process ended with status {await self._process.wait()}; its own words are above")

    async def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """One command and its answer."""
        await self.tell({"do": do, **values})
        return await self.answer()

    async def end(self) -> None:
        """Close its input, which ends it; kill it when that does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(15.0):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


async def measure(spec: HandoverSpec) -> dict[str, Any]:
    """Everything, as one JSON-ready record: `parts`, `raw_ucx`, `pulls` (one entry per transport and size).

    Raises:
        RuntimeError: a side failed, or bytes arrived in other places than they belong.
    """
    gpus = (None, None) if spec.device == "cpu" else (0, min(1, gpu_count() - 1))
    record: dict[str, Any] = {"device": spec.device, "block_bytes": spec.block_bytes, "checksum": spec.checksum}
    record["one_gpu"] = spec.device == "cuda" and gpus[0] == gpus[1]
    record["raw_ucx"] = await _raw(spec, gpus) if "ucx" in spec.transports else {}
    record["nixl_connector"] = await _nixl(spec, gpus) if spec.nixl_model else {}
    async with AsyncExitStack() as stack:
        sides = []
        for seed, gpu in enumerate(gpus):
            child = await Child.start("coordinator.bench.handover_child", gpu=gpu)
            stack.push_async_callback(child.end)
            await child.tell(_describe(spec, seed))
            sides.append(child)
        starts = [await child.ask("start") for child in sides]
        record["hardware"] = [start["device"] for start in starts]
        record["transports"] = [start["transports"] for start in starts]
        endpoints = [pb.RankEndpoint.FromString(bytes.fromhex(start["endpoint"])) for start in starts]
        controls = [RankControl([endpoint], TOKEN) for endpoint in endpoints]
        for control in controls:
            stack.push_async_callback(control.close)
        if spec.device == "cuda":
            record["parts"] = {
                blocks: await sides[0].ask("parts", block_ids=_some_blocks(spec, blocks), repeats=spec.repeats)
                for blocks in spec.sizes_blocks
            }
            if not all(part["gather_equal"] and part["crc_equal"] for part in record["parts"].values()):
                raise RuntimeError("a kernel's result differs from the reference on this device")
        rows = [(transport, blocks) for transport in spec.transports for blocks in spec.sizes_blocks]
        record["pulls"] = [await _pulls(spec, sides, controls, endpoints[0], *row) for row in rows]
        record["asked_before"] = [await _asked_before(spec, sides, controls, endpoints[0], *row) for row in rows]
        record["counters"] = [(await child.ask("counters"))["counters"] for child in sides]
    return record


def _describe(spec: HandoverSpec, seed: int) -> dict[str, Any]:
    largest = max(spec.sizes_blocks) * spec.block_bytes
    settings = {
        "transports": spec.transports,
        "default_transport": spec.transports[0],
        "send_staging_bytes": 2 * largest,
        "receive_staging_bytes": 2 * largest,
        "checksum": spec.checksum,
        "chunk_bytes": spec.chunk_bytes,
        "device_chunk_bytes": spec.chunk_bytes,
        **spec.settings,
    }
    return {
        "device": "cuda:0" if spec.device == "cuda" else "cpu",
        "layers": spec.layers,
        "layer_block_bytes": spec.layer_block_bytes,
        "block_tokens": spec.block_tokens,
        "blocks": spec.cache_blocks,
        "settings": settings,
        "incarnation": new_incarnation(),
        "token": TOKEN,
        "seed": seed,
    }


def _some_blocks(spec: HandoverSpec, count: int) -> list[int]:
    """Scattered over the cache, as blocks are after an hour of serving."""
    return random.Random(count).sample(range(spec.cache_blocks), count)


async def _pulls(
    spec: HandoverSpec,
    sides: list[Child],
    controls: list[RankControl],
    sender: pb.RankEndpoint,
    transport: str,
    blocks: int,
) -> dict[str, Any]:
    prefill, decode = sides
    from_ids, to_ids = _some_blocks(spec, blocks), _some_blocks(spec, blocks)[::-1]
    prompt_tokens = blocks * spec.block_tokens
    prompt_hash = token_hash(list(range(prompt_tokens)))
    times: dict[str, list[float]] = {"gather": [], "pull": [], "rank": [], "wire": [], "scatter": [], "total": []}
    for turn in range(WARM_UP + spec.repeats):
        grant = pb.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability())
        await controls[0].reserve(grant, prompt_tokens=prompt_tokens, token_hash=prompt_hash, remaining_s=TRANSFER_TIMEOUT_S)
        transfer = grant.transfer_id.hex()
        gathered = await prefill.ask("gather", transfer=transfer, block_ids=from_ids, asked_before=False)
        begun = perf_counter()
        (pulled,) = await controls[1].pull(
            grant,
            attempt_id=new_attempt_id(),
            senders=[sender],
            prompt_tokens=prompt_tokens,
            token_hash=prompt_hash,
            transport=transport,
            remaining_s=TRANSFER_TIMEOUT_S,
        )
        pull_s = perf_counter() - begun
        check = {"check": True, "sender_seed": 0, "sender_block_ids": from_ids} if turn == 0 else {}
        scattered = await decode.ask("scatter", transfer=transfer, block_ids=to_ids, **check)
        if scattered["equal"] is False:
            raise RuntimeError(f"{transport}, {blocks} blocks: engine blocks differ after the hand-over")
        if turn >= WARM_UP:
            times["gather"].append(gathered["seconds"])
            times["pull"].append(pull_s)
            times["rank"].append(pulled.total_s)
            times["wire"].append(pulled.seconds)
            times["scatter"].append(scattered["seconds"])
            times["total"].append(pull_s + scattered["seconds"])
    return _row(spec, transport, blocks, times)


def _row(spec: HandoverSpec, transport: str, blocks: int, times: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "transport": transport,
        "blocks": blocks,
        "bytes": blocks * spec.block_bytes,
        "median_s": {name: statistics.median(values) for name, values in times.items()},
        "p90_s": {name: sorted(values)[int(0.9 * (len(values) - 1))] for name, values in times.items()},
        "samples_s": times,
    }


async def _asked_before(
    spec: HandoverSpec,
    sides: list[Child],
    controls: list[RankControl],
    sender: pb.RankEndpoint,
    transport: str,
    blocks: int,
) -> dict[str, Any]:
    """What a request pays: the decode rank has asked while the prompt was computed, the clock runs from the gather's end. Both
    sides read one host's monotonic clock."""
    prefill, decode = sides
    from_ids, to_ids = _some_blocks(spec, blocks), _some_blocks(spec, blocks)[::-1]
    prompt_tokens = blocks * spec.block_tokens
    prompt_hash = token_hash(list(range(prompt_tokens)))
    times: dict[str, list[float]] = {"verified": [], "answered": [], "scatter": [], "total": []}
    for turn in range(WARM_UP + spec.repeats):
        grant = pb.TransferGrant(transfer_id=new_transfer_id(), capability=new_capability())
        await controls[0].reserve(grant, prompt_tokens=prompt_tokens, token_hash=prompt_hash, remaining_s=TRANSFER_TIMEOUT_S)
        transfer = grant.transfer_id.hex()

        async def pull(grant: pb.TransferGrant = grant) -> float:
            await controls[1].pull(
                grant,
                attempt_id=new_attempt_id(),
                senders=[sender],
                prompt_tokens=prompt_tokens,
                token_hash=prompt_hash,
                transport=transport,
                remaining_s=TRANSFER_TIMEOUT_S,
            )
            return monotonic()

        pulling = asyncio.create_task(pull())
        gathered = await prefill.ask("gather", transfer=transfer, block_ids=from_ids, asked_before=True)
        answered_at = await pulling
        scattered = await decode.ask("scatter", transfer=transfer, block_ids=to_ids)
        if turn >= WARM_UP:
            verified_s = scattered["verified_at"] - gathered["sealed_at"]
            times["verified"].append(verified_s)
            times["answered"].append(answered_at - gathered["sealed_at"])
            times["scatter"].append(scattered["seconds"])
            times["total"].append(verified_s + scattered["seconds"])
    return _row(spec, transport, blocks, times)


async def _raw(spec: HandoverSpec, gpus: tuple[int | None, int | None]) -> dict[str, float]:
    """Seconds by size, receiver's view."""
    sizes = [blocks * spec.block_bytes for blocks in spec.sizes_blocks]
    described = {"device": "cuda:0" if spec.device == "cuda" else "cpu", "sizes": sizes, "repeats": spec.repeats}
    async with AsyncExitStack() as stack:
        children = []
        for role, gpu in zip(("send", "receive"), gpus, strict=True):
            child = await Child.start("coordinator.bench.handover_raw", role, gpu=gpu)
            stack.push_async_callback(child.end)
            await child.tell(described)
            children.append(child)
        addresses = [(await child.answer())["address"] for child in children]
        for child, address in zip(children, reversed(addresses), strict=True):
            await child.tell({"address": address})
        replies = [await child.answer() for child in children]
    seconds: dict[str, float] = replies[1]["seconds"]
    return seconds


async def _nixl(spec: HandoverSpec, gpus: tuple[int | None, int | None]) -> dict[str, Any]:
    """By bytes: medians of what vLLM's rank sees of a load through its NixlConnector, and of NIXL's own account."""
    found: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        engines = []
        for number, gpu in enumerate(gpus):
            engine = await Child.start("kvtransfer.connector.nixl_engines", gpu=gpu)
            stack.push_async_callback(engine.end)
            await engine.tell(
                {
                    "model": spec.nixl_model,
                    "block_tokens": spec.block_tokens,
                    "max_model_len": max(spec.sizes_blocks) * spec.block_tokens + 64,
                    "kv_cache_bytes": 4 * max(spec.sizes_blocks) * spec.block_bytes,
                    "side_channel_port": 5600 + 10 * number,
                }
            )
            engines.append(engine)
        for engine in engines:
            await engine.tell({"do": "start"})
        for engine in engines:
            await engine.answer(ENGINE_START_S)
        for blocks in spec.sizes_blocks:
            loads = []
            for turn in range(WARM_UP + NIXL_REPEATS):
                tokens = [1000 + (turn * 7919 + place) % 20000 for place in range(blocks * spec.block_tokens)]
                params = (await engines[0].ask("prefill", tokens=tokens))["params"]
                loads.append(await engines[1].ask("decode", tokens=tokens, params=params))
            kept = loads[WARM_UP:]
            if not all(load["seconds"] for load in kept):
                raise RuntimeError("vLLM loaded nothing through its NixlConnector")
            reported = [load["reported"] for load in kept if load["reported"]]
            found[str(blocks * spec.block_bytes)] = {
                "as_its_rank_sees_it_s": statistics.median(load["seconds"] for load in kept),
                "samples_s": [load["seconds"] for load in kept],
                **{name: statistics.median(entry[name] for entry in reported) for name in (reported[0] if reported else ())},
            }
    return found


def table(record: dict[str, Any]) -> str:
    """The record for people, milliseconds."""
    where = f"{record['hardware'][0]}, which both sides share" if record.get("one_gpu") else " and ".join(record["hardware"])
    lines = [f"{where}; checksum {record['checksum']}"]
    for blocks, part in record.get("parts", {}).items():
        lines.append(f"  {int(blocks) * record['block_bytes'] / 1e6:.0f} MB alone:")
        lines += [f"    {name:38} {seconds * 1e3:8.3f} ms" for name, seconds in part["seconds"].items()]
    lines.append("  everything staged, then asked for:")
    lines.append("  transport       MB   raw UCX   gather     wire     rank     pull  scatter  pull + scatter (p90), ms")
    for row in record["pulls"]:
        raw = record["raw_ucx"].get(str(row["bytes"])) if row["transport"] == "ucx" else None
        cells = " ".join(f"{row['median_s'][name] * 1e3:8.3f}" for name in ("gather", "wire", "rank", "pull", "scatter", "total"))
        shown = f"{raw * 1e3:8.3f}" if raw else "       -"
        lines.append(f"  {row['transport']:9} {row['bytes'] / 1e6:8.0f}  {shown} {cells} ({row['p90_s']['total'] * 1e3:.3f})")
    lines.append("  asked for while it is computed, from the gather's end:")
    lines.append("  transport       MB  verified answered  scatter  verified + scatter (p90), ms")
    for row in record["asked_before"]:
        cells = " ".join(f"{row['median_s'][name] * 1e3:8.3f}" for name in ("verified", "answered", "scatter", "total"))
        lines.append(f"  {row['transport']:9} {row['bytes'] / 1e6:8.0f}  {cells} ({row['p90_s']['total'] * 1e3:.3f})")
    for num_bytes, row in record.get("nixl_connector", {}).items():
        seen, own = row["as_its_rank_sees_it_s"] * 1e3, row.get("transfer_s", float("nan")) * 1e3
        lines.append(
            f"  NixlConnector {int(num_bytes) / 1e6:5.0f} MB: {seen:.3f} ms as its rank sees it, {own:.3f} ms by NIXL's account"
        )
    return "\n".join(lines)
