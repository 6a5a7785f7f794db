"""Quality and parity of a comparison's arms over the public gRPC API: implements `tools.Checks`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coordinator.compare.load import ArmTarget
from coordinator.compare.quality.client import Arm, Client
from coordinator.compare.quality.measure import QualityError, measure
from coordinator.compare.quality.sample import sample_parity
from coordinator.compare.run import ComparisonError
from coordinator.compare.tools import Place


class GrpcChecks:
    """`targets` gives an arm's target as it is at the time. The client belongs to the caller."""

    def __init__(self, client: Client, model: str, targets: Callable[[str], ArmTarget]) -> None:
        self._client = client
        self._model = model
        self._targets = targets

    async def parity(self, arms: Sequence[str], seed: int, requests: int, place: Place) -> dict[str, Any]:
        """See `tools.Checks`."""
        try:
            found = await sample_parity(self._client, self._arms(arms), seed, requests, prepare=_prepare(place))
        except QualityError as error:
            raise ComparisonError(f"parity: {error}") from error
        return found.as_dict()

    async def quality(self, arms: Sequence[str], place: Place) -> dict[str, Any]:
        """See `tools.Checks`."""
        try:
            found = await measure(self._client, self._arms(arms), model=self._model, prepare=_prepare(place))
        except QualityError as error:
            raise ComparisonError(f"quality: {error}") from error
        return found.as_dict()

    def _arms(self, names: Sequence[str]) -> list[Arm]:
        return [Arm(name, self._targets(name)) for name in names]


def _prepare(place: Place) -> Callable[[Arm], Any]:
    return lambda arm: place(arm.name)
