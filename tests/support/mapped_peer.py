"""A process that sends: one node with its staging, told over its input what to do, a JSON line each."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvtransfer.config import KvTransferSettings
from kvtransfer.control import RankControl
from protos.ids import token_hash
from protos.splitpoint.v1 import kv_transfer_pb2 as pb
from tests.support.kv_nodes import TOKEN, make_node, prompt_bytes, small_settings


def settings(**fields: Any) -> KvTransferSettings:
    """Of a rank that shares its staging."""
    return small_settings(transports=("ucx",), default_transport="ucx", ucx_same_host="mapped", **fields)


class Sender:
    """The process, from outside."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.support.mapped_peer"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint = pb.RankEndpoint.FromString(bytes.fromhex(self._line()))

    def stage(self, grant: pb.TransferGrant, tokens: list[int], blocks: int) -> None:
        """Reserve for a prompt and gather its first `blocks`. Returns when it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(
            json.dumps({"grant": grant.SerializeToString().hex(), "tokens": tokens, "blocks": blocks}) + "\n"
        )
        self.process.stdin.flush()
        assert self._line() == "staged"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def sender() -> Iterator[Sender]:
    made = Sender()
    try:
        yield made
    finally:
        made.kill()
        assert made.process.stdin is not None
        assert made.process.stdout is not None
        made.process.stdin.close()
        made.process.stdout.close()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def main() -> None:
    node = make_node(settings())
    endpoint = await asyncio.to_thread(node.start)
    control = RankControl([endpoint], TOKEN)
    _say(endpoint.SerializeToString().hex())
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        grant, tokens, blocks = pb.TransferGrant.FromString(bytes.fromhex(asked["grant"])), asked["tokens"], asked["blocks"]
        await control.reserve(grant, prompt_tokens=len(tokens), token_hash=token_hash(tokens), remaining_s=30.0)
        data = prompt_bytes(tokens)
        view = node.send_view(grant.transfer_id, 0, blocks)
        assert view is not None
        view[:] = data[:blocks]
        node.commit_chunk(grant.transfer_id, 0, blocks, last=blocks == len(data))
        _say("staged")


if __name__ == "__main__":
    asyncio.run(main())
