"""Which worker should hold the KV of which prompt blocks. Pure.

The index is a model, built from what this gateway sent and corrected by what engines report as cached. A block is known by a
chained hash of everything before it, under the tenant's salt, so two tenants never see each other's prefixes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from protos.ids import Incarnation

SHRINK = 0.9
"""An engine that had less than was expected of it evicts earlier than the model."""
GROW = 1.02
"""One that had it all may hold more: slower up than down, because a prefix that is gone costs more than one overlooked."""
LEAST_SHARE = 0.1
"""Of the stated capacity: below it reports are not believed, they tell of a cache that was reset."""


def block_hashes(token_ids: Sequence[int], block_tokens: int, salt: bytes = b"") -> tuple[int, ...]:
    """One 64-bit hash per whole block of `block_tokens` tokens, each over the block and everything before it."""
    raw = array("I", token_ids).tobytes()
    step = 4 * block_tokens
    digest = hashlib.blake2b(salt, digest_size=8).digest()
    hashes = []
    for begin in range(0, len(raw) - step + 1, step):
        digest = hashlib.blake2b(raw[begin : begin + step], digest_size=8, key=digest).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return tuple(hashes)


class Level(NamedTuple):
    """The workers of bit set `seats` hold the first `blocks` blocks of a prompt, and not the next one."""

    blocks: int
    seats: int


class _Shelf:
    """One worker's blocks, least recently used first, and whether each is known to be computed."""

    __slots__ = ("blocks", "capacity", "seat", "stated")

    def __init__(self, seat: int, capacity: int) -> None:
        self.seat = seat
        self.stated = capacity
        self.capacity = capacity
        self.blocks: OrderedDict[int, bool] = OrderedDict()


class PrefixIndex:
    """At most `max_blocks` entries in all, shared evenly by the members; each member's are evicted as its engine evicts.

    A worker has a seat, a small number that is its bit in every set; a seat is used again after its worker has left.
    """

    def __init__(self, *, block_tokens: int, max_blocks: int) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._shelves: dict[Incarnation, _Shelf] = {}
        self._free_seats: list[int] = []
        self._seats_of: dict[int, int] = {}

    def __len__(self) -> int:
        """Entries: pairs of a worker and a block."""
        return sum(len(shelf.blocks) for shelf in self._shelves.values())

    def members(self, capacity_tokens: Iterable[tuple[Incarnation, int]]) -> list[int]:
        """The workers from now on, and how many tokens of KV each can cache. Who left is forgotten; its seat is returned."""
        wanted = dict(capacity_tokens)
        freed = [self._leave(incarnation) for incarnation in self._shelves.keys() - wanted.keys()]
        share = max(1, self._max_blocks // max(1, len(wanted)))
        for incarnation, tokens in wanted.items():
            stated = min(share, max(1, tokens // self.block_tokens))
            shelf = self._shelves.get(incarnation)
            if shelf is None:
                seat = self._free_seats.pop() if self._free_seats else len(self._shelves)
                self._shelves[incarnation] = _Shelf(seat, stated)
            elif shelf.stated != stated:
                shelf.stated = stated
                shelf.capacity = min(shelf.capacity, stated)
                self._evict(shelf)
        return freed

    def seat(self, incarnation: Incarnation) -> int:
        """The number of a member. Raises `KeyError` for anybody else."""
        return self._shelves[incarnation].seat

    def held(self, incarnation: Incarnation, blocks: Sequence[int]) -> int:
        """How many of the first `blocks` this worker has computed and should still hold; 0 for one that is no member."""
        shelf = self._shelves.get(incarnation)
        if shelf is None:
            return 0
        count = 0
        for block in blocks:
            if not shelf.blocks.get(block, False):
                break
            count += 1
        return count

    def levels(self, blocks: Sequence[int], among: int) -> list[Level]:
        """Who of the seats `among` holds, or is computing, how much of a prompt, the least first; who has nothing is left out."""
        found: list[Level] = []
        holders = among
        depth = 0
        for depth, block in enumerate(blocks):
            still = holders & self._seats_of.get(block, 0)
            if still != holders:
                if depth and (left := holders ^ still):
                    found.append(Level(depth, left))
                holders = still
                if not holders:
                    return found
        if blocks and holders:
            found.append(Level(depth + 1, holders))
        return found

    def sent(self, incarnation: Incarnation, blocks: Sequence[int]) -> None:
        """A prompt goes to a worker: its blocks will be there once computed, the last of them the first to be evicted."""
        shelf = self._shelves.get(incarnation)
        if shelf is None:
            return
        bit, held, seats_of = 1 << shelf.seat, shelf.blocks, self._seats_of
        # A longer prompt than the worker can cache leaves its beginning there.
        for block in reversed(blocks[: shelf.capacity]):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = False
                seats_of[block] = seats_of.get(block, 0) | bit
        self._evict(shelf)

    def not_computed(self, incarnation: Incarnation, blocks: Sequence[int]) -> None:
        """What was `sent` is not going to be computed: forget the blocks that nobody's prompt has computed yet."""
        shelf = self._shelves.get(incarnation)
        if shelf is not None:
            for block in blocks:
                if not shelf.blocks.get(block, True):
                    self._drop(shelf, block)

    def computed(self, incarnation: Incarnation, blocks: Sequence[int], *, expected_tokens: int, cached_tokens: int) -> None:
        """What was `sent` is computed. `expected_tokens` of it were `held` when it was sent and the engine found `cached_tokens`:
        it evicts earlier than the model, or not."""
        shelf = self._shelves.get(incarnation)
        if shelf is None:
            return
        for block in blocks:
            if block in shelf.blocks:
                shelf.blocks[block] = True
        if expected_tokens <= 0:
            return
        if cached_tokens + self.block_tokens < expected_tokens:
            shelf.capacity = max(1, int(shelf.stated * LEAST_SHARE), int(shelf.capacity * SHRINK))
            self._evict(shelf)
        elif shelf.capacity < shelf.stated:
            shelf.capacity = min(shelf.stated, int(shelf.capacity * GROW) + 1)

    def forget_all(self, incarnation: Incarnation) -> None:
        """This worker's prefix cache was reset."""
        shelf = self._shelves.get(incarnation)
        if shelf is not None:
            for block in list(shelf.blocks):
                self._drop(shelf, block)

    def _leave(self, incarnation: Incarnation) -> int:
        self.forget_all(incarnation)
        seat = self._shelves.pop(incarnation).seat
        self._free_seats.append(seat)
        return seat

    def _evict(self, shelf: _Shelf) -> None:
        while len(shelf.blocks) > shelf.capacity:
            self._drop(shelf, next(iter(shelf.blocks)))

    def _drop(self, shelf: _Shelf, block: int) -> None:
        if block not in shelf.blocks:
            return
        del shelf.blocks[block]
        left = self._seats_of[block] & ~(1 << shelf.seat)
        if left:
            self._seats_of[block] = left
        else:
            del self._seats_of[block]
