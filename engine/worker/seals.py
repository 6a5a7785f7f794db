"""The prefill side's statement about staged KV, and what must be equal before a decode believes it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from engine.worker.ranks import RankFacts
from protos.ids import TransferId, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2


def make_seal(transfer_id: TransferId, prompt: list[int], facts: RankFacts, incarnation: str) -> kv_transfer_pb2.Seal:
    """The worker's seal. `num_chunks` stays 0, "not said": only the ranks know how they cut the prompt."""
    return kv_transfer_pb2.Seal(
        transfer_id=transfer_id,
        prompt_tokens=len(prompt),
        token_hash=token_hash(prompt),
        fingerprint=facts.fingerprint,
        incarnation=incarnation,
        bytes=facts.transfer_bytes(len(prompt)),
    )


def seal_mismatch(
    seal: kv_transfer_pb2.Seal, rank_seals: Sequence[kv_transfer_pb2.Seal], prompt: list[int], prefill_incarnation: str
) -> str:
    """The first thing that does not fit, named; "" when this is the KV of this prompt (rule 3).

    `seal` is the prefill worker's, `rank_seals` came with the bytes. Ranks may hold different layers, so bytes and
    fingerprint are compared with rank 0; every rank has compared its own with its peer at the handshake.
    """
    if len(prompt) < seal.prompt_tokens:
        return f"prompt_tokens: sealed {seal.prompt_tokens}, the prompt has {len(prompt)}"
    own = {"token_hash": token_hash(prompt[: seal.prompt_tokens]), "incarnation": prefill_incarnation}
    for name, value in own.items():
        if getattr(seal, name) != value:
            return f"{name}: the seal is of something else"
    if not rank_seals:
        return "rank seals: none"
    for rank, other in enumerate(rank_seals):
        names = ["transfer_id", "prompt_tokens", "token_hash", "incarnation"]
        if rank == 0:
            names += ["fingerprint", "bytes"]
        for name in names:
            if getattr(seal, name) != getattr(other, name):
                return f"{name}: rank {rank} sealed {getattr(other, name)!r}, the worker {getattr(seal, name)!r}"
    return ""
