"""Circuit breakers of workers and of pairs. Pure: the caller brings the time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class _Circuit:
    failures: int = 0
    open_until_s: float | None = None


class Breakers:
    """One circuit per key: an incarnation, or a (prefill, decode) pair of them.

    A circuit opens after `failures` faults in a row. When its cooldown has passed it lets one request try (half-open); that
    one's outcome closes it or opens it again. Only faults are reported here: client errors, cancels and overload are not.
    """

    def __init__(self, *, failures: int, cooldown_s: float) -> None:
        self._failures = failures
        self._cooldown_s = cooldown_s
        self._circuits: dict[Hashable, _Circuit] = {}

    def __bool__(self) -> bool:
        """False when no circuit has a fault, so that the scan need not ask."""
        return bool(self._circuits)

    def allows(self, key: Hashable, now_s: float) -> bool:
        """Whether `key` may be chosen now. Changes nothing."""
        circuit = self._circuits.get(key)
        if circuit is None or circuit.open_until_s is None:
            return True
        return now_s >= circuit.open_until_s

    def chosen(self, key: Hashable, now_s: float) -> None:
        """`key` was chosen; a half-open circuit now waits for that one request, at most a further cooldown."""
        circuit = self._circuits.get(key)
        if circuit is not None and circuit.open_until_s is not None and now_s >= circuit.open_until_s:
            # A probe that never reports (cancelled, say) must not keep the circuit open for ever: the next one is due.
            circuit.open_until_s = now_s + self._cooldown_s

    def failed(self, key: Hashable, now_s: float) -> bool:
        """One fault. Returns True when this opened the circuit."""
        circuit = self._circuits.setdefault(key, _Circuit())
        circuit.failures += 1
        if circuit.failures < self._failures:
            return False
        opened = circuit.open_until_s is None
        circuit.open_until_s = now_s + self._cooldown_s
        return opened

    def succeeded(self, key: Hashable) -> None:
        """Forget the faults of `key`."""
        self._circuits.pop(key, None)

    def forget(self, incarnation: Hashable) -> None:
        """A worker is gone for good: drop its circuit and those of its pairs."""
        gone = [k for k in self._circuits if k == incarnation or (isinstance(k, tuple) and incarnation in k)]
        for key in gone:
            del self._circuits[key]

    def blocked(self, now_s: float) -> frozenset[Hashable]:
        """The keys that may not be chosen now."""
        return frozenset(k for k, c in self._circuits.items() if c.open_until_s is not None and now_s < c.open_until_s)
