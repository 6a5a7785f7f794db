"""Peers' send staging mapped into this process (kvtransfer/shared_area.py): which of them, how long, and what of one transfer
lies there. Nothing is copied between the two processes: the receiver computes the checksum over the mapping, and its engine
scatters out of it.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable

import numpy as np
from awscrt.checksums import crc32c

from kvtransfer.shared_area import Mapping
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.process_watch import ProcessWatch
from kvtransfer.transports.same_host import ProcessId
from protos.splitpoint.v1 import kv_transfer_pb2 as pb

logger = logging.getLogger(__name__)

MAX_MAPPINGS = 64
"""Of peers that live. A mapping costs address space, and page tables where it was read; the least used makes room."""
PIECE_BYTES = 1024 * 1024
"""Between two pieces a checksum can be stopped."""


class Mappings:
    """By the peer's token. Everything on the node's loop.

    A mapping keeps all of its owner's staging alive, so it is dropped when the owner is dead. Transfers whose bytes lie in it
    keep it until they have let go.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._known: OrderedDict[bytes, tuple[str, Mapping | None]] = OrderedDict()
        self._watch = ProcessWatch()

    def __len__(self) -> int:
        return sum(mapping is not None for _, mapping in self._known.values())

    def of(self, sender: pb.RankEndpoint, process: ProcessId) -> Mapping | None:
        """Of this peer; None where it shares nothing, or what it shares cannot be mapped, which is counted, and logged once."""
        if not sender.HasField("shared_staging"):
            return None
        token: bytes = sender.shared_staging.token
        if token not in self._known:
            self._known[token] = sender.incarnation, self._map(sender, process)
            while len(self._known) > MAX_MAPPINGS:
                self._forget(next(iter(self._known)))
        self._known.move_to_end(token)
        _, mapping = self._known[token]
        if mapping is None:
            self._counters["mapping_refused"] += 1
        return mapping

    def forget(self, incarnation: str) -> None:
        """It is dead."""
        for token, (owner, _) in list(self._known.items()):
            if owner == incarnation:
                self._forget(token)

    def close(self) -> None:
        self._known.clear()
        self._watch.close()

    def _map(self, sender: pb.RankEndpoint, process: ProcessId) -> Mapping | None:
        staging = sender.shared_staging
        try:
            mapping = Mapping(process.pid, staging)
        except TransportError as exc:
            text = "ucx: staging of incarnation %r cannot be mapped, process_vm_readv copies out of it: %s"
            logger.warning(text, sender.incarnation, exc)
            return None
        logger.info("ucx: staging of incarnation %r is mapped", sender.incarnation)
        token: bytes = staging.token
        if not self._watch.watch(token.hex(), process, lambda: self._forget(token)):
            self._counters["mappings_not_watched"] += 1
        return mapping

    def _forget(self, token: bytes) -> None:
        self._known.pop(token, None)
        self._watch.forget(token.hex())


class MappedShare:
    """What of one transfer lies in its sender's mapping: all of it or nothing, as the first chunk says. Then it is a
    `transports.base.Lent`, the sender's slot."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping: Mapping | None = mapping
        self._offset = -1
        self._generation = 0

    @property
    def used(self) -> bool:
        """The transfer lies there."""
        return self._offset >= 0

    def find(self, header: pb.ChunkHeader) -> np.ndarray | None:
        """The chunk where its sender staged it; None when this transfer's bytes have to be copied.

        Raises:
            TransportError: "corrupt", it does not lie where the chunks before it do, or not in a slot of its generation.
        """
        mapping = self._mapping
        offset = None if mapping is None else mapping.offset(header.address, header.bytes)
        if header.index == 0 and offset is not None and header.checksum.algorithm in ("crc32c", "off"):
            self._offset, self._generation = offset - header.offset, header.generation
        if mapping is None or not self.used:
            return None
        if offset is None or offset - header.offset != self._offset or not self.intact():
            raise TransportError("corrupt", f"chunk {header.index} does not lie in the slot that its sender began with")
        return mapping.view(offset, header.bytes)

    def view(self, num_bytes: int) -> np.ndarray:
        """As `Lent`."""
        assert self._mapping is not None
        return self._mapping.view(self._offset, num_bytes)

    def intact(self) -> bool:
        """As `Lent`."""
        return self._mapping is not None and self._mapping.holds(self._offset, self._generation)

    def give_back(self) -> None:
        """As `Lent`."""
        self._mapping = None


def check_all(memory: np.ndarray, *, check: bool, stopped: Callable[[], bool], moved: Callable[[], None]) -> int:
    """The CRC32C of `memory` (0 unless `check`), in pieces. For a thread of its own.

    Raises:
        TransportError: "closed" when `stopped()` said so between two pieces.
    """
    value = 0
    for start in range(0, len(memory) if check else 0, PIECE_BYTES):
        if stopped():
            raise TransportError("closed", "given up while its checksum was computed")
        value = crc32c(memory[start : start + PIECE_BYTES], value)
        moved()
    return value
