"""Circuit breakers of workers and of pairs over a transport. Pure: the caller brings the time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from protos.ids import Incarnation

MAX_DOUBLINGS = 3
"""A circuit whose probes keep failing is tried less and less often, down to an eighth."""


class PairKey(NamedTuple):
    """Two workers and how KV travels between them: each transport of a pair has a circuit of its own, so that a pair whose
    UCX is broken goes on over gRPC."""

    prefill: Incarnation
    decode: Incarnation
    transport: str


class CircuitState(StrEnum):
    CLOSED = "closed"  # may be chosen
    OPEN = "open"  # may not, until its cooldown has passed
    HALF_OPEN = "half_open"  # the cooldown has passed: the next choice is the probe


@dataclass(slots=True)
class _Circuit:
    failures: int = 0
    openings: int = 0
    probing: bool = False
    open_until_s: float | None = None


class Breakers:
    """One circuit per key: an incarnation, or a `PairKey`.

    A circuit opens after `failures` faults in a row. When its cooldown has passed it lets one request try (half-open); that
    one's outcome closes it or opens it again, for twice as long each time, at most `MAX_DOUBLINGS` times. Only faults are
    reported here: client errors, cancels and overload are not.
    """

    def __init__(self, *, failures: int, cooldown_s: float) -> None:
        self._failures = failures
        self._cooldown_s = cooldown_s
        self._circuits: dict[Hashable, _Circuit] = {}

    def __bool__(self) -> bool:
        """False when no circuit has a fault, so that the scan need not ask."""
        return bool(self._circuits)

    def state(self, key: Hashable, now_s: float) -> CircuitState:
        """Where the circuit of `key` is."""
        circuit = self._circuits.get(key)
        if circuit is None or circuit.open_until_s is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now_s < circuit.open_until_s else CircuitState.HALF_OPEN

    def allows(self, key: Hashable, now_s: float) -> bool:
        """Whether `key` may be chosen now. Changes nothing."""
        return self.state(key, now_s) is not CircuitState.OPEN

    def chosen(self, key: Hashable, now_s: float) -> bool:
        """`key` was chosen; a half-open circuit now waits for that one request, at most a further cooldown. True for a probe."""
        if self.state(key, now_s) is not CircuitState.HALF_OPEN:
            return False
        # A probe that never reports (cancelled, say) must not keep the circuit open for ever: the next one is due.
        circuit = self._circuits[key]
        circuit.open_until_s, circuit.probing = now_s + self._cooldown_s, True
        return True

    def failed(self, key: Hashable, now_s: float) -> bool:
        """One fault. Returns True when this opened the circuit."""
        circuit = self._circuits.setdefault(key, _Circuit())
        circuit.failures += 1
        if circuit.failures < self._failures:
            return False
        opened = circuit.open_until_s is None
        # Requests that were under way when it opened report the same trouble: only a probe makes the pause longer.
        if opened or circuit.probing:
            circuit.open_until_s = now_s + self._cooldown_s * 2.0 ** min(circuit.openings, MAX_DOUBLINGS)
            circuit.openings += 1
            circuit.probing = False
        return opened

    def succeeded(self, key: Hashable) -> bool:
        """Forget the faults of `key`. True when that closed an open circuit."""
        circuit = self._circuits.pop(key, None)
        return circuit is not None and circuit.open_until_s is not None

    def forget(self, incarnation: Hashable) -> None:
        """A worker is gone for good: drop its circuit and those of its pairs."""
        gone = [k for k in self._circuits if k == incarnation or (isinstance(k, tuple) and incarnation in k)]
        for key in gone:
            del self._circuits[key]

    def blocked(self, now_s: float) -> frozenset[Hashable]:
        """The keys that may not be chosen now."""
        return frozenset(k for k, c in self._circuits.items() if c.open_until_s is not None and now_s < c.open_until_s)
