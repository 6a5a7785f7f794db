"""The prefill side's statement about staged KV, and what must be equal before a decode believes it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from engine.worker.ranks import RankFacts
from protos.ids import TransferId, token_hash
from protos.splitpoint.v1 import kv_transfer_pb2


def make_seal(transfer_id: TransferId, prompt: list[int], facts: RankFacts, incarnation: str) -> kv_transfer_pb2.Seal:
    """The worker's seal, with what each of its ranks must say. `num_chunks` stays 0, "not said": only the ranks know how they cut
    the prompt."""
    return kv_transfer_pb2.Seal(
        transfer_id=transfer_id,
        prompt_tokens=len(prompt),
        token_hash=token_hash(prompt),
        fingerprint=facts.fingerprint,
        incarnation=incarnation,
        bytes=facts.transfer_bytes(len(prompt)),
        ranks=[
            kv_transfer_pb2.RankSeal(rank=rank, fingerprint=of_rank, bytes=facts.transfer_bytes(len(prompt), rank))
            for rank, of_rank in enumerate(facts.rank_fingerprints)
        ],
    )


def seal_mismatch(
    seal: kv_transfer_pb2.Seal, rank_seals: Sequence[kv_transfer_pb2.Seal], prompt: list[int], prefill_incarnation: str
) -> str:
    """The first thing that does not fit, named; "" when this is the KV of this prompt (rule 3).

    `seal` is the prefill worker's, `rank_seals` came with the bytes, from every prefill rank that one of ours pulled from.
    """
    if len(prompt) < seal.prompt_tokens:
        return f"prompt_tokens: sealed {seal.prompt_tokens}, the prompt has {len(prompt)}"
    own = {"token_hash": token_hash(prompt[: seal.prompt_tokens]), "incarnation": prefill_incarnation}
    for name, value in own.items():
        if getattr(seal, name) != value:
            return f"{name}: the seal is of something else"
    if not rank_seals:
        return "rank seals: none"
    of_rank = {said.rank: said for said in seal.ranks}
    whole = kv_transfer_pb2.RankSeal(fingerprint=seal.fingerprint, bytes=seal.bytes)
    for other in rank_seals:
        for name in ("transfer_id", "prompt_tokens", "token_hash", "incarnation"):
            if getattr(seal, name) != getattr(other, name):
                return _differs(name, other, getattr(seal, name))
        said = of_rank.get(other.rank) if of_rank else whole
        if said is None:
            return f"rank: {other.rank} sealed, the worker has {len(of_rank)}"
        for name in ("fingerprint", "bytes"):
            if getattr(said, name) != getattr(other, name):
                return _differs(name, other, getattr(said, name))
    return ""


def _differs(name: str, of_rank: kv_transfer_pb2.Seal, said: object) -> str:
    return f"{name}: rank {of_rank.rank} sealed {getattr(of_rank, name)!r}, the worker {said!r}"
