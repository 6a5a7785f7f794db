"""What the simulated model "computes": tokens, log-probabilities and KV bytes, as functions of the token history. Pure.

A token depends on every token before it (and on the seed when sampling), never on where the history was cut, so a split
run and a colocated run agree token for token. A block's KV bytes depend on every token up to the block's end, so a block
that went to the wrong place, or carries another prompt, is recognised.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

from engine.protocol import Logprob
from engine.sampling import SamplingParams

_FORCING_BIAS = 100.0


def _pack(token_ids: list[int]) -> bytes:
    return np.asarray(token_ids, dtype="<u4").tobytes()


class History:
    """The digest of a growing token sequence, with the digest at every block boundary so far."""

    __slots__ = ("_block_tokens", "_hash", "_length", "block_hashes")

    def __init__(self, token_ids: list[int], block_tokens: int) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._block_tokens = block_tokens
        self._length = 0
        self.block_hashes: list[bytes] = []
        self.extend(token_ids)

    def __len__(self) -> int:
        return self._length

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens."""
        start = 0
        while start < len(token_ids):
            room = self._block_tokens - self._length % self._block_tokens
            piece = token_ids[start : start + room]
            self._hash.update(_pack(piece))
            self._length += len(piece)
            start += len(piece)
            if len(piece) == room:
                self.block_hashes.append(self._hash.digest())

    def digest(self) -> bytes:
        """16 bytes that name the whole sequence."""
        return self._hash.digest()


def kv_block(prefix_digest: bytes, cell: int, cell_bytes: int) -> npt.NDArray[np.uint8]:
    """The KV bytes of one block in one head of one layer; `prefix_digest` names every token up to the last one in the block."""
    seed = prefix_digest + cell.to_bytes(4, "little")
    return np.frombuffer(hashlib.shake_128(seed).digest(cell_bytes), dtype=np.uint8)


def prompt_block_digests(history: History, prompt_tokens: int, block_tokens: int) -> list[bytes]:
    """One digest per block of a prompt, the last, partial block included. `history` must be exactly the prompt."""
    if len(history) != prompt_tokens:
        raise ValueError("the history is longer than the prompt")
    digests = list(history.block_hashes)
    if prompt_tokens % block_tokens:
        digests.append(history.digest())
    return digests


class Sampler:
    """Draws one request's tokens. `nonce` makes unseeded sampling differ between requests."""

    def __init__(self, params: SamplingParams, *, vocab_size: int, eos_token_id: int | None, model_seed: int, nonce: str) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._eos = eos_token_id
        salt = f"{model_seed}"
        if params.temperature is None or params.temperature > 0:
            salt += f"/seed{params.seed}" if params.seed is not None else f"/nonce{nonce}"
        self._salt = salt.encode()
        self._forced = sorted(t for t, bias in params.logit_bias.items() if bias >= _FORCING_BIAS)
        self._banned = {t for t, bias in params.logit_bias.items() if bias <= -_FORCING_BIAS}

    def sample(self, history: History, emitted: int) -> tuple[int, list[Logprob]]:
        """The next token after `history`, of which `emitted` tokens are this request's own output.

        The second value is the position's log-probabilities when asked for: the chosen token (always of rank 1 here), then
        the alternatives.
        """
        wanted = max(1, self._params.logprobs or 0)
        candidates = self._candidates(history.digest(), emitted, wanted)
        token = candidates[0]
        if self._params.logprobs is None:
            return token, []
        return token, [Logprob(t, -math.log(2.0) * rank, rank) for rank, t in enumerate(candidates, 1)]

    def stops(self, token_id: int) -> bool:
        """True when this token ends the request (the minimum length is not looked at: it is never drawn before that)."""
        if token_id in self._params.stop_token_ids:
            return True
        return token_id == self._eos and not self._params.ignore_eos

    def _candidates(self, digest: bytes, emitted: int, count: int) -> list[int]:
        pool = self._forced or sorted(set(self._params.allowed_token_ids))
        size = len(pool) or self._vocab_size
        found: list[int] = []
        # A draw may be refused; after many refusals go through the vocabulary in order, so that this always ends.
        for attempt in range(16 * count + size):
            if attempt < 16 * count:
                raw = hashlib.blake2b(digest + self._salt + attempt.to_bytes(4, "little"), digest_size=8).digest()
                index = int.from_bytes(raw, "little") % size
            else:
                index = attempt - 16 * count
            token = pool[index] if pool else index
            if token not in found and self._allowed(token, emitted):
                found.append(token)
                if len(found) == count:
                    break
        if not found:
            raise ValueError("sampling_params: no token is allowed")
        return found

    def _allowed(self, token: int, emitted: int) -> bool:
        if token in self._banned:
            return False
        return emitted >= self._params.min_tokens or not (token == self._eos or token in self._params.stop_token_ids)


def prompt_logprobs(token_ids: list[int], alternatives: int, vocab_size: int) -> list[list[Logprob]]:
    """One entry per prompt position, empty for the first: nothing precedes it."""
    rows: list[list[Logprob]] = [[]]
    for token in token_ids[1:]:
        others = [(token + 1 + i) % vocab_size for i in range(alternatives)]
        rows.append([Logprob(token, -1.0, 1), *(Logprob(t, -1.0 - rank, rank) for rank, t in enumerate(others, 2))])
    return rows[: len(token_ids)]
