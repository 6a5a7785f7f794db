"""A workload before its tokens: gaps, lengths, and which parts of which prompts are the same. Pure.

Tokens follow from a shape and the seed, so a shape's digest names the workload without holding a trace's hundred million tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.compare.workload import SALT_TOKENS, PlannedRequest, Workload, WorkloadSpec

CACHE_BLOCK_TOKENS = 16
"""A prefix cache finds whole blocks."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt; equal `name` after an equal beginning is equal content."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestShape:
    """`shared` covers the beginning of the prompt; what is behind it is this request's alone. `token_ids`: a prompt as given."""

    gap: float
    input_tokens: int
    output_tokens: int
    shared: tuple[Segment, ...] = ()
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What was done to the source's rows, in requests of this workload (`rows`: in the source)."""

    rows: int = 0
    dropped: int = 0
    input_clipped: int = 0
    output_clipped: int = 0
    input_lengthened: int = 0
    spread: int = 0
    repeated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """One seed's workload. `native_rate_per_s` is the source's own, None where it has none. `notes` is for people."""

    seed: int
    requests: tuple[RequestShape, ...]
    first_token: int
    end_token: int
    counts: Counts = Counts()
    native_rate_per_s: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 over everything that the tokens follow from: equal digests are equal work."""
        head = [self.seed, self.first_token, self.end_token]
        hasher = hashlib.sha256(json.dumps(head).encode())
        for request in self.requests:
            shared = [[segment.name, segment.tokens] for segment in request.shared]
            line = [request.gap, request.input_tokens, request.output_tokens, shared, request.token_ids]
            hasher.update(json.dumps(line).encode())
        return hasher.hexdigest()

    @property
    def is_shared(self) -> bool:
        """Whether prompts share beginnings; else no two do."""
        return any(request.shared for request in self.requests)


def materialise(shapes: Shapes) -> Workload:
    """The workload with its tokens. Prompts that share a beginning also share their salt, so that salting keeps the sharing."""
    known: dict[str, tuple[int, ...]] = {}
    requests = []
    for index, request in enumerate(shapes.requests):
        group = request.shared[0].name if request.shared else ""
        if request.token_ids is not None:
            # A prompt as given keeps its words: the salt gets room of its own before them.
            ids = tuple([shapes.first_token] * SALT_TOKENS) + request.token_ids
        else:
            ids = ()
            for segment in request.shared:
                if segment.name not in known or len(known[segment.name]) < segment.tokens:
                    known[segment.name] = _tokens(shapes, f"segment/{segment.name}", segment.tokens)
                ids += known[segment.name][: segment.tokens]
            ids += _tokens(shapes, f"own/{index}", request.input_tokens - len(ids))
        requests.append(PlannedRequest(request.gap, ids, request.output_tokens, group))
    inputs = [len(request.prompt_token_ids) for request in requests]
    outputs = [request.output_tokens for request in requests]
    spec = WorkloadSpec(
        seed=shapes.seed,
        requests=len(requests),
        prompt_tokens=(min(inputs), max(inputs)),
        output_tokens=(min(outputs), max(outputs)),
        first_token=shapes.first_token,
        end_token=shapes.end_token,
    )
    return Workload(spec, tuple(requests), shapes.digest, hit_share(shapes.requests))


def cut(request: RequestShape, input_tokens: int) -> RequestShape:
    """The first `input_tokens` of the prompt."""
    shared, left = [], input_tokens
    for segment in request.shared:
        if left <= 0:
            break
        shared.append(Segment(segment.name, min(left, segment.tokens)))
        left -= segment.tokens
    ids = None if request.token_ids is None else request.token_ids[:input_tokens]
    return dataclasses.replace(request, input_tokens=input_tokens, shared=tuple(shared), token_ids=ids)


def hit_share(requests: Sequence[RequestShape], *, capacity_tokens: int | None = None) -> float:
    """Share of prompt tokens that an ideal prefix cache has: of this size (least recently used goes first), None: of any size.

    Ideal: one cache for all, filled at once, whole blocks of `CACHE_BLOCK_TOKENS`, prompts only; a segment is kept or lost whole.
    """
    trie: dict[tuple[int, str], int] = {}
    cache: OrderedDict[int, int] = OrderedDict()
    held = hits = total = 0
    for index, request in enumerate(requests):
        path = list(_chain(request, index, trie))
        found = 0
        for node, tokens in path:
            if cache.get(node, 0) < tokens:
                break
            found += tokens
        hits += found // CACHE_BLOCK_TOKENS * CACHE_BLOCK_TOKENS
        total += request.input_tokens
        # The head of a chain is touched last: without it the rest is worth nothing.
        for node, tokens in reversed(path):
            held += max(0, tokens - cache.get(node, 0))
            cache[node] = max(tokens, cache.get(node, 0))
            cache.move_to_end(node)
        while capacity_tokens is not None and held > capacity_tokens:
            held -= cache.popitem(last=False)[1]
    return hits / total if total else 0.0


def _chain(request: RequestShape, index: int, trie: dict[tuple[int, str], int]) -> Iterable[tuple[int, int]]:
    """(node, tokens) of each part of a prompt; a node is a part after its beginning."""
    node = 0
    covered = 0
    for segment in request.shared:
        node = trie.setdefault((node, segment.name), len(trie) + 1)
        covered += segment.tokens
        yield node, segment.tokens
    if covered < request.input_tokens:
        yield trie.setdefault((node, f"own/{index}"), len(trie) + 1), request.input_tokens - covered


def _tokens(shapes: Shapes, name: str, count: int) -> tuple[int, ...]:
    digest = hashlib.sha256(f"{shapes.seed}/{name}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:16], "little"))
    return tuple(generator.integers(shapes.first_token, shapes.end_token, count).tolist())
