"""Service level objectives as people write them: `ttft=500ms,tpot=50ms`, `ttft=200ms+0.2ms/token,tpot=2.5x,itl_p99=120ms`. Pure.

A time is absolute (`ms` or `s`) or a multiple (`x`) of the median that the colocated path reaches unloaded; TTFT may grow with
the prompt, by so much a token or, `xline`, as a multiple of the line through the unloaded ones. On shared or small machines only
multiples say anything, and where prompts differ much a multiple of the median asks the impossible of the long ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from coordinator.compare.load import Slo

TTFT_MULTIPLE = 4.0
TPOT_MULTIPLE = 2.5
"""At 2 to 2.5 times the decode step the sign of a comparison is least known."""
NAMES = ("ttft", "tpot", "itl_p99")
_NUMBER = r"(\d+(?:\.\d+)?)"


class SloError(ValueError):
    """The text is no objective; it says which part and what would be."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Either `seconds` (and, for TTFT, `seconds_per_token` of the prompt) or `multiple` of the unloaded median, with `of_line` of
    what is unloaded for the length of the prompt."""

    seconds: float = 0.0
    seconds_per_token: float = 0.0
    multiple: float = 0.0
    of_line: bool = False

    def resolve(self, unloaded_s: float) -> float:
        """The fixed part, seconds."""
        return self.multiple * unloaded_s if self.multiple else self.seconds


@dataclass(frozen=True, slots=True)
class SloSpec:
    """What was asked for, before anything was measured."""

    ttft: Bound = Bound(multiple=TTFT_MULTIPLE)
    tpot: Bound = Bound(multiple=TPOT_MULTIPLE)
    itl_p99: Bound | None = None

    def resolve(self, *, unloaded_ttft_s: float, unloaded_tpot_s: float, ttft_line: tuple[float, float] | None = None) -> Slo:
        """The objective in seconds; multiples of `itl_p99` are of the unloaded TPOT.

        `ttft_line`: unloaded TTFT as seconds and seconds a prompt token; needed where a multiple of it is asked.

        Raises:
            SloError: it is needed and not there.
        """
        ttft_s, per_token_s = self.ttft.resolve(unloaded_ttft_s), self.ttft.seconds_per_token
        if self.ttft.of_line:
            if ttft_line is None:
                raise SloError("ttft: a multiple of the line needs unloaded requests of several lengths")
            ttft_s, per_token_s = (self.ttft.multiple * part for part in ttft_line)
        return Slo(
            ttft_s=ttft_s,
            tpot_s=self.tpot.resolve(unloaded_tpot_s),
            itl_p99_s=None if self.itl_p99 is None else self.itl_p99.resolve(unloaded_tpot_s),
            ttft_s_per_token=per_token_s,
        )


def parse(text: str) -> SloSpec:
    """What is not named stays at its default multiple. Raises `SloError`."""
    found: dict[str, Bound] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in NAMES:
            raise SloError(f"{part.strip()!r}: write NAME=VALUE with a name of {', '.join(NAMES)}")
        if name in found:
            raise SloError(f"{name} is given twice")
        found[name] = _bound(name, value)
    return SloSpec(**found)


def in_words(slo: Slo) -> str:
    """For people, in milliseconds."""
    grows = f" + {slo.ttft_s_per_token * 1e3:.3g} ms/token" if slo.ttft_s_per_token else ""
    gaps = f", ITL p99 {slo.itl_p99_s * 1e3:.4g} ms" if slo.itl_p99_s is not None else ""
    return f"TTFT {slo.ttft_s * 1e3:.4g} ms{grows}, TPOT {slo.tpot_s * 1e3:.4g} ms{gaps}"


def _bound(name: str, value: str) -> Bound:
    if match := re.fullmatch(rf"{_NUMBER}x(line)?", value):
        if float(match[1]) <= 1:
            raise SloError(f"{name}={value}: a multiple must be above 1, or nothing attains it")
        if match[2] and name != "ttft":
            raise SloError(f"{name}={value}: only ttft may grow with the prompt")
        return Bound(multiple=float(match[1]), of_line=bool(match[2]))
    match = re.fullmatch(rf"{_NUMBER}(ms|s)(?:\+{_NUMBER}(ms|s)/token)?", value)
    if match is None:
        raise SloError(
            f"{name}={value}: write 500ms, 0.5s or 4x" + (", or 200ms+0.2ms/token or 4xline" if name == "ttft" else "")
        )
    if match[3] and name != "ttft":
        raise SloError(f"{name}={value}: only ttft may grow with the prompt")
    seconds = float(match[1]) * _unit(match[2])
    per_token = float(match[3]) * _unit(match[4]) if match[3] else 0.0
    if seconds <= 0:
        raise SloError(f"{name}={value}: must be above 0")
    return Bound(seconds=seconds, seconds_per_token=per_token)


def _unit(name: str) -> float:
    return 1e-3 if name == "ms" else 1.0
