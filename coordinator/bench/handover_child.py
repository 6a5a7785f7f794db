"""One side of `splitpoint bench handover`: a cache without an engine, a real transfer node, told what to do by lines of JSON.

`python -m coordinator.bench.handover_child` reads its description as the first line of standard input and answers each further
line with one line. It ends when its input does.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from kvtransfer import pieces
from kvtransfer.config import KvTransferSettings
from kvtransfer.connector.blocks import EngineBlocks
from kvtransfer.connector.worker import staging_allocator
from kvtransfer.layout import PROTOCOL_VERSION
from kvtransfer.node import KvNode
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

WARM_UP = 5
COMPUTE_PRODUCTS = 10
ASK_TIMEOUT_S = 10.0
QUIET_S = 0.01
"""How long an ask has waited before the gather begins: a prefill takes longer."""


class Side:
    """A cache of `layers` tensors `[blocks, layer_block_bytes]` with random bytes, and its node."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._device = torch.device(spec["device"])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._spec = spec
        self._layers = self._cache(spec["seed"])
        self._blocks = EngineBlocks(self._layers, spec["blocks"])
        settings = KvTransferSettings(**spec["settings"])
        compatibility = pb.KvCompatibility(
            protocol_version=PROTOCOL_VERSION,
            model="bench",
            block_tokens=spec["block_tokens"],
            num_layers=spec["layers"],
            num_kv_heads=1,
            head_dim=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            block_bytes_per_layer=spec["layer_block_bytes"],
        )
        self.node = KvNode(
            settings,
            rank=0,
            incarnation=spec["incarnation"],
            compatibility=compatibility,
            block_bytes=self._blocks.block_bytes,
            control_token=spec["token"],
            memory=staging_allocator(settings.staging_memory, self._device),
        )
        self._endpoint = self.node.start()

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Where the node is, and what it runs on."""
        device = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        return {"endpoint": self._endpoint.SerializeToString().hex(), "device": device, "transports": self.node.describe()}

    def gather(self, request: dict[str, Any]) -> dict[str, Any]:
        """Engine blocks into the send slot, as the connector does it after a step."""
        transfer, ids = bytes.fromhex(request["transfer"]), request["block_ids"]
        rows = self.node.send_view(transfer, 0, len(ids))
        if rows is None:
            raise RuntimeError("the slot is not reserved")
        if request["asked_before"]:
            self._until_fetched()
            nearly = self._compute()
            copy = self._blocks.gather(ids, rows, nearly)
            self.node.commit_chunk(transfer, 0, len(ids), last=True, ready=copy, crcs=None if copy is None else copy.crcs)
            if copy is not None:
                copy.wait()
            return {"sealed_at": time.monotonic()}
        seconds, copy = self._timed(lambda: self._blocks.gather(ids, rows))
        self.node.commit_chunk(transfer, 0, len(ids), last=True, ready=copy, crcs=None if copy is None else copy.crcs)
        return {"seconds": seconds}

    def _until_fetched(self) -> None:
        """Until the peer's ask waits here."""
        give_up_at = time.monotonic() + ASK_TIMEOUT_S
        while not self.node.status().lease_states.get("fetching"):
            if time.monotonic() > give_up_at:
                raise RuntimeError("nobody asked for the transfer")
            time.sleep(0.001)
        time.sleep(QUIET_S)

    def _compute(self) -> Any:
        """Keep the GPU busy for some milliseconds, as a prompt's last layers do while the gather is already in its queue. A mark
        before the last product, which takes 1.4 ms on an H200: what two of 32 layers take of a prompt of 22 ms."""
        mark = None
        if self._device.type == "cuda":
            matrix = torch.zeros((8192, 8192), dtype=torch.bfloat16, device=self._device)
            for left in range(COMPUTE_PRODUCTS, 0, -1):
                mark = self._blocks.mark() if left == 1 else None
                matrix = matrix @ matrix
        return mark

    def scatter(self, request: dict[str, Any]) -> dict[str, Any]:
        """The verified slot into engine blocks; with `check`, whether they now equal the sender's."""
        transfer, ids = bytes.fromhex(request["transfer"]), request["block_ids"]
        verified_at = self.node.verified_at(transfer)
        rows = self.node.receive_view(transfer)
        if rows is None:
            raise RuntimeError("nothing is staged")
        seconds, copy = self._timed(lambda: self._blocks.scatter(rows, ids))
        self.node.scattered(transfer, ready=copy)
        equal = None
        if request.get("check"):
            mine, theirs = torch.tensor(ids), torch.tensor(request["sender_block_ids"])
            sender = self._cache(request["sender_seed"])
            equal = all(
                bool(torch.equal(self._layers[name][mine.to(self._device)], sender[name][theirs.to(self._device)]))
                for name in self._layers
            )
        return {"seconds": seconds, "equal": equal, "verified_at": verified_at}

    def parts(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds (medians) of each device operation alone for these blocks, beside a plain copy of as many bytes."""
        from kvtransfer import cuda_checksum

        ids = request["block_ids"]
        rows = torch.empty((len(ids), self._blocks.block_bytes), dtype=torch.uint8, device=self._device)
        other = torch.empty_like(rows)
        kinds: dict[str, Callable[[], Any]] = {
            "device copy": lambda: other.copy_(rows),
            "gather with checksum": lambda: self._blocks.gather(ids, rows),
            "scatter": lambda: self._blocks.scatter(rows, ids),
            "checksum kernel": lambda: cuda_checksum.launch(rows.view(-1)),
        }
        found = {name: self._median(work, request["repeats"]) for name, work in kinds.items()}
        found["index_select per layer"] = self._median(lambda: self._per_layer(ids), request["repeats"])
        begun = time.perf_counter()
        for _ in range(request["repeats"]):
            cuda_checksum.checksum(rows.view(-1))
        found["checksum, asked and answered"] = (time.perf_counter() - begun) / request["repeats"]
        begun = time.perf_counter()
        for _ in range(request["repeats"]):
            copy = self._blocks.gather(ids, rows)
        found["gather, time of the engine's thread"] = (time.perf_counter() - begun) / request["repeats"]
        assert copy is not None
        copy.wait()
        reference = torch.cat([self._layers[name][torch.tensor(ids, device=self._device)] for name in self._layers], dim=1)
        host = pieces.piece_crcs(rows.cpu().view(-1).numpy())
        return {
            "seconds": found,
            "gather_equal": bool(torch.equal(rows, reference)),
            "crc_equal": copy.crcs is None or bool((copy.crcs.numpy().view("uint32") == host).all()),
        }

    def counters(self, request: dict[str, Any]) -> dict[str, Any]:
        """The node's."""
        return {"counters": self.node.counters()}

    def _cache(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator(self._device).manual_seed(seed)
        shape = (self._spec["blocks"], self._spec["layer_block_bytes"])
        return {
            f"layer{index}": torch.randint(0, 256, shape, dtype=torch.uint8, device=self._device, generator=generator)
            for index in range(self._spec["layers"])
        }

    def _per_layer(self, ids: list[int]) -> None:
        index = torch.tensor(ids, device=self._device)
        for layer in self._layers.values():
            layer.index_select(0, index)

    def _timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds on the device, or of the call on a CPU."""
        if self._device.type == "cpu":
            begun = time.perf_counter()
            result = work()
            return time.perf_counter() - begun, result
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        first.record()
        result = work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3, result

    def _median(self, work: Callable[[], Any], repeats: int) -> float:
        times = [self._timed(work)[0] for _ in range(WARM_UP + repeats)]
        return statistics.median(times[WARM_UP:])


def main() -> None:
    """Serve lines until there are no more."""
    side = Side(json.loads(sys.stdin.readline()))
    commands = {name: getattr(side, name) for name in ("start", "gather", "scatter", "parts", "counters")}
    try:
        for line in sys.stdin:
            request = json.loads(line)
            sys.stdout.write("REPLY " + json.dumps(commands[request["do"]](request)) + "\n")
            sys.stdout.flush()
    finally:
        side.node.stop()


if __name__ == "__main__":
    main()
