"""vLLM with its own NixlConnector, one engine a process, for `splitpoint bench handover` to stand beside: real engines, real
requests, timed where vLLM's rank sees a load begin and end.

`python -m kvtransfer.connector.nixl_engines` reads its description as the first line of standard input and answers each further
line with one line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ASKS_FOR_SEND = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Engine:
    """One engine in this process, so that its rank's calls can be timed."""

    def __init__(self, spec: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(spec["side_channel_port"])
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._begun: dict[str, float] = {}
        self._loads: list[float] = []
        self._reported: list[dict[str, float]] = []
        self._watch()
        self._llm = LLM(
            model=spec["model"],
            load_format="dummy",
            dtype="bfloat16",
            block_size=spec["block_tokens"],
            max_model_len=spec["max_model_len"],
            max_num_batched_tokens=spec["max_model_len"],
            max_num_seqs=16,
            enable_prefix_caching=False,
            enforce_eager=True,
            gpu_memory_utilization=0.4,  # of one GPU that both may share: only a check where the cache is given
            kv_cache_memory_bytes=spec["kv_cache_bytes"],
            kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"),
        )

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ready."""
        return {}

    def prefill(self, request: dict[str, Any]) -> dict[str, Any]:
        """Compute a prompt and keep its blocks for the other engine, named by `params`."""
        output = self._generate(request["tokens"], 1, ASKS_FOR_SEND)
        return {"params": output.kv_transfer_params}

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load a prompt's blocks from the other engine and compute one token. `seconds`: from the rank's `start_load_kv` until
        it reports the request; `reported`: NIXL's own account of the transfer."""
        self._loads.clear()
        self._reported.clear()
        self._generate(request["tokens"], 1, request["params"])
        return {"seconds": self._loads[-1] if self._loads else None, "reported": self._reported[-1] if self._reported else None}

    def _generate(self, tokens: list[int], max_tokens: int, params: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        (output,) = self._llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        return output

    def _watch(self) -> None:
        """Stamp the rank's two calls. The names are vLLM 0.26's to 0.32's."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker as Rank
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats as Stats

        start_load, get_finished, record = Rank.start_load_kv, Rank.get_finished, Stats.record_transfer

        def timed_start(rank: Any, metadata: Any) -> Any:
            now = time.perf_counter()
            self._begun.update((name, now) for name in getattr(metadata, "reqs_to_recv", ()))
            return start_load(rank, metadata)

        def timed_finish(rank: Any) -> Any:
            sent, received = get_finished(rank)
            now = time.perf_counter()
            self._loads += [now - self._begun.pop(name) for name in received if name in self._begun]
            return sent, received

        def noted(stats: Any, result: Any) -> Any:
            seconds = {"transfer_s": result.xferDuration / 1e6, "post_s": result.postDuration / 1e6}
            self._reported.append({**seconds, "descriptors": result.descCount, "bytes": result.totalBytes})
            return record(stats, result)

        Rank.start_load_kv, Rank.get_finished, Stats.record_transfer = timed_start, timed_finish, noted


def main() -> None:
    """Serve lines until there are no more."""
    engine = Engine(json.loads(sys.stdin.readline()))
    commands = {"start": engine.start, "prefill": engine.prefill, "decode": engine.decode}
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.write("REPLY " + json.dumps(commands[request["do"]](request)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
