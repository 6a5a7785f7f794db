"""The simulated engine's KV blocks: reference counts and a prefix cache with least-recently-used eviction. Pure."""

from __future__ import annotations

from collections import OrderedDict

BlockHash = bytes
"""Names a full block by every token up to its end."""


class BlockPool:
    """A fixed number of blocks.

    A block is *held* (reference count above zero), *cached* (nobody holds it, its hash can still be matched) or *free*.
    Cached blocks count as free: they are evicted, oldest first, when nothing else is left.
    """

    def __init__(self, num_blocks: int, *, caching: bool) -> None:
        self._caching = caching
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references: dict[int, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._by_hash: dict[BlockHash, int] = {}

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def held(self) -> int:
        """Blocks that live requests hold."""
        return len(self._references)

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    def match(self, hashes: list[BlockHash]) -> list[int]:
        """The longest run of blocks, from the first on, that are known by these hashes. Takes no reference."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: list[int]) -> None:
        """Take one reference on each of these matched blocks."""
        for block in blocks:
            self._references[block] = self._references.get(block, 0) + 1
            self._cached.pop(block, None)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None and nothing changed."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """A held block is full: it can be matched from now on. The first block under a hash stays the known one."""
        if block not in self._references:
            raise ValueError(f"block {block} is not held")
        if self._caching and block not in self._hash_of and block_hash not in self._by_hash:
            self._hash_of[block] = block_hash
            self._by_hash[block_hash] = block

    def free(self, blocks: list[int]) -> None:
        """Give back one reference each; the tail of a sequence is evicted before its head.

        Raises `ValueError` for a block that nobody holds.
        """
        for block in reversed(blocks):
            count = self._references.get(block)
            if count is None:
                raise ValueError(f"block {block} is not held")
            if count > 1:
                self._references[block] = count - 1
                continue
            del self._references[block]
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def reset_cache(self) -> bool:
        """Forget every hash. False, and nothing changed, while blocks are held."""
        if self._references:
            return False
        self._free.extend(self._cached)
        self._cached.clear()
        self._hash_of.clear()
        self._by_hash.clear()
        return True

    def _forget(self, block: int) -> None:
        del self._by_hash[self._hash_of.pop(block)]
