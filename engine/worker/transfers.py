"""Which transfers a gateway's stream has brought up, so that they can be released when it breaks. Pure."""

from __future__ import annotations

from collections import OrderedDict

from engine.worker.legs import Monotonic
from protos.ids import TransferId


class TransferRoster:
    """Transfers by stream. A sealed transfer ends on another worker without a word to this one, so entries are also dropped
    `memory_s` after their request's deadline, when the lease has run out by itself."""

    def __init__(self, memory_s: float, now: Monotonic) -> None:
        self._memory_s = memory_s
        self._now = now
        self._owners: OrderedDict[TransferId, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def note(self, stream: int, transfer_id: TransferId, remaining_s: float) -> None:
        """`stream` carries a leg of this transfer."""
        now = self._now()
        while self._owners:
            oldest, (_, until) = next(iter(self._owners.items()))
            if until > now:
                break
            del self._owners[oldest]
        self._owners[transfer_id] = (stream, now + remaining_s + self._memory_s)
        self._owners.move_to_end(transfer_id)

    def forget(self, transfer_id: TransferId) -> None:
        """It is over. Idempotent."""
        self._owners.pop(transfer_id, None)

    def take(self, stream: int) -> list[TransferId]:
        """Everything this stream brought up and nobody ended, the newest first: the oldest are the likeliest to be over."""
        taken = [transfer_id for transfer_id, (owner, _) in reversed(self._owners.items()) if owner == stream]
        for transfer_id in taken:
            del self._owners[transfer_id]
        return taken
