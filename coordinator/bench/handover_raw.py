"""UCX alone between two GPUs: the bound that `splitpoint bench handover` prints beside its own times.

The receiver asks with one byte and the sender answers with the payload: what a pull is without a protocol, a checksum, a lease.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

from kvtransfer.transports import ucx_raw

WARM_UP = 5


def main() -> None:
    """`python -m coordinator.bench.handover_raw send|receive`; addresses and sizes come over standard input."""
    role = sys.argv[1]
    spec: dict[str, Any] = json.loads(sys.stdin.readline())
    device = torch.device(spec["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    tensors = {size: torch.ones(size, dtype=torch.uint8, device=device) for size in spec["sizes"]}
    payloads: dict[int, Any] = {size: t.numpy() if device.type == "cpu" else t for size, t in tensors.items()}
    port = ucx_raw.RawPort()
    sys.stdout.write("REPLY " + json.dumps({"address": port.address.hex()}) + "\n")
    sys.stdout.flush()
    port.connect(bytes.fromhex(json.loads(sys.stdin.readline())["address"]))
    seconds: dict[int, float] = {}
    for size, payload in payloads.items():
        times = []
        for _ in range(WARM_UP + spec["repeats"]):
            begun = time.perf_counter()
            if role == "receive":
                port.ask()
                port.receive(payload)
            else:
                port.wait_for_ask()
                port.send(payload)
            times.append(time.perf_counter() - begun)
        seconds[size] = statistics.median(times[WARM_UP:])
    sys.stdout.write("REPLY " + json.dumps({"seconds": seconds}) + "\n")
    sys.stdout.flush()
    # The peer may still need this side's progress.
    port.progress_until_closed(sys.stdin)


if __name__ == "__main__":
    main()
