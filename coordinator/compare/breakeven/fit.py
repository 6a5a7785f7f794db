"""The model's coefficients from what was measured, by least squares, and how far they can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt
from scipy import optimize

from coordinator.compare.breakeven.model import COLOCATED, SPLIT, Coefficients, Fit, Layout, Model
from coordinator.compare.breakeven.observe import Observation

NAMES = tuple(field.name for field in fields(Coefficients))
FULL_WEIGHT = 100
"""Requests behind a mean from which on more of them add no weight: what is left is the model's own error."""
MAX_QUEUEING = 4.0

Floats = npt.NDArray[np.float64]


class FitError(ValueError):
    """The observations do not determine the model; the text says what is missing."""


def fit(
    found: Sequence[Observation], layout: Layout, kv_bytes_per_token: float, bandwidth_bytes_per_s: float | None = None
) -> Fit:
    """With a bandwidth the overlap is fitted, else what is left of the link's time after it: the two cannot be told apart.

    Raises:
        FitError: an arm is missing, or the lengths or loads are too few to tell the coefficients apart.
    """
    _enough(found)
    start = _start(found, kv_bytes_per_token, bandwidth_bytes_per_s)
    known = "hidden" if bandwidth_bytes_per_s is None else "link_s_per_byte"
    free = [i for i, name in enumerate(NAMES) if name != known]
    # All unknowns are of the size of one, so that one step size suits all.
    scale = np.maximum(np.array(start), _least(found, kv_bytes_per_token))
    upper = np.array([{"queueing": MAX_QUEUEING, "hidden": 1.0}.get(name, np.inf) for name in NAMES]) / scale

    def whole(x: Floats) -> Coefficients:
        values = np.array(start)
        values[free] = x * scale[free]
        return Coefficients(**dict(zip(NAMES, map(float, values), strict=True)))

    def residuals(x: Floats) -> Floats:
        model = Model(coefficients=whole(x), layout=layout, kv_bytes_per_token=kv_bytes_per_token)
        return np.array([r for one in found for r in _residuals(model, one)])

    best = None
    # The queue's share and the hidden share have flat valleys: several beginnings, the best end.
    for queueing, hidden in ((0.5, 0.5), (1.0, 0.0), (1.0, 0.9)):
        begin = np.array(start)
        begin[NAMES.index("queueing")], begin[NAMES.index("hidden")] = queueing, hidden
        x0 = np.clip(begin[free] / scale[free], 1e-9, upper[free] * (1 - 1e-9))
        end = optimize.least_squares(residuals, x0, bounds=(0, upper[free]), loss="soft_l1", f_scale=0.1, max_nfev=200)
        if best is None or end.cost < best.cost:
            best = end
    assert best is not None
    model = Model(coefficients=whole(best.x), layout=layout, kv_bytes_per_token=kv_bytes_per_token)
    return Fit(
        model=model,
        errors=dict(zip([NAMES[i] for i in free], _errors(best, scale[free]), strict=True)),
        residual=_spread(model, found),
        observations=len(found),
    )


def _enough(found: Sequence[Observation]) -> None:
    for arm in (SPLIT, COLOCATED):
        if not any(one.arm == arm for one in found):
            raise FitError(f"no {arm} requests that can be used")
    inputs = [one.input_tokens for one in found]
    loads = [one.load for one in found]
    if max(inputs) < 1.5 * min(inputs):
        raise FitError("prompts of one length only: what a token costs cannot be told from what a step costs")
    if max(loads) < 1.2 * min(loads):
        raise FitError("one rate only: what load does cannot be told")
    if not any(one.tpot_s is not None for one in found):
        raise FitError("outputs of one token only: no decode step was seen")


def _residuals(model: Model, one: Observation) -> list[float]:
    times = model.times(one.arm, one.input_tokens, one.output_tokens, one.load, None, one.mix)
    weight = math.sqrt(min(1.0, one.requests / FULL_WEIGHT))
    found = [weight * math.log(times.ttft_s / one.ttft_s)]
    if one.tpot_s is not None and times.tpot_s is not None:
        found.append(weight * math.log(times.tpot_s / one.tpot_s))
    if one.wait_s is not None:
        # A wait may be nothing: it counts against the time to the first token, not against itself.
        found.append(weight * (times.wait_s - one.wait_s) / one.ttft_s)
    return found


def _start(found: Sequence[Observation], kv_bytes: float, bandwidth: float | None) -> list[float]:
    calm = [one for one in found if one.load <= 1.2 * min(each.load for each in found)]
    step_s = 0.8 * min(one.tpot_s for one in found if one.tpot_s is not None)
    slopes = [max(0.0, one.ttft_s - step_s) / one.input_tokens for one in calm]
    token_s = max(1e-9, 0.8 * min(slopes))
    waits = [(one.wait_s, one.input_tokens) for one in found if one.wait_s is not None]
    transfer_s = max(1e-6, 0.5 * min((wait for wait, _ in waits), default=0.0))
    link = 1 / bandwidth if bandwidth is not None else max(1e-15, max((w / (n * kv_bytes) for w, n in waits), default=0.0))
    return [
        step_s,
        token_s,
        0.1 * step_s,
        0.1 * token_s,
        0.1 * min(one.ttft_s for one in found),
        0.5,
        transfer_s,
        link,
        0.0 if bandwidth is None else 0.5,
    ]


def _least(found: Sequence[Observation], kv_bytes: float) -> Floats:
    """Of each coefficient, what would change nothing that was seen: no unknown is scaled by less."""
    ttft_s = min(one.ttft_s for one in found)
    longest = max(one.input_tokens for one in found)
    small = 1e-3 * ttft_s
    return np.array([small, small / longest, small, small / longest, small, 0.1, small, small / (longest * kv_bytes), 0.1])


def _errors(end: optimize.OptimizeResult, scale: Floats) -> list[float]:
    freedom = max(1, len(end.fun) - len(end.x))
    variance = float(np.sum(end.fun**2)) / freedom
    covariance = np.linalg.pinv(end.jac.T @ end.jac) * variance
    return [float(each) for each in np.sqrt(np.maximum(np.diag(covariance), 0.0)) * scale]


def _spread(model: Model, found: Sequence[Observation]) -> float:
    logs = []
    for one in found:
        times = model.times(one.arm, one.input_tokens, one.output_tokens, one.load, None, one.mix)
        logs.append(math.log(times.ttft_s / one.ttft_s))
        if one.tpot_s is not None and times.tpot_s is not None:
            logs.append(math.log(times.tpot_s / one.tpot_s))
    return math.sqrt(sum(each**2 for each in logs) / len(logs))
