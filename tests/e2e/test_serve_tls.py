"""The whole system under mutual TLS, over real Ray: it serves, moves KV, notices a dead worker, and speaks to no stranger."""

from __future__ import annotations

from pathlib import Path

import grpc
import httpx
import pytest

from protos.splitpoint.v1 import worker_pb2, worker_pb2_grpc
from tests.e2e.system import ROOT, serve, until
from tests.support.certificates import Authority

pytestmark = pytest.mark.timeout(180)

PROMPT = list(range(1000, 1100))


def test_a_system_under_tls_serves_both_paths_and_no_stranger(checkpoint: Path, tmp_path: Path) -> None:
    tls = Authority(tmp_path).tls()
    sets = [
        f"engine.model_path={checkpoint}",
        "pools.prefill.replicas=1",
        "pools.decode.replicas=1",
        "coordinator.drain_timeout_s=20",
        'kvtransfer.transports=["grpc"]',
        "worker.metrics_port=0",
        *(f"security.{name}={getattr(tls, name)}" for name in ("cert_file", "key_file", "ca_file")),
    ]
    with serve(ROOT / "deploy" / "simulated.toml", tmp_path / "state", sets, ready_s=90) as served:
        answers = []
        for path in ("split", "colocated"):
            *chunks, last = served.generate(PROMPT, path=path)
            answers.append([i for reply in chunks if reply.HasField("chunk") for i in reply.chunk.token_ids])
            assert last.complete.metrics.path == path
            assert last.complete.metrics.transport == ("grpc" if path == "split" else "")
        assert answers[0] == answers[1]
        assert len(answers[0]) == 16
        for worker_id, worker in served.workers().items():
            with grpc.insecure_channel(worker.address) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                with pytest.raises(grpc.RpcError) as refused:
                    stub.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=5)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert list(worker.transports) == ["grpc"]
            assert "transports=grpc" in served.log(worker_id)
            text = httpx.get(f"http://{worker.metrics_address}/metrics", timeout=20, trust_env=False).text
            pulled = 'splitpoint_kv_transfer_seconds_count{rank="0",transport="grpc"} 1.0' in text
            assert pulled == (worker.pool == "decode")
        assert "KV travels by grpc" in served.output.read_text()
        until("idle", served.idle, 10)
