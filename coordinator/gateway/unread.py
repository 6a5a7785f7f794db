"""What a choice has for its client and the client has not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque

from coordinator.gateway.api import Finished, Tokens
from protos.errors import SplitpointError

MAX_UNREAD_EVENTS = 64
"""Beyond it new tokens join the last unread event, so that a slow client costs its tokens and no more."""


class Unread:
    """A queue with one reader, on one event loop. Writers never wait."""

    def __init__(self) -> None:
        self._items: deque[Tokens | Finished | SplitpointError] = deque()
        self._reader: asyncio.Future[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._items)

    def put(self, item: Tokens | Finished | SplitpointError) -> None:
        """Add an item; the reader is told by `wake`."""
        last = self._items[-1] if len(self._items) >= MAX_UNREAD_EVENTS else None
        if isinstance(item, Tokens) and isinstance(last, Tokens):
            last.token_ids.extend(item.token_ids)
            if last.logprobs is not None and item.logprobs is not None:
                last.logprobs.extend(item.logprobs)
        else:
            self._items.append(item)

    def take(self) -> Tokens | Finished | SplitpointError:
        """The oldest item, which there must be."""
        return self._items.popleft()

    def clear(self) -> None:
        """Forget what nobody will read."""
        self._items.clear()

    async def wait(self) -> None:
        """Until the next `wake`."""
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def wake(self) -> None:
        """Let the reader, if it waits, look again."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
