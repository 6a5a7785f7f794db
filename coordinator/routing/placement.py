"""Where the two workers of a pair are to be, and which places have both. Pure.

A place is a node, or a rack: the label that `coordinator.placement.rack_label` names, and a node without it is a rack of its own.
A worker whose node is not known is beside nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coordinator.routing.policy import Accept, Candidate
from coordinator.routing.views import Placement, WorkerView
from protos.ids import Incarnation

PLACEMENT_MISSED = "placement_missed"
"""The pair is not where `gateway.routing.placement` prefers it."""
_Numbers = npt.NDArray[np.int64]
_Costs = npt.NDArray[np.float64]


def place_of(view: WorkerView, placement: Placement) -> str:
    """Equal for workers that are in one place."""
    if placement in (Placement.PREFER_RACK, Placement.REQUIRE_RACK) and view.rack:
        return f"rack {view.rack}"
    return f"node {view.node_id}" if view.node_id else f"worker {view.incarnation}"


class Places:
    """The places of a group's members. Made once per membership."""

    def __init__(self, prefill: Sequence[Candidate], decode: Sequence[Candidate], placement: Placement) -> None:
        numbers: dict[str, int] = {}
        self.of: dict[Incarnation, int] = {}
        """Each member's place."""
        decode_at: defaultdict[int, list[Candidate]] = defaultdict(list)
        for candidate in (*prefill, *decode):
            number = numbers.setdefault(place_of(candidate.view, placement), len(numbers))
            self.of[candidate.view.incarnation] = number
        for candidate in decode:
            decode_at[self.of[candidate.view.incarnation]].append(candidate)
        self._decode_at = {number: tuple(members) for number, members in decode_at.items()}
        self._decode = tuple(decode)
        self._apart = placement is Placement.SPREAD
        self._count = len(numbers)
        self._column = prefill[0].load.column
        self._prefill, self._prefill_rows = self._index(prefill)
        self._decode_places, self._decode_rows = self._index(decode)

    def _index(self, members: Sequence[Candidate]) -> tuple[_Numbers, _Numbers]:
        places = np.array([self.of[c.view.incarnation] for c in members], dtype=np.int64)
        return places, np.array([c.load.place for c in members], dtype=np.int64)

    def loads(self, prefill: Sequence[bool] | None, decode: Sequence[bool] | None) -> Loads:
        """By the loads of this moment. `prefill` and `decode` say which members may be taken, None: all of them."""
        best_prefill = self._least(self._prefill, self._prefill_rows, prefill)
        best_decode = self._least(self._decode_places, self._decode_rows, decode)
        partner = _least_elsewhere(best_decode) if self._apart else best_decode
        return Loads(best_prefill + partner, float(best_prefill.min()), float(best_decode.min()))

    def _least(self, places: _Numbers, rows: _Numbers, allowed: Sequence[bool] | None) -> _Costs:
        scores = self._column[rows].astype(np.float64)
        if allowed is not None:
            scores[~np.asarray(allowed)] = np.inf
        least = np.full(self._count, np.inf)
        np.minimum.at(least, places, scores)
        return least

    def partners(self, prefill: Incarnation, accept: Accept | None) -> tuple[Sequence[Candidate], Accept | None]:
        """Those among whom its decode worker is to be picked, and the filter of them."""
        place = self.of[prefill]
        if not self._apart:
            return self._decode_at.get(place, ()), accept

        def elsewhere(view: WorkerView) -> str | None:
            if self.of[view.incarnation] == place:
                return Placement.SPREAD.refusal
            return None if accept is None else accept(view)

        return self._decode, elsewhere


class Loads(NamedTuple):
    """`pairs`: of each place the least loads of a prefill worker there and of a decode worker that is placed well for it, tokens,
    summed; infinite where there are no such two. `prefill` and `decode`: the least ones anywhere."""

    pairs: _Costs
    prefill: float
    decode: float


def open_places(groups: Sequence[Loads], *, required: bool, imbalance_tokens: int) -> list[frozenset[int]]:
    """Of each group, the places that a pair may be taken from: those whose least loaded pair has at most `imbalance_tokens` more
    load than the least loaded pair; of all pairs, or where the placement is `required` of those that are placed well."""
    least = min((float(g.pairs.min()) if required else g.prefill + g.decode for g in groups), default=np.inf)
    if least == np.inf:
        return [frozenset() for _ in groups]
    return [frozenset(np.flatnonzero(g.pairs <= least + imbalance_tokens).tolist()) for g in groups]


def _least_elsewhere(least: _Costs) -> _Costs:
    """For each place, the least of all other ones."""
    if len(least) < 2:
        return np.full(len(least), np.inf)
    first = int(least.argmin())
    others = np.full(len(least), least[first])
    others[first] = np.delete(least, first).min()
    return others
